"""The log: what PostgreSQL refuses, what an append holds, and what reads back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from eventsourcing.persistence import IntegrityError, StoredEvent
from hypothesis import given
from hypothesis import strategies as st

from adapters.embedded.postgres import Postgres
from adapters.event_log import snapshots
from adapters.event_log.event_store import (
    Append,
    EventStore,
    PositionConflict,
    RowConflict,
    decode,
    fold,
    stored,
)
from adapters.event_log.memory_store import MemoryWriter
from adapters.event_log.postgres import UnsafeDatabase, connect
from domain.log.aggregate import Aggregate, Envelope
from domain.log.unit_of_work import PersonalRow
from projections.projection import Statement
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
    open_counter,
)

ENVELOPE = Envelope(
    at=SteppingClock().now(), actor="a", command_id="c", correlation_id="r", causation="x"
)


@pytest.fixture
def store(database: Database) -> Iterator[EventStore]:
    with psycopg.connect(database.owner_url) as owner:
        owner.execute(TOTALS_TABLES)
    store = EventStore(database.application_url, projections=[Totals()])
    yield store
    store.close()


def counter(id: str = "cnt_1", *, additions: int = 0) -> Counter:
    new = Counter(id=id, envelope=ENVELOPE)
    for number in range(additions):
        new.add(number, name=f"n{number % 3}", ceiling=1_000, envelope=ENVELOPE)
    return new


def events_of(aggregate: Aggregate) -> list[Aggregate.Event]:
    return list(aggregate.collect_events())  # type: ignore[arg-type]


def rows(database: Database, query: str) -> list[dict[str, object]]:
    with connect(database.owner_url, name="test") as connection:
        return connection.execute(query).fetchall()  # type: ignore[arg-type]


def test_what_was_appended_loads_equal(store: EventStore) -> None:
    new = counter(additions=5)
    positions = store.append(Append(events=events_of(new)))
    assert len(positions) == 6
    assert store.load(Counter, "cnt_1") == new
    assert store.load(Counter, "cnt_2") is None


def test_an_append_holds_events_rows_and_positions_or_nothing(
    store: EventStore, database: Database
) -> None:
    events = events_of(counter(additions=2))
    person = PersonalRow("test_people", {"id": "p"}, {"name": "Ann", "metadata": {"a": "b"}})
    store.append(Append(events=events, personal=[person], positions={"topic/0": 0}))
    assert rows(database, "SELECT total, events, position FROM test_totals") == [
        {"total": 1, "events": 3, "position": store.last_position()}
    ]
    assert rows(database, "SELECT name, metadata FROM test_people") == [
        {"name": "Ann", "metadata": {"a": "b"}}
    ]
    other = events_of(counter("cnt_2"))
    with pytest.raises(PositionConflict):
        store.append(Append(events=other, positions={"topic/0": 0}))
    twin = PersonalRow("test_people", {"id": "q"}, {"name": "Ann", "metadata": None})
    with pytest.raises(RowConflict, match="test_people") as refusal:
        store.append(Append(events=other, personal=[twin], positions={"topic/0": 1}))
    assert "Ann" not in str(refusal.value)
    with pytest.raises(IntegrityError):
        store.append(Append(events=events[1:], positions={"topic/0": 1}))
    assert store.positions(["topic/0", "topic/1"]) == {"topic/0": 0}
    assert store.load(Counter, "cnt_2") is None


def test_two_who_change_a_stream_at_once_are_no_error_in_the_servers_log(
    store: EventStore, database: Database, postgres: Postgres
) -> None:
    server_log = postgres.directory / "logs" / "postgres.log"
    before = len(server_log.read_text())
    first = counter(additions=1)
    store.append(Append(events=events_of(first)))
    with pytest.raises(IntegrityError):
        store.append(Append(events=events_of(counter(additions=3))))
    assert store.load(Counter, "cnt_1") == first
    assert "ERROR" not in server_log.read_text()[before:]


class Broken(Totals):
    """A projection with a mistake in it."""

    def apply(self, event: Aggregate.Event, position: int) -> Sequence[Statement]:
        raise AssertionError("our own mistake")


def test_a_mistake_in_a_projection_stores_nothing(database: Database) -> None:
    store = EventStore(database.application_url, projections=[Broken()])
    with pytest.raises(AssertionError, match="our own mistake"):
        store.append(Append(events=events_of(counter())))
    assert store.last_position() == 0
    store.append(Append(positions={"still/usable": 1}))
    store.close()


def test_a_personal_row_is_changed_and_deleted(store: EventStore, database: Database) -> None:
    for values in ({"name": "Ann", "metadata": None}, {"name": "Bea", "metadata": {"k": "v"}}):
        store.append(Append(personal=[PersonalRow("test_people", {"id": "p"}, values)]))
    assert rows(database, "SELECT name, metadata FROM test_people") == [
        {"name": "Bea", "metadata": {"k": "v"}}
    ]
    store.append(Append(personal=[PersonalRow("test_people", {"id": "p"}, None)]))
    assert rows(database, "SELECT * FROM test_people") == []


def test_only_exactly_our_own_events_count_as_landed(store: EventStore) -> None:
    ours = events_of(counter(additions=2))
    assert not store.landed(ours)
    store.append(Append(events=ours[:2]))
    assert store.landed(ours[:2])
    assert not store.landed(ours)
    theirs = counter(additions=0)
    theirs.add(7, name="other", ceiling=9, envelope=ENVELOPE)
    assert not store.landed(events_of(theirs))


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE gridline_events SET topic = 'x'",
        "DELETE FROM gridline_events",
        "TRUNCATE gridline_events",
        "INSERT INTO gridline_events (originator_id, originator_version, topic, state,"
        " notification_id) VALUES ('a', 1, 't', '', 1)",
        "CREATE TABLE mine (id int)",
    ],
)
def test_the_application_cannot_change_history(
    store: EventStore, database: Database, change: str
) -> None:
    store.append(Append(events=events_of(counter())))
    with (
        connect(database.application_url, name="test") as application,
        pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.GeneratedAlways)),
    ):
        application.execute(change)  # type: ignore[arg-type]


def test_the_library_settings_that_lose_events_are_refused(database: Database) -> None:
    with pytest.raises(UnsafeDatabase, match="ENABLE_DB_FUNCTIONS"):
        EventStore(database.application_url, library_settings={"POSTGRES_ENABLE_DB_FUNCTIONS": "y"})


def test_the_process_environment_cannot_turn_off_the_lock(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTGRES_ENABLE_DB_FUNCTIONS", "y")
    monkeypatch.setenv("GRIDLINE_POSTGRES_ENABLE_DB_FUNCTIONS", "y")
    EventStore(database.application_url).close()


def test_a_role_without_synchronous_commit_is_refused(
    database: Database, postgres: Postgres
) -> None:
    with pytest.raises(UnsafeDatabase, match="synchronous_commit = off"):
        EventStore(f"{database.application_url}&options=-c%20synchronous_commit%3Doff")


def test_a_snapshot_and_the_events_after_it_fold_like_all_events() -> None:
    whole = counter(additions=12)
    events = events_of(whole)
    for version in range(1, len(events) + 1):
        at = fold(events[:version])
        assert isinstance(at, Counter)
        copy = snapshots.decode(Counter, id=at.id, version=at.version, state=snapshots.encode(at))
        assert copy == at
        assert fold(events[version:], copy) == whole


def test_a_long_stream_loads_from_its_snapshot(store: EventStore, database: Database) -> None:
    whole = counter(additions=25)
    store.append(Append(events=events_of(whole), snapshots=[whole]))
    assert [r["originator_version"] for r in rows(database, "TABLE gridline_snapshots")] == [26]
    whole.add(1, name="after", ceiling=1_000, envelope=ENVELOPE)
    store.append(Append(events=events_of(whole)))
    assert store.load(Counter, "cnt_1") == whole


def test_a_snapshot_of_another_shape_is_ignored(store: EventStore, database: Database) -> None:
    whole = counter(additions=3)
    store.append(Append(events=events_of(whole), snapshots=[whole]))
    with connect(database.owner_url, name="test") as owner:
        owner.execute("UPDATE gridline_snapshots SET shape = 'older', state = 'garbage'")
    assert store.load(Counter, "cnt_1") == whole


def test_an_old_event_is_upcast_step_by_step() -> None:
    def amount_was_called_by(state: dict[str, Any]) -> None:
        state["count"] = state.pop("by")

    def then_it_was_called_count(state: dict[str, Any]) -> None:
        state["amount"] = state.pop("count")

    upcasters = {"test.counter.added": (amount_was_called_by, then_it_was_called_count)}
    new = counter(additions=2)
    added = events_of(new)[2]
    today = stored(added, upcasters=upcasters)
    assert json.loads(today.state)["class_version"] == 3
    for changes in ({"by": 1}, {"count": 1, "class_version": 2}, {"amount": 1, "class_version": 3}):
        state = json.loads(stored(added).state)
        del state["amount"]
        assert added == decode(
            topic=today.topic,
            originator_id="cnt_1",
            originator_version=3,
            state=json.dumps({**state, **changes}).encode(),
            upcasters=upcasters,
        )


@given(st.lists(st.tuples(st.integers(0, 10**18), st.text()), max_size=20))
def test_stored_bytes_read_back_as_the_same_state(additions: list[tuple[int, str]]) -> None:
    writer = MemoryWriter(clock=SteppingClock(), ids=CountingIds())
    writer.submit(open_counter, "cnt_1", CONTEXT).result()
    for amount, name in additions:
        writer.submit(add, Add("cnt_1", amount=amount, name=name, ceiling=10**20), CONTEXT).result()
    loaded = writer.load(Counter, "cnt_1")
    assert loaded is not None
    assert loaded.total == sum(amount for amount, _ in additions)
    assert fold([event for _, event in writer.events()]) == loaded


def test_stored_state_leaves_out_what_the_columns_say() -> None:
    [opened] = events_of(counter())
    row = stored(opened)
    assert isinstance(row, StoredEvent)
    assert (row.originator_id, row.originator_version) == ("cnt_1", 1)
    assert b"cnt_1" not in row.state
    assert row.topic == "test.counter.opened"
