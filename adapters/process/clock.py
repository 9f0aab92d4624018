"""The sources of time and of randomness for ids, one of each in every process.

The composition roots make them; nothing else asks the machine for either.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path

from adapters.process.settings import Settings, Unusable
from domain.ports import Clock


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)


class FileClock:
    """Time as a file has it (ISO 8601), so that tests move it for several processes at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def now(self) -> datetime:
        """Raises ValueError if the file holds no time with an offset."""
        moment = datetime.fromisoformat(self._path.read_text(encoding="ascii").strip())
        if moment.tzinfo is None:
            raise ValueError(f"{self._path} holds a time without an offset")
        return moment.astimezone(UTC)


class RandomIds:
    """Ids from the operating system's randomness."""

    def new(self, prefix: str) -> str:
        return prefix + secrets.token_hex(16)


def clock_of(settings: Settings) -> Clock:
    """The clock that the settings name. Raises Unusable for a file without a time in it."""
    if not settings.clock_file:
        return SystemClock()
    clock = FileClock(Path(settings.clock_file))
    try:
        clock.now()
    except (OSError, ValueError) as error:
        raise Unusable(f"GRIDLINE_CLOCK_FILE: {error}") from None
    return clock
