"""One bad piece of work never holds up the others, and never goes unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from domain.errors import GridlineError

T = TypeVar("T")
R = TypeVar("R")

log = structlog.stdlib.get_logger(__name__)


async def each(
    part: str, items: Sequence[T], act: Callable[[T], Awaitable[R]]
) -> list[tuple[T, R]]:
    """Acts on all items at once, started in their order; returns those that went well. A failure
    is logged by its kind, for its text may quote data, and comes again with the next round."""
    results = await asyncio.gather(*(act(item) for item in items), return_exceptions=True)
    done: list[tuple[T, R]] = []
    for item, result in zip(items, results, strict=True):
        if isinstance(result, BaseException):
            _log(part, result)
        else:
            done.append((item, result))
    return done


def _log(part: str, error: BaseException) -> None:
    if not isinstance(error, Exception):
        raise error
    error_type = type(error).__name__
    if isinstance(error, GridlineError) and error.retryable:
        log.info("work put off", part=part, error=error_type)
    else:
        log.error("work failed", part=part, error=error_type, exc_info=error)
