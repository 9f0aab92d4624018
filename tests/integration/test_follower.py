"""Read models that follow the log: the same rows for every split, crash and rebuild."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import psycopg
import pytest

from adapters.event_log.event_store import EventStore, decode
from adapters.event_log.postgres import Connection, connect
from adapters.event_log.writer import Writer
from domain.log.aggregate import Aggregate
from projections.follower import Follower
from projections.projection import Projection, Statement
from tests.conftest import Database
from tests.counter import (
    CONTEXT,
    TOTALS_TABLES,
    Add,
    CountingIds,
    SteppingClock,
    Totals,
    add,
    open_counter,
)

PATIENCE_SECONDS = 30
FOLLOWED_TABLE = """
    CREATE TABLE test_followed (
        id text PRIMARY KEY, total bigint NOT NULL, events bigint NOT NULL, position bigint NOT NULL
    );
    GRANT SELECT, INSERT, UPDATE, DELETE ON test_followed TO gridline;
"""


class Followed(Totals):
    """The same rows as Totals, kept by the follower."""

    name = "test_followed"
    tables = ("test_followed",)

    def __init__(self, *, fail_at: int = 0) -> None:
        self.fail_at = fail_at

    def apply(self, event: Aggregate.Event, position: int) -> Sequence[Statement]:
        if self.fail_at and position >= self.fail_at:
            raise ValueError("crash")
        return [
            (text.replace("test_totals", "test_followed"), parameters)
            for text, parameters in super().apply(event, position)
        ]


@pytest.fixture
def writer(database: Database) -> Iterator[Writer]:
    with psycopg.connect(database.owner_url) as owner:
        owner.execute(TOTALS_TABLES + FOLLOWED_TABLE)  # type: ignore[arg-type]
    writer = Writer(
        EventStore(database.application_url, projections=[Totals()]),
        clock=SteppingClock(),
        ids=CountingIds(),
    )
    yield writer
    writer.close()


@pytest.fixture
def connecting(database: Database) -> Callable[[], Connection]:
    return lambda: connect(database.application_url, name="gridline-projections")


def fill(writer: Writer, *, counters: int = 5, additions: int = 20, start: int = 0) -> None:
    ids = [f"cnt_{n}" for n in range(start, start + counters)]
    for counter_id in ids:
        writer.submit(open_counter, counter_id, CONTEXT).result(PATIENCE_SECONDS)
    futures = [
        writer.submit(add, Add(ids[n % counters], amount=n), CONTEXT) for n in range(additions)
    ]
    for future in futures:
        future.result(PATIENCE_SECONDS)


def table(connecting: Callable[[], Connection], name: str) -> list[dict[str, object]]:
    with connecting() as connection:
        return connection.execute(f"SELECT * FROM {name} ORDER BY id").fetchall()  # type: ignore[arg-type]


def follower_of(
    connecting: Callable[[], Connection], projection: Projection, *, batch_size: int = 200
) -> Follower:
    return Follower(connecting, decode, [projection], batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 200])
def test_every_split_into_batches_gives_the_inline_rows(
    writer: Writer, connecting: Callable[[], Connection], batch_size: int
) -> None:
    fill(writer)
    follower = follower_of(connecting, Followed(), batch_size=batch_size)
    assert follower.lag()["test_followed"] > 0
    assert follower.catch_up() == 25
    assert follower.catch_up() == 0
    assert follower.lag() == {"test_followed": 0}
    assert table(connecting, "test_followed") == table(connecting, "test_totals")


def test_a_crash_between_batches_repeats_and_loses_nothing(
    writer: Writer, connecting: Callable[[], Connection]
) -> None:
    fill(writer)
    for fail_at in (4, 11, 12, 20):
        with pytest.raises(ValueError, match="crash"):
            follower_of(connecting, Followed(fail_at=fail_at), batch_size=3).catch_up()
    follower_of(connecting, Followed()).catch_up()
    assert table(connecting, "test_followed") == table(connecting, "test_totals")


def test_two_followers_at_once_do_no_harm(
    writer: Writer, connecting: Callable[[], Connection]
) -> None:
    fill(writer, additions=200)
    followers = [follower_of(connecting, Followed(), batch_size=5) for _ in range(3)]
    threads = [threading.Thread(target=follower.catch_up) for follower in followers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert table(connecting, "test_followed") == table(connecting, "test_totals")


def test_a_rebuild_gives_equal_rows_followed_or_inline(
    writer: Writer, connecting: Callable[[], Connection], database: Database
) -> None:
    fill(writer)
    follower = follower_of(connecting, Followed(), batch_size=4)
    follower.catch_up()
    before = table(connecting, "test_totals")
    with psycopg.connect(database.owner_url) as owner:
        owner.execute("UPDATE test_totals SET total = 7")
        owner.execute("UPDATE test_followed SET total = 8")
    for projection in (Totals(), Followed()):
        assert follower.rebuild(projection) == 25
    assert table(connecting, "test_totals") == before
    assert table(connecting, "test_followed") == before
    fill(writer, start=100)
    follower.catch_up()
    assert table(connecting, "test_followed") == table(connecting, "test_totals")


def test_a_rebuild_during_writing_and_following_gives_equal_rows(
    writer: Writer, connecting: Callable[[], Connection]
) -> None:
    follower = follower_of(connecting, Followed())
    follower.start()
    rebuilder = follower_of(connecting, Followed())
    fill(writer, counters=2, additions=0)
    futures = [writer.submit(add, Add("cnt_0", amount=n), CONTEXT) for n in range(300)]
    for projection in (Followed(), Totals(), Followed()):
        rebuilder.rebuild(projection)
    for future in futures:
        future.result(PATIENCE_SECONDS)
    rebuilder.catch_up()
    follower.close()
    rows = table(connecting, "test_totals")
    assert rows[0]["total"] == sum(range(300))
    assert table(connecting, "test_followed") == rows


def test_a_follower_whose_connection_dies_goes_on(
    writer: Writer, connecting: Callable[[], Connection], database: Database
) -> None:
    follower = follower_of(connecting, Followed())
    follower.start()
    for round_number in range(3):
        fill(writer, counters=1, additions=3, start=round_number)
        await_no_lag(follower)
        with connect(database.superuser_url, name="test") as superuser:
            superuser.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'gridline-projections' AND"
                " datname = current_database()"
            )
    fill(writer, counters=1, start=10)
    await_no_lag(follower)
    follower.close()
    assert table(connecting, "test_followed") == table(connecting, "test_totals")


def await_no_lag(follower: Follower) -> None:
    waiting = threading.Event()
    for _ in range(500):
        try:
            if follower.lag() == {"test_followed": 0}:
                return
        except psycopg.OperationalError:
            pass
        waiting.wait(0.01)
    raise AssertionError("the follower does not catch up")
