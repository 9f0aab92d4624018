"""The JSON log: one line an entry on stderr, a constant message and fields beside it.

Every process calls `configure_logging` once at its start. A module logs with
`log.info("constant message", extra={"fields": {"job_id": …}})`: ids and counts only, never rows,
prompts or keys.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

QUIETER = {"aiokafka": logging.CRITICAL, "asyncio": logging.WARNING, "uvicorn": logging.WARNING}
"""Libraries that say too much: aiokafka reports each lost connection as an error, many a second
while a broker is away, and what matters of it reaches us as exceptions."""


class JsonFormatter(logging.Formatter):
    """Renders an entry; the exception's type and place, but not its text, which may quote data."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = record.exc_info[0].__name__
            entry["trace"] = _places(record)
        return json.dumps(entry, default=str)


def configure_logging(process: str, *, level: str) -> None:
    """Sends everything that this process logs to stderr, as JSON. Raises ValueError for a level
    that logging does not know."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, quieter in QUIETER.items():
        logging.getLogger(name).setLevel(quieter)


def _places(record: logging.LogRecord) -> list[str]:
    places: list[str] = []
    trace = record.exc_info[2] if record.exc_info else None
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_qualname}")
        trace = trace.tb_next
    return places
