"""Where the reading of the broker's partitions stands, beside the log.

A position is committed with what its message changed (`domain.unit_of_work.UnitOfWork.tracking`).
Ingest names it, and asks here where to go on.
"""

from __future__ import annotations

from adapters.event_log.postgres import Connection

_HANDLED = "SELECT notification_id FROM gridline_tracking WHERE application_name = %s"


def tracking_name(cluster_id: str, topic: str, partition: int) -> str:
    """Positions of another life of the broker mean nothing in this one."""
    return f"{cluster_id}/{topic}/{partition}"


def handled(connection: Connection, *, cluster_id: str, topic: str, partition: int) -> int | None:
    """The last offset of a partition whose record was handled, in this life of the broker."""
    name = tracking_name(cluster_id, topic, partition)
    row = connection.execute(_HANDLED, (name,)).fetchone()
    return row["notification_id"] if row is not None else None
