"""Fingerprints of creates, by which an SDK's own retry is answered with what its first try made.

The rows are written with the create (`domain/commands/idempotency.py`) and are no projection: a
rebuild keeps them. They go once the create's answer has shown to have come through, and the worker
deletes the rest after half an hour.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from domain.ids import FILE
from projections.read_model import Connection

REPEATED_WITHIN = timedelta(minutes=30)
"""An SDK's own retry comes within this: three tries of 600 seconds each."""

_FIND = """
    SELECT result_id FROM request_fingerprints
    WHERE key_id = %(key_id)s AND route = %(route)s AND body_sha256 = %(body_sha256)s
      AND created_at > %(since)s
"""
_FORGET = "DELETE FROM request_fingerprints WHERE result_id = %(shown_id)s"
_FORGET_BATCH = """
    DELETE FROM request_fingerprints f USING batches b
    WHERE b.id = f.result_id AND b.account_id = %(account_id)s
      AND %(shown_id)s IN (b.output_file_id, b.error_file_id)
"""
_PURGE = "DELETE FROM request_fingerprints WHERE created_at <= %(before)s"


def find(
    connection: Connection, *, key_id: str, route: str, body_sha256: str, since: datetime
) -> str | None:
    """The id that the same key's same create made after that time, or None."""
    parameters = {"key_id": key_id, "route": route, "body_sha256": body_sha256, "since": since}
    row = connection.execute(_FIND, parameters).fetchone()
    return row["result_id"] if row is not None else None


def forget(connection: Connection, *, account_id: str, shown_id: str) -> None:
    """The customer was shown the end of what has this id, or its bytes: the answer of the create
    that made it, or the batch that it is a result of, has come through."""
    parameters = {"account_id": account_id, "shown_id": shown_id}
    connection.execute(_FORGET, parameters)
    if shown_id.startswith(FILE):
        connection.execute(_FORGET_BATCH, parameters)


def purge(connection: Connection, *, before: datetime) -> int:
    """Deletes those made by then; returns how many."""
    return connection.execute(_PURGE, {"before": before}).rowcount
