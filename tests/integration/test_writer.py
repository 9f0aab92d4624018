"""The writer: merging, refusals, races between processes, and PostgreSQL going away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from adapters.embedded.postgres import APPLICATION, OWNER, Postgres
from adapters.event_log.event_store import EventStore
from adapters.event_log.memory_store import MemoryWriter
from adapters.event_log.migrate import migrate
from adapters.event_log.postgres import connect
from adapters.event_log.writer import Writer
from domain.errors import (
    ConcurrentUpdate,
    DuplicateDelivery,
    LimitExceeded,
    NotFound,
    Overloaded,
)
from domain.log.unit_of_work import CommandWriter, PersonalRow, UnitOfWork
from tests.conftest import Database
from tests.counter import (
    CONTEXT,
    TOTALS_TABLES,
    Add,
    Counter,
    CountingIds,
    SteppingClock,
    Totals,
    add,
    add_then_break,
    add_then_refuse,
    open_counter,
    remember_name,
)

MakeWriter = Callable[[], Writer]
PATIENCE_SECONDS = 60


def writer_on(url: str) -> Writer:
    store = EventStore(url, projections=[Totals()])
    return Writer(store, clock=SteppingClock(), ids=CountingIds())


@pytest.fixture
def make_writer(database: Database) -> Iterator[MakeWriter]:
    """Each call is another process's writer on the same log."""
    with psycopg.connect(database.owner_url) as owner:
        owner.execute(TOTALS_TABLES)
    made: list[Writer] = []

    def make() -> Writer:
        made.append(writer_on(database.application_url))
        return made[-1]

    yield make
    for writer in made:
        writer.close()


@pytest.fixture(params=["postgres", "memory"])
def writer(request: pytest.FixtureRequest) -> CommandWriter:
    """What every writer does alike."""
    if request.param == "memory":
        return MemoryWriter(clock=SteppingClock(), ids=CountingIds())
    made: CommandWriter = request.getfixturevalue("make_writer")()
    return made


def outcome(future: Future[Any]) -> Any:
    error = future.exception(PATIENCE_SECONDS)
    return type(error) if error else future.result()


def outcomes(futures: list[Future[Any]]) -> list[Any]:
    assert not wait(futures, PATIENCE_SECONDS).not_done
    return [outcome(future) for future in futures]


def query(url: str, text: str) -> list[dict[str, Any]]:
    with connect(url, name="test") as connection:
        return connection.execute(text).fetchall()  # type: ignore[arg-type]


def total(writer: CommandWriter, id: str = "cnt_1") -> int:
    def read(uow: UnitOfWork, command: str) -> int:
        return uow.get(Counter, command).total

    return writer.submit(read, id, CONTEXT).result(PATIENCE_SECONDS)


# Every writer -----------------------------------------------------------------------------------


def test_a_command_answers_what_its_handler_returned(writer: CommandWriter) -> None:
    assert outcome(writer.submit(open_counter, "cnt_1", CONTEXT)) == "cnt_1"
    futures = [writer.submit(add, Add("cnt_1"), CONTEXT) for _ in range(100)]
    assert outcomes(futures) == list(range(1, 101))


def test_a_refusal_reaches_its_caller_and_leaves_no_trace(writer: CommandWriter) -> None:
    writer.submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    futures = [writer.submit(add, Add("cnt_1", ceiling=3), CONTEXT) for _ in range(5)]
    assert outcomes(futures) == [1, 2, 3, LimitExceeded, LimitExceeded]
    assert outcome(writer.submit(add, Add("cnt_none"), CONTEXT)) is NotFound
    assert total(writer) == 3


@pytest.mark.parametrize(
    ("handler", "error"), [(add_then_refuse, LimitExceeded), (add_then_break, AssertionError)]
)
def test_a_handler_that_fails_after_its_first_change_spoils_no_other(
    writer: CommandWriter, handler: Callable[[UnitOfWork, Add], int], error: type[Exception]
) -> None:
    writer.submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    handlers = [add, handler, add, handler, add]
    futures = [writer.submit(each, Add("cnt_1"), CONTEXT) for each in handlers]
    assert outcomes(futures) == [1, error, 2, error, 3]
    assert total(writer) == 3


def test_a_position_is_accepted_once_and_never_falls(writer: CommandWriter) -> None:
    writer.submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)

    def deliver(position: int, partition: str = "c/progress/0") -> Any:
        tracking = (partition, position)
        return outcome(writer.submit(add, Add("cnt_1"), CONTEXT, tracking=tracking))

    assert [deliver(position) for position in (0, 0, 1, 5, 3, 5, 6)] == [
        1,
        DuplicateDelivery,
        2,
        3,
        DuplicateDelivery,
        DuplicateDelivery,
        4,
    ]
    assert deliver(0, partition="c/progress/1") == 5


def test_a_refused_command_records_no_position(writer: CommandWriter) -> None:
    full = writer.submit(add, Add("cnt_1"), CONTEXT, tracking=("c/progress/0", 7))
    assert outcome(full) is NotFound
    again = writer.submit(open_counter, "cnt_1", CONTEXT, tracking=("c/progress/0", 7))
    assert outcome(again) == "cnt_1"


def test_a_position_alone_can_be_recorded(writer: CommandWriter) -> None:
    def ignore(uow: UnitOfWork, position: int) -> None:
        uow.tracking("c/progress/0", position)

    assert outcome(writer.submit(ignore, 4, CONTEXT)) is None
    assert outcome(writer.submit(ignore, 4, CONTEXT)) is DuplicateDelivery


async def test_asyncio_callers_await_the_same(writer: CommandWriter) -> None:
    await writer.execute(open_counter, "cnt_1", CONTEXT)
    assert await writer.execute(add, Add("cnt_1"), CONTEXT) == 1
    with pytest.raises(LimitExceeded):
        await writer.execute(add, Add("cnt_1", ceiling=0), CONTEXT)


# PostgreSQL -------------------------------------------------------------------------------------


def test_waiting_commands_share_commits(make_writer: MakeWriter, database: Database) -> None:
    writer = make_writer()
    futures = [writer.submit(open_counter, f"cnt_{n}", CONTEXT) for n in range(256)]
    assert outcomes(futures) == [f"cnt_{n}" for n in range(256)]
    [commits] = query(
        database.owner_url, "SELECT count(DISTINCT xmin::text) AS n FROM gridline_events"
    )
    assert commits["n"] <= 64


def test_after_a_reply_the_inline_rows_show_it(make_writer: MakeWriter, database: Database) -> None:
    writer = make_writer()
    writer.submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    writer.submit(add, Add("cnt_1", amount=5), CONTEXT).result(PATIENCE_SECONDS)
    assert query(database.application_url, "SELECT total, events FROM test_totals") == [
        {"total": 5, "events": 2}
    ]


def test_what_one_process_frees_another_can_take_at_once(make_writer: MakeWriter) -> None:
    api, worker = make_writer(), make_writer()
    api.submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    take = Add("cnt_1", ceiling=1)
    assert outcome(api.submit(add, take, CONTEXT)) == 1
    for _ in range(20):
        assert outcome(api.submit(add, take, CONTEXT)) is LimitExceeded
        assert outcome(worker.submit(add, Add("cnt_1", amount=-1), CONTEXT)) == 0
        assert outcome(api.submit(add, take, CONTEXT)) == 1


def test_processes_that_race_for_a_limit_never_pass_it(
    make_writer: MakeWriter, database: Database
) -> None:
    writers = [make_writer() for _ in range(3)]
    writers[0].submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    futures = [writers[n % 3].submit(add, Add("cnt_1", ceiling=100), CONTEXT) for n in range(300)]
    results = outcomes(futures)
    # Under such a race a command may give up, but then it has changed nothing.
    assert set(results) <= {*range(1, 101), LimitExceeded, ConcurrentUpdate}
    accepted = [result for result in results if isinstance(result, int)]
    assert sorted(accepted) == list(range(1, len(accepted) + 1))
    assert len(accepted) == 100 or ConcurrentUpdate in results
    assert [total(writer) for writer in writers] == [len(accepted)] * 3
    assert query(database.owner_url, "SELECT total FROM test_totals") == [{"total": len(accepted)}]


def test_one_of_many_deliveries_of_a_message_counts(make_writer: MakeWriter) -> None:
    writers = [make_writer() for _ in range(4)]
    writers[0].submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    results = outcomes(
        [
            writers[n % 4].submit(add, Add("cnt_1"), CONTEXT, tracking=("c/progress/0", 9))
            for n in range(8)
        ]
    )
    assert sorted(map(str, results)) == ["1"] + [str(DuplicateDelivery)] * 7


def test_a_reader_that_follows_several_writers_passes_over_no_event(
    make_writer: MakeWriter, database: Database
) -> None:
    writers = [make_writer() for _ in range(4)]
    store = EventStore(database.application_url)
    futures = [writers[n % 4].submit(open_counter, f"cnt_{n}", CONTEXT) for n in range(800)]
    followed: list[int] = []
    while True:
        done = not wait(futures, timeout=0).not_done
        seen = followed[-1] if followed else 0
        followed += [position for position, _, _ in store.versions_after(seen, limit=50)]
        if done and followed[-1] == store.last_position():
            break
    store.close()
    stored = query(database.owner_url, "SELECT notification_id AS id FROM gridline_events")
    assert followed == sorted(row["id"] for row in stored)
    assert len(followed) == 800


def test_two_processes_that_create_one_id_make_it_once(make_writer: MakeWriter) -> None:
    def open_once(uow: UnitOfWork, id: str) -> str:
        if uow.find(Counter, id) is None:
            open_counter(uow, id)
            return "made"
        return "found"

    first, second = make_writer(), make_writer()
    for number in range(10):
        futures = [each.submit(open_once, f"cnt_{number}", CONTEXT) for each in (first, second)]
        assert sorted(outcomes(futures)) == ["found", "made"]


def test_a_personal_row_that_breaks_a_constraint_fails_its_command_alone(
    make_writer: MakeWriter, database: Database
) -> None:
    writer = make_writer()

    def person(id: str) -> PersonalRow:
        return PersonalRow("test_people", {"id": id}, {"name": "Ann", "metadata": None})

    futures = [
        writer.submit(open_counter, "cnt_1", CONTEXT),
        writer.submit(remember_name, person("p"), CONTEXT),
        writer.submit(remember_name, person("q"), CONTEXT),
        writer.submit(add, Add("cnt_1"), CONTEXT),
    ]
    made, first, second, added = outcomes(futures)
    assert (made, first, added) == ("cnt_1", None, 1)
    assert second.__name__ == "RowConflict"
    assert query(database.owner_url, "SELECT id FROM test_people") == [{"id": "p"}]


def test_long_streams_get_snapshots_and_load_from_them(
    make_writer: MakeWriter, database: Database
) -> None:
    writer = make_writer()
    writer.submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    for _ in range(34):
        writer.submit(add, Add("cnt_1"), CONTEXT).result(PATIENCE_SECONDS)
    assert query(database.owner_url, "SELECT originator_version FROM gridline_snapshots") == [
        {"originator_version": 30}
    ]
    assert total(make_writer()) == 34


def test_closing_finishes_what_is_queued_and_takes_no_more(make_writer: MakeWriter) -> None:
    writer = make_writer()
    futures = [writer.submit(open_counter, f"cnt_{n}", CONTEXT) for n in range(100)]
    writer.close()
    assert outcomes(futures) == [f"cnt_{n}" for n in range(100)]
    assert outcome(writer.submit(open_counter, "cnt_x", CONTEXT)) is Overloaded


def test_a_terminated_connection_is_replaced(make_writer: MakeWriter, database: Database) -> None:
    writer = make_writer()
    writer.submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    for expected in range(1, 4):
        query(
            database.superuser_url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'gridline-writer' AND datname = current_database()",
        )
        assert outcome(writer.submit(add, Add("cnt_1"), CONTEXT)) == expected


def test_a_log_that_stays_locked_delays_commands_and_fails_none(
    make_writer: MakeWriter, database: Database
) -> None:
    make_writer().submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    store = EventStore(
        database.application_url,
        projections=[Totals()],
        library_settings={"POSTGRES_LOCK_TIMEOUT": "1"},
    )
    writer = Writer(store, clock=SteppingClock(), ids=CountingIds())
    with connect(database.application_url, name="rebuild") as rebuild:
        with rebuild.transaction():
            rebuild.execute("LOCK TABLE gridline_events IN EXCLUSIVE MODE")
            future = writer.submit(add, Add("cnt_1"), CONTEXT)
            await_lock_waits(database, times=2)
            assert not future.done()
        assert outcome(future) == 1
    writer.close()


def await_lock_waits(database: Database, *, times: int) -> None:
    """Until the writer has waited for the lock, given up and waited again."""
    waits: set[object] = set()
    pause = threading.Event()
    with connect(database.superuser_url, name="test") as superuser:
        for _ in range(1000):
            rows = superuser.execute(
                "SELECT query_start FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND datname = current_database()"
            ).fetchall()
            waits |= {row["query_start"] for row in rows}
            if len(waits) >= times:
                return
            pause.wait(0.01)
    raise AssertionError("the writer does not wait for the lock")


class LossyProxy:
    """A socket before PostgreSQL that can lose the answer of the next commit."""

    def __init__(self, directory: Path, server: Path) -> None:
        self.lose_next_answer = threading.Event()
        self.lost = 0
        self._server = str(server)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / ".s.PGSQL.5432"))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                for each in (self._requests, self._answers):
                    threading.Thread(target=each, args=(client, server), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if self.lose_next_answer.is_set() and b"COMMIT" in data:
                    self.lose_next_answer.clear()
                    self.lost += 1
                    client.shutdown(socket.SHUT_RDWR)
                    server.sendall(data)
                    server.shutdown(socket.SHUT_WR)
                    return
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        client.close()
        server.close()


def test_a_commit_whose_answer_was_lost_counts_once(
    make_writer: MakeWriter, database: Database, tmp_path_factory: pytest.TempPathFactory
) -> None:
    make_writer().submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    info = psycopg.conninfo.conninfo_to_dict(database.application_url)
    directory = tmp_path_factory.mktemp("p")
    proxy = LossyProxy(directory, Path(str(info["host"])) / ".s.PGSQL.5432")
    writer = writer_on(psycopg.conninfo.make_conninfo(**{**info, "host": str(directory)}))
    for expected in range(1, 6):
        proxy.lose_next_answer.set()
        assert outcome(writer.submit(add, Add("cnt_1"), CONTEXT)) == expected
        assert proxy.lost == expected
    proxy.lose_next_answer.set()
    futures = [writer.submit(open_counter, f"cnt_n{n}", CONTEXT) for n in range(10)]
    assert outcomes(futures) == [f"cnt_n{n}" for n in range(10)]
    writer.close()
    proxy.close()
    assert query(database.owner_url, "SELECT count(*) AS n FROM gridline_events") == [{"n": 16}]


def test_killing_postgresql_under_load_loses_and_repeats_nothing(tmp_path: Path) -> None:
    server = Postgres(tmp_path)
    server.start()
    migrate(server.url(OWNER))
    with psycopg.connect(server.url(OWNER)) as owner:
        owner.execute(TOTALS_TABLES)
    writer = writer_on(server.url(APPLICATION))
    writer.submit(open_counter, "cnt_1", CONTEXT).result(PATIENCE_SECONDS)
    futures = [writer.submit(add, Add("cnt_1"), CONTEXT) for _ in range(300)]
    futures[20].result(PATIENCE_SECONDS)
    server.child.kill_group()
    server.start()
    assert outcomes(futures) == list(range(1, 301))
    writer.close()
    assert query(server.url(OWNER), "SELECT total, events FROM test_totals") == [
        {"total": 300, "events": 301}
    ]
    server.stop()
