"""What runners say of themselves, as ingest last heard it: leases and free slots.

No projection: heartbeats are no events. The table is unlogged, so a crash of the database empties
it and one grace period passes before a runner is taken for lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from psycopg.types.json import Jsonb

from domain.messages import Heartbeat
from projections.read_model import Connection

_UPSERT = """
    INSERT INTO runners AS r (runner_id, gpu_class, last_seen, sent_at, heartbeat)
    VALUES (%(runner_id)s, %(gpu_class)s, %(seen_at)s, %(sent_at)s, %(heartbeat)s)
    ON CONFLICT (runner_id) DO UPDATE SET gpu_class = excluded.gpu_class,
        last_seen = excluded.last_seen, sent_at = excluded.sent_at, heartbeat = excluded.heartbeat
    WHERE r.sent_at <= excluded.sent_at
"""
_LIST = "SELECT runner_id, gpu_class, last_seen, heartbeat FROM runners ORDER BY runner_id"
_ALIVE = "SELECT count(*) AS alive FROM runners WHERE last_seen > %(since)s"
_DELETE = "DELETE FROM runners WHERE runner_id = %(runner_id)s"


@dataclass(frozen=True, slots=True)
class RunnerRow:
    """One runner; `last_seen` is our own time of its newest heartbeat."""

    runner_id: str
    gpu_class: str
    last_seen: datetime
    heartbeat: Heartbeat


def upsert(connection: Connection, heartbeat: Heartbeat, *, seen_at: datetime) -> None:
    """Notes a heartbeat; one older than what is known changes nothing."""
    parameters: dict[str, Any] = {
        "runner_id": heartbeat.runner_id,
        "gpu_class": heartbeat.gpu_class,
        "seen_at": seen_at,
        "sent_at": heartbeat.sent_at,
        "heartbeat": Jsonb(heartbeat.model_dump(mode="json")),
    }
    connection.execute(_UPSERT, parameters)


def list_all(connection: Connection) -> tuple[RunnerRow, ...]:
    """Every runner that was heard of and not deleted."""
    rows = connection.execute(_LIST).fetchall()
    return tuple(
        RunnerRow(**{**row, "heartbeat": Heartbeat.model_validate(row["heartbeat"])})
        for row in rows
    )


def alive(connection: Connection, *, now: datetime, lease_seconds: float) -> int:
    """How many runners were heard of within a lease."""
    since = now - timedelta(seconds=lease_seconds)
    row = connection.execute(_ALIVE, {"since": since}).fetchone()
    assert row is not None
    return int(row["alive"])


def delete(connection: Connection, runner_id: str) -> None:
    """Forgets a runner that said goodbye or was lost."""
    connection.execute(_DELETE, {"runner_id": runner_id})
