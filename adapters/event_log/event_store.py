"""The log: `eventsourcing` wired to PostgreSQL, and all that is written in one append.

The writer (`writer.py`) is its only user for writing; readers of the log take `decode` from here.
The recorder is the library's locked one: every append holds the table's EXCLUSIVE lock through its
commit, so that ids are given in commit order and a reader never passes over a gap.
Inline projections, personal rows, positions and snapshots are written under that lock, once the
ids are known; before it two writers could deadlock. Never turn on the library's database functions
and never use its `dcb` package: both drop the lock and lose events for readers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from eventsourcing.application import Application
from eventsourcing.domain import DomainEventProtocol
from eventsourcing.persistence import (
    InfrastructureFactory,
    IntegrityError,
    Mapper,
    StoredEvent,
)
from eventsourcing.postgres import PostgresApplicationRecorder, PostgresDatastore, PostgresFactory
from eventsourcing.utils import Environment, EnvType, get_topic, resolve_topic
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow
from pydantic_core import from_json

from adapters.event_log import (
    aggregates,  # noqa: F401 - makes every event known by its topic
    snapshots,
)
from adapters.event_log.postgres import (
    LOCK_TIMEOUT_SECONDS,
    UnsafeDatabase,
    refuse_unsafe_server,
    write_personal,
)
from adapters.event_log.upcasters import UPCASTERS, Upcasters
from domain.log.aggregate import Aggregate
from domain.log.unit_of_work import A, PersonalRow
from projections.projection import Projection, Statement, run_statements

EVENTS_TABLE = "gridline_events"
CHANNEL = EVENTS_TABLE
"""What every append notifies, and readers of the log listen to."""

_SELECT_VERSIONS = """
    SELECT notification_id, originator_id, originator_version FROM gridline_events
    WHERE notification_id > %s ORDER BY notification_id LIMIT %s
"""
_SELECT_LAST = "SELECT coalesce(max(notification_id), 0) AS last FROM gridline_events"
_SELECT_STREAM = """
    SELECT originator_id, originator_version, topic, state FROM gridline_events
    WHERE originator_id = %s AND originator_version > %s ORDER BY originator_version
"""
_SELECT_SNAPSHOT = """
    SELECT originator_version, state FROM gridline_snapshots
    WHERE originator_id = %s AND shape = %s
"""
_SELECT_STORED = """
    SELECT e.originator_id, e.originator_version, e.topic, e.state
    FROM gridline_events e
    JOIN unnest(%s::text[], %s::bigint[]) AS asked (id, version)
      ON e.originator_id = asked.id AND e.originator_version = asked.version
"""
_SELECT_POSITIONS = """
    SELECT application_name, notification_id FROM gridline_tracking
    WHERE application_name = ANY(%s)
"""
_INSERT_EVENTS = """
    INSERT INTO gridline_events (originator_id, originator_version, topic, state)
    SELECT originator_id, originator_version, topic, state
    FROM unnest(%s::stored_event_text[])
    ON CONFLICT (originator_id, originator_version) DO NOTHING
    RETURNING notification_id
"""
"""The library's own, but that a stream which has moved on is no error of the server, which would
log it: two processes that change one stream at once are ordinary."""
_SET_POSITION = """
    INSERT INTO gridline_tracking AS t (application_name, notification_id)
    VALUES (%(name)s, %(position)s)
    ON CONFLICT (application_name) DO UPDATE SET notification_id =
        CASE WHEN t.notification_id < excluded.notification_id THEN excluded.notification_id END
"""
"""Compare and set: a position that is not greater becomes null, which the column refuses."""
_SET_SNAPSHOT = """
    INSERT INTO gridline_snapshots AS s
        (originator_id, originator_version, topic, shape, state)
    VALUES (%(id)s, %(version)s, %(topic)s, %(shape)s, %(state)s)
    ON CONFLICT (originator_id) DO UPDATE SET
        originator_version = excluded.originator_version, topic = excluded.topic,
        shape = excluded.shape, state = excluded.state
    WHERE s.originator_version < excluded.originator_version OR s.shape <> excluded.shape
"""


class PositionConflict(Exception):
    """A position of the append is not greater than the stored one; nothing was written."""


class RowConflict(Exception):
    """A row of the append, not an event, broke a constraint; nothing was written."""


@dataclass(frozen=True, slots=True)
class Append:
    """All that one save writes, in one commit. `snapshots` are aggregates in their new state."""

    events: Sequence[Aggregate.Event] = ()
    personal: Sequence[PersonalRow] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    snapshots: Sequence[Aggregate] = ()

    def __bool__(self) -> bool:
        return bool(self.events or self.personal or self.positions)


class EventMapper(Mapper[str]):
    """Events to JSON and back, validated, for the library's own readers."""

    def __init__(self) -> None:
        """Has no transcoder, compressor or cipher: pydantic does the work."""

    def to_stored_event(self, domain_event: DomainEventProtocol[str]) -> StoredEvent:
        assert isinstance(domain_event, Aggregate.Event)
        return stored(domain_event)

    def to_domain_event(self, stored_event: StoredEvent) -> Aggregate.Event:
        return decode(
            topic=stored_event.topic,
            originator_id=str(stored_event.originator_id),
            originator_version=stored_event.originator_version,
            state=stored_event.state,
        )


def stored(event: Aggregate.Event, *, upcasters: Upcasters = UPCASTERS) -> StoredEvent:
    """The event as the log keeps it: JSON without what the row's columns say, with
    `class_version` once its form has changed."""
    topic = get_topic(type(event))
    state = event.model_dump_json(exclude={"originator_id", "originator_version"}).encode()
    steps = upcasters.get(topic, ())
    if steps:
        state = json.dumps({**json.loads(state), "class_version": len(steps) + 1}).encode()
    return StoredEvent(
        originator_id=event.originator_id,
        originator_version=event.originator_version,
        topic=topic,
        state=state,
    )


def decode(
    *,
    topic: str,
    originator_id: str,
    originator_version: int,
    state: bytes,
    upcasters: Upcasters = UPCASTERS,
) -> Aggregate.Event:
    """The event of one row of the log, in today's form."""
    event_class: type[Aggregate.Event] = resolve_topic(topic)
    fields: dict[str, Any] = from_json(state)
    version: int = fields.pop("class_version", 1)
    for step in upcasters.get(topic, ())[version - 1 :]:
        step(fields)
    fields["originator_id"] = originator_id
    fields["originator_version"] = originator_version
    return event_class.model_validate(fields)


def fold(events: Sequence[Aggregate.Event], start: A | None = None) -> A | None:
    """The aggregate that these events make, from a snapshot or from nothing."""
    aggregate = start
    for event in events:
        aggregate = event.mutate(aggregate)
    return aggregate


class LogRecorder(PostgresApplicationRecorder):
    """The library's locked recorder, writing a whole append at once.

    The library's own `insert_events` tries ten times when the connection is lost, so that a commit
    whose answer was lost looks like a conflict; and it swallows what its hooks raise until the
    transaction has committed. This one does neither.
    """

    def __init__(
        self,
        datastore: PostgresDatastore,
        *,
        projections: Sequence[Projection] = (),
    ) -> None:
        super().__init__(datastore, events_table_name=EVENTS_TABLE)
        self.insert_events_statement = sql.Composed([sql.SQL(_INSERT_EVENTS)])
        self._projections = projections

    def insert_events(
        self,
        stored_events: Sequence[StoredEvent],
        *,
        append: Append | None = None,
        **_: Any,
    ) -> Sequence[int]:
        assert append is not None, "the log is written by EventStore.append alone"
        positions: Sequence[int] = ()
        with (
            self.datastore.get_connection() as connection,
            connection.pipeline() as pipeline,
            connection.transaction(),
        ):
            cursor = connection.cursor()
            if stored_events:
                self._insert_stored_events(cursor, stored_events)
                pipeline.sync()
                positions = [row["notification_id"] for row in cursor.fetchall()]
                if len(positions) < len(stored_events):
                    raise IntegrityError("a stream has moved on")
            else:
                self._lock_table(cursor)
            try:
                # A pipeline tells of a row that breaks a constraint when its answer comes: with a
                # later statement, or at the latest with this one more round trip.
                self._write_rows(connection, append, positions)
                pipeline.sync()
            except (psycopg.IntegrityError, psycopg.DataError) as error:
                raise _row_error(error) from None
        return positions

    def _write_rows(
        self, connection: psycopg.Connection[DictRow], append: Append, positions: Sequence[int]
    ) -> None:
        for name, position in sorted(append.positions.items()):
            connection.execute(_SET_POSITION, {"name": name, "position": position}, prepare=True)
        for projection in self._projections:
            run_statements(connection, _statements(projection, append.events, positions))
        write_personal(connection, append.personal)
        for aggregate in append.snapshots:
            connection.execute(_SET_SNAPSHOT, _snapshot_row(aggregate), prepare=True)


def _row_error(error: psycopg.IntegrityError | psycopg.DataError) -> Exception:
    """Says which table and constraint; the driver's own text can quote the row."""
    table, column = error.diag.table_name, error.diag.column_name
    if (table, column) == ("gridline_tracking", "notification_id"):
        return PositionConflict()
    constraint = error.diag.constraint_name or column
    return RowConflict(f"{type(error).__name__} in table {table}, {constraint}")


def _statements(
    projection: Projection, events: Sequence[Aggregate.Event], positions: Sequence[int]
) -> list[Statement]:
    return [
        statement
        for event, position in zip(events, positions, strict=True)
        for statement in projection.apply(event, position)
    ]


def _snapshot_row(aggregate: Aggregate) -> dict[str, Any]:
    return {
        "id": aggregate.id,
        "version": aggregate.version,
        "topic": type(aggregate).TOPIC,
        "shape": snapshots.shape(type(aggregate)),
        "state": snapshots.encode(aggregate),
    }


class EventStore(Application[str]):
    """The one application object of a process that writes to the log.

    Raises UnsafeDatabase where the server or the library's settings could lose what is
    acknowledged.
    """

    name = "gridline"

    def __init__(
        self,
        database_url: str,
        *,
        projections: Sequence[Projection] = (),
        library_settings: Mapping[str, str] | None = None,
    ) -> None:
        self._conninfo = conninfo_to_dict(database_url)
        self._projections = projections
        super().__init__(_library_environment(self._conninfo, library_settings or {}))
        try:
            self._refuse_unsafe_settings()
        except BaseException:
            self.close()
            raise

    def construct_env(self, name: str, env: EnvType | None = None) -> Environment:
        """Ours alone: a variable in the process's environment must not turn off the lock."""
        return Environment(name, env)

    def construct_factory(self, env: Environment) -> InfrastructureFactory[Any]:
        factory: InfrastructureFactory[Any] = super().construct_factory(env)
        assert isinstance(factory, PostgresFactory)
        self._datastore = factory.datastore
        kwargs = factory.datastore.pool.kwargs
        assert isinstance(kwargs, dict)
        for key, value in self._conninfo.items():
            kwargs.setdefault(key, value)
        kwargs["application_name"] = "gridline-writer"
        return factory

    def construct_mapper(self) -> Mapper[str]:
        return EventMapper()

    def construct_recorder(self) -> LogRecorder:
        self.log_recorder = LogRecorder(self._datastore, projections=self._projections)
        return self.log_recorder

    def append(self, append: Append) -> Sequence[int]:
        """Writes all of it in one commit and returns the events' positions.

        Raises IntegrityError when a stream has moved on, PositionConflict or RowConflict; then
        nothing was written. Raises OperationalError, InterfaceError or InternalError when the
        connection is lost: then ask `landed`.
        """
        if not append:
            return ()
        return self.log_recorder.insert_events(
            [stored(event) for event in append.events], append=append
        )

    def landed(self, events: Sequence[Aggregate.Event]) -> bool:
        """Whether exactly these events are stored, once every append now under way has ended; no
        events are never stored."""
        expected = {(e.originator_id, e.originator_version): stored(e) for e in events}
        ids = [stream_id for stream_id, _ in expected]
        versions = [version for _, version in expected]
        with self._datastore.get_connection() as connection, connection.transaction():
            for statement in self.log_recorder.lock_table_statements:
                connection.execute(statement)
            rows = connection.execute(_SELECT_STORED, (ids, versions)).fetchall()
        found = {(r["originator_id"], r["originator_version"]): r for r in rows}
        return bool(expected) and all(
            key in found
            and found[key]["topic"] == event.topic
            and bytes(found[key]["state"]) == event.state
            for key, event in expected.items()
        )

    def load(self, cls: type[A], id: str) -> A | None:
        """The aggregate of that id from its snapshot and the events after it, or None.

        None too if the stream holds an aggregate of another class.
        """
        start = self._snapshot(cls, id) if snapshots.interval(cls) else None
        after = start.version if start else 0
        with self._datastore.get_connection() as connection:
            rows = connection.execute(_SELECT_STREAM, (id, after), prepare=True).fetchall()
        aggregate = fold([decode(**row) for row in rows], start)
        return aggregate if isinstance(aggregate, cls) else None

    def _snapshot(self, cls: type[A], id: str) -> A | None:
        with self._datastore.get_connection() as connection:
            row = connection.execute(
                _SELECT_SNAPSHOT, (id, snapshots.shape(cls)), prepare=True
            ).fetchone()
        if row is None:
            return None
        return snapshots.decode(
            cls, id=id, version=row["originator_version"], state=bytes(row["state"])
        )

    def last_position(self) -> int:
        """The position of the newest event; 0 for an empty log."""
        with self._datastore.get_connection() as connection:
            row = connection.execute(_SELECT_LAST).fetchone()
        assert row is not None
        return int(row["last"])

    def versions_after(self, position: int, *, limit: int) -> list[tuple[int, str, int]]:
        """(position, stream id, version) of the events after a position, oldest first."""
        with self._datastore.get_connection() as connection:
            rows = connection.execute(_SELECT_VERSIONS, (position, limit), prepare=True).fetchall()
        return [(r["notification_id"], r["originator_id"], r["originator_version"]) for r in rows]

    def positions(self, names: Sequence[str]) -> dict[str, int]:
        """The stored positions of these names; names never recorded are missing."""
        with self._datastore.get_connection() as connection:
            rows = connection.execute(_SELECT_POSITIONS, (list(names),), prepare=True).fetchall()
        return {row["application_name"]: row["notification_id"] for row in rows}

    def _refuse_unsafe_settings(self) -> None:
        if self._datastore.enable_db_functions:
            raise UnsafeDatabase(
                "POSTGRES_ENABLE_DB_FUNCTIONS drops the log's lock: readers would lose events"
            )
        lock = sql.SQL("LOCK TABLE {0}.{1} IN EXCLUSIVE MODE").format(
            sql.Identifier(self._datastore.schema), sql.Identifier(EVENTS_TABLE)
        )
        if lock not in self.log_recorder.lock_table_statements:
            raise UnsafeDatabase("the log's recorder does not lock its table")
        with self._datastore.get_connection() as connection:
            refuse_unsafe_server(connection)


def _library_environment(
    conninfo: Mapping[str, Any], settings: Mapping[str, str]
) -> dict[str, str]:
    return {
        "PERSISTENCE_MODULE": "eventsourcing.postgres",
        "ORIGINATOR_ID_TYPE": "text",
        "CREATE_TABLE": "n",
        "POSTGRES_DBNAME": str(conninfo.get("dbname", "")),
        "POSTGRES_HOST": str(conninfo.get("host", "")),
        "POSTGRES_PORT": str(conninfo.get("port", "5432")),
        "POSTGRES_USER": str(conninfo.get("user", "")),
        "POSTGRES_PASSWORD": str(conninfo.get("password", "")),
        "POSTGRES_POOL_SIZE": "1",
        "POSTGRES_MAX_OVERFLOW": "1",
        "POSTGRES_CONNECT_TIMEOUT": "3",
        "POSTGRES_LOCK_TIMEOUT": str(LOCK_TIMEOUT_SECONDS),
        **settings,
    }


__all__ = [
    "CHANNEL",
    "Append",
    "EventStore",
    "IntegrityError",
    "PositionConflict",
    "RowConflict",
    "decode",
    "fold",
    "stored",
]
