"""Keeps the read models that no API answer waits for up with the log, and rebuilds any of them.

The worker runs one in a thread of its own; the operator's CLI uses `lag` and `rebuild`. Rows and
position commit together, many events at a time, so a crash anywhere loses and repeats nothing, and
two followers at once do no harm. It reads the log and writes projection tables; it never decides
anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import psycopg
import structlog
from psycopg import sql

from domain.log.aggregate import Aggregate
from projections.projection import Projection, Statement, run_statements

log = structlog.stdlib.get_logger(__name__)

BATCH_EVENTS = 200
TICK_SECONDS = 0.5
"""How long to wait for a notification: notifications are lost now and then, ticks are not."""
RETRY_SECONDS_MAX = 10.0

Connection = psycopg.Connection[dict[str, Any]]

_LISTEN = "LISTEN gridline_events"
_LOCK_LOG = "LOCK TABLE gridline_events IN EXCLUSIVE MODE"
_SELECT_EVENTS = """
    SELECT notification_id, originator_id, originator_version, topic, state FROM gridline_events
    WHERE notification_id > %s ORDER BY notification_id LIMIT %s
"""
_SELECT_LAST = "SELECT coalesce(max(notification_id), 0) AS last FROM gridline_events"
_SELECT_POSITIONS = """
    SELECT application_name, notification_id FROM gridline_tracking
    WHERE application_name = ANY(%s)
"""
_SEED_POSITION = """
    INSERT INTO gridline_tracking (application_name, notification_id) VALUES (%s, 0)
    ON CONFLICT DO NOTHING
"""
_LOCK_POSITION = """
    SELECT FROM gridline_tracking WHERE application_name = %s FOR UPDATE
"""
_MOVE_POSITION = """
    UPDATE gridline_tracking SET notification_id = %(to)s
    WHERE application_name = %(name)s AND notification_id = %(from)s
    RETURNING notification_id
"""
_SET_POSITION = """
    UPDATE gridline_tracking SET notification_id = %s WHERE application_name = %s
"""


class Decode(Protocol):
    """Makes an event of a row of the log (`adapters.event_log.event_store.decode`)."""

    def __call__(
        self, *, topic: str, originator_id: str, originator_version: int, state: bytes
    ) -> Aggregate.Event: ...


class _Overtaken(Exception):
    """Another follower, or a rebuild, has moved a position meanwhile."""


class Follower:
    """`projections` follow the log here; `connect` opens a connection in autocommit with dict rows.

    `start` follows in a thread until `close`; `catch_up` does it once, in the caller's thread.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        decode: Decode,
        projections: Sequence[Projection],
        *,
        batch_size: int = BATCH_EVENTS,
    ) -> None:
        self._connect = connect
        self._decode = decode
        self._projections = tuple(sorted(projections, key=lambda each: each.name))
        self._batch_size = batch_size
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Follows the log in a thread that outlives lost connections."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name="gridline-projections", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread, within a tick."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def catch_up(self) -> int:
        """Applies all there is; returns the number of events read."""
        with self._connect() as connection:
            return self._catch_up(connection)

    def lag(self) -> dict[str, int]:
        """How far each projection is behind the end of the log, in positions."""
        with self._connect() as connection:
            last = self._last(connection)
            positions = self._positions(connection)
        return {name: last - position for name, position in positions.items()}

    def rebuild(self, projection: Projection) -> int:
        """Empties its tables and fills them from the log, in one commit; returns the events read.

        Serves inline projections too. It holds the log's lock, so nothing is appended meanwhile,
        and readers see the old rows until it is done. Personal rows are not touched.
        """
        with self._connect() as connection, connection.transaction():
            connection.execute(_LOCK_LOG)
            connection.execute(_LOCK_POSITION, (projection.name,))
            for table in projection.tables:
                connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table)))
            position = count = 0
            while rows := self._read(connection, position):
                with connection.pipeline():
                    run_statements(connection, self._statements(projection, rows, after=position))
                position = rows[-1]["notification_id"]
                count += len(rows)
            connection.execute(_SET_POSITION, (position, projection.name))
        return count

    # Following ---------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                with self._connect() as connection:
                    connection.execute(_LISTEN)
                    while not self._stop.is_set():
                        self._catch_up(connection)
                        failures = 0
                        for _ in connection.notifies(timeout=TICK_SECONDS, stop_after=1):
                            pass
            except Exception as error:  # noqa: BLE001 - the thread outlives whatever happens
                failures += 1
                # The driver's text can quote a row: the kind of error is enough.
                log.warning(
                    "projections interrupted",
                    error=type(error).__name__,
                    failures=failures,
                )
                self._stop.wait(min(RETRY_SECONDS_MAX, 0.1 * 2 ** min(failures, 10)))

    def _catch_up(self, connection: Connection) -> int:
        positions = self._positions(connection)
        count = 0
        while rows := self._read(connection, min(positions.values(), default=0)):
            try:
                self._apply(connection, rows, positions)
                count += len(rows)
            except _Overtaken:
                positions = self._positions(connection)
            if self._stop.is_set():
                break
        return count

    def _apply(
        self, connection: Connection, rows: Sequence[dict[str, Any]], positions: dict[str, int]
    ) -> None:
        """One batch, one commit; moves `positions` once it is committed."""
        last = rows[-1]["notification_id"]
        behind = [each for each in self._projections if positions[each.name] < last]
        events = [(row["notification_id"], self._event(row)) for row in rows]
        with connection.pipeline(), connection.transaction():
            moves = [
                connection.execute(
                    _MOVE_POSITION,
                    {"name": each.name, "from": positions[each.name], "to": last},
                    prepare=True,
                )
                for each in behind
            ]
            # Asked before any row is written: the rows may be there already.
            if any(move.fetchone() is None for move in moves):
                raise _Overtaken
            for each in behind:
                run_statements(connection, _apply_all(each, events, after=positions[each.name]))
        positions.update((each.name, last) for each in behind)

    def _read(self, connection: Connection, position: int) -> list[dict[str, Any]]:
        return connection.execute(
            _SELECT_EVENTS, (position, self._batch_size), prepare=True
        ).fetchall()

    def _event(self, row: dict[str, Any]) -> Aggregate.Event:
        return self._decode(
            topic=row["topic"],
            originator_id=row["originator_id"],
            originator_version=row["originator_version"],
            state=row["state"],
        )

    def _statements(
        self, projection: Projection, rows: Sequence[dict[str, Any]], *, after: int
    ) -> Iterable[Statement]:
        events = [(row["notification_id"], self._event(row)) for row in rows]
        return _apply_all(projection, events, after=after)

    def _positions(self, connection: Connection) -> dict[str, int]:
        names = [each.name for each in self._projections]
        rows = connection.execute(_SELECT_POSITIONS, (names,)).fetchall()
        positions = {row["application_name"]: row["notification_id"] for row in rows}
        for name in names:
            if name not in positions:
                connection.execute(_SEED_POSITION, (name,))
                positions[name] = 0
        return positions

    def _last(self, connection: Connection) -> int:
        row = connection.execute(_SELECT_LAST).fetchone()
        assert row is not None
        return int(row["last"])


def _apply_all(
    projection: Projection, events: Sequence[tuple[int, Aggregate.Event]], *, after: int
) -> Iterable[Statement]:
    for position, event in events:
        if position > after:
            yield from projection.apply(event, position)
