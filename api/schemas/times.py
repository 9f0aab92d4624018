"""Times on the wire: whole Unix seconds."""

from __future__ import annotations

from datetime import datetime


def seconds(at: datetime) -> int:
    """Unix seconds, rounded down."""
    return int(at.timestamp())


def seconds_or_none(at: datetime | None) -> int | None:
    """The same for what may not have happened."""
    return None if at is None else seconds(at)
