"""The JSON log: one line an entry on stderr, a constant message and fields beside it.

Every process calls `configure_logging` once at its start. A module logs with
`log = structlog.stdlib.get_logger(__name__)` and `log.info("constant message", job_id=…)`: ids and
counts only, never rows, prompts or keys. The text of an exception may quote any of these, so it
stays out; only what an operator has to read, an `Unusable`, is told in its own words.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from types import TracebackType

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from adapters.process.settings import Unusable

QUIETER = {"aiokafka": logging.CRITICAL, "asyncio": logging.WARNING, "uvicorn": logging.WARNING}
"""Libraries that say too much: aiokafka reports each lost connection as an error, many a second
while a broker is away, and what matters of it reaches us as exceptions."""


def configure_logging(process: str, *, level: str) -> None:
    """Sends everything that this process and its libraries log to stderr, as JSON."""
    speak_through_logging()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_DESCRIBED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _in_order(process),
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name, quieter in QUIETER.items():
        logging.getLogger(name).setLevel(quieter)


def speak_through_logging() -> None:
    """Hands our entries to the standard library's loggers, where those of libraries are too."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_DESCRIBED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _exception_without_its_text(_: WrappedLogger, __: str, entry: EventDict) -> EventDict:
    error = _error_of(entry.pop("exc_info", None))
    return entry if error is None else {**entry, **_told(error)}


def _error_of(given: object) -> BaseException | None:
    if isinstance(given, BaseException):
        return given
    if isinstance(given, tuple):
        found: BaseException | None = given[1]
        return found
    return sys.exc_info()[1] if given else None


def _told(error: BaseException) -> EventDict:
    if isinstance(error, Unusable):
        return {"exception": type(error).__name__, "reason": str(error)}
    told: EventDict = {"exception": type(error).__name__, "trace": _places(error.__traceback__)}
    if isinstance(error, BaseExceptionGroup):
        told["exceptions"] = [_told(each) for each in error.exceptions]
    return told


def _places(trace: TracebackType | None) -> Sequence[str]:
    places: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_qualname}")
        trace = trace.tb_next
    return places


def _in_order(process: str) -> Processor:
    """What every entry has comes first, so that a person finds it."""

    def ordered(_: WrappedLogger, __: str, entry: EventDict) -> EventDict:
        first = {name: entry.pop(name) for name in ("at", "level", "logger")}
        return {**first, "process": process, "message": entry.pop("event"), **entry}

    return ordered


_DESCRIBED: Sequence[Processor] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    _exception_without_its_text,
)
