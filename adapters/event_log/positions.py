"""Where the reading of the broker's partitions stands, beside the log.

A position is committed with what its message changed (`UnitOfWork.tracking`), and only ever grows.
So it needs a name for each life of a partition: ingest asks here where to go on, and under which
name. It must never take the offsets of one life for those of another, or every report would count
as a repeat.
"""

from __future__ import annotations

from adapters.event_log.postgres import Connection

_LIVES = """
    SELECT application_name, notification_id FROM gridline_tracking
    WHERE application_name = %(first)s OR starts_with(application_name, %(first)s || '/')
"""


def position_name(cluster_id: str, topic: str, partition: int, *, life: int = 1) -> str:
    """`topic` with the deployment's prefix: another deployment's topic is another one."""
    name = f"{cluster_id}/{topic}/{partition}"
    return name if life == 1 else f"{name}/{life}"


def go_on(
    connection: Connection, *, cluster_id: str, topic: str, partition: int, end: int
) -> tuple[str, int | None]:
    """The name of positions in this life of a partition that ends at `end` now, and the offset of
    the last record that was handled in it, if any was.

    One that is shorter than what was handled of it has begun a new life: its topic was made anew,
    or the broker lost records.
    """
    rows = connection.execute(
        _LIVES, {"first": position_name(cluster_id, topic, partition)}
    ).fetchall()
    handled = {row["application_name"]: row["notification_id"] for row in rows}
    life = 1
    while (following := position_name(cluster_id, topic, partition, life=life + 1)) in handled:
        life += 1
    name = position_name(cluster_id, topic, partition, life=life)
    if name in handled and handled[name] >= end:
        return following, None
    return name, handled.get(name)
