"""Fingerprints of creates, by which an SDK's own retry is answered with what its first try made.

The rows are written with the create (`domain/commands/idempotency.py`) and are no projection: a
rebuild keeps them, and the worker deletes them after half an hour.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from projections.read_model import Connection

REPEATED_WITHIN = timedelta(minutes=30)
"""An SDK's own retry comes within this: three tries of 600 seconds each."""

_FIND = """
    SELECT result_id FROM request_fingerprints
    WHERE key_id = %(key_id)s AND route = %(route)s AND body_sha256 = %(body_sha256)s
      AND created_at > %(since)s
"""
_PURGE = "DELETE FROM request_fingerprints WHERE created_at <= %(before)s"


def find(
    connection: Connection, *, key_id: str, route: str, body_sha256: str, since: datetime
) -> str | None:
    """The id that the same key's same create made after that time, or None."""
    parameters = {"key_id": key_id, "route": route, "body_sha256": body_sha256, "since": since}
    row = connection.execute(_FIND, parameters).fetchone()
    return row["result_id"] if row is not None else None


def purge(connection: Connection, *, before: datetime) -> int:
    """Deletes those made by then; returns how many."""
    return connection.execute(_PURGE, {"before": before}).rowcount
