"""Fingerprints of creates, by which an SDK's own retry is answered with what its first try made.

The rows are written with the create (`domain/commands/idempotency.py`) and are no projection: a
rebuild keeps them, and the worker deletes them after half an hour.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from projections.read_model import Connection

KEPT = timedelta(minutes=30)
"""Three tries of an SDK at its time-out of ten minutes each."""

_RECENT = """
    SELECT result_id FROM request_fingerprints
    WHERE key_id = %(key_id)s AND route = %(route)s AND body_sha256 = %(body_sha256)s
      AND created_at > %(since)s
"""
_PURGE = "DELETE FROM request_fingerprints WHERE created_at <= %(before)s"


def find_recent(
    connection: Connection, *, key_id: str, route: str, body_sha256: str, now: datetime
) -> str | None:
    """The id that the same key's same create made within the last half hour, or None."""
    parameters = {
        "key_id": key_id,
        "route": route,
        "body_sha256": body_sha256,
        "since": now - KEPT,
    }
    row = connection.execute(_RECENT, parameters).fetchone()
    return row["result_id"] if row is not None else None


def purge(connection: Connection, *, now: datetime) -> int:
    """Deletes what is older; returns how many."""
    return connection.execute(_PURGE, {"before": now - KEPT}).rowcount
