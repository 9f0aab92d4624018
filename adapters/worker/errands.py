"""Pieces of work of the active worker, side by side: one that goes wrong never holds up the others,
and never goes unseen.

`each` is for what a round does. `Errands` are for longer work: a few at once, never two for one
subject, and a failed one again only after a while. There accounts take turns, and large pieces
never take all places, so that nobody's short work waits for somebody else's long one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import structlog

from adapters.worker import measures
from domain.errors import GridlineError
from domain.limits import MIB
from projections.work.open_work import DueBatch

log = structlog.stdlib.get_logger(__name__)

RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = 60.0
LARGE_BYTES = 8 * MIB
"""More is seconds of work."""

T = TypeVar("T")
R = TypeVar("R")
GraceSeconds = Callable[[], float]
"""Asked when what runs is to end."""


class Errands:
    """`act` is done for the batches that `send` gets, `at_once` of them, at most `large_at_once` of
    which are large. Leaving the context gives what runs as long as `grace` says to finish."""

    def __init__(
        self,
        name: str,
        act: Callable[[str], Awaitable[None]],
        *,
        at_once: int,
        large_at_once: int,
        grace: GraceSeconds,
    ) -> None:
        self._name = name
        self._act = act
        self._at_once = at_once
        self._large_at_once = large_at_once
        self._grace = grace
        self._running: dict[str, tuple[DueBatch, asyncio.Task[None]]] = {}
        self._turns = 0
        self._served: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running = [task for _, task in self._running.values()]
        if running:
            await asyncio.wait(running, timeout=self._grace())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def send(self, due: Iterable[DueBatch]) -> None:
        """Starts what can start now; the rest comes with the next call. `due` are in the order in
        which one account's are done."""
        now = time.monotonic()
        waiting = [batch for batch in due if self._may_start(batch, now=now)]
        while len(self._running) < self._at_once and (batch := self._next(waiting)):
            waiting.remove(batch)
            self._turns += 1
            self._served[batch.account_id] = self._turns
            task = asyncio.create_task(self._run(batch.work_id))
            self._running[batch.work_id] = (batch, task)

    def _may_start(self, batch: DueBatch, *, now: float) -> bool:
        is_due = now >= self._not_before.get(batch.work_id, 0.0)
        return is_due and batch.work_id not in self._running

    def _next(self, waiting: Sequence[DueBatch]) -> DueBatch | None:
        """Of the account that has the least running and was served longest ago, the first piece
        that there is room for."""
        running = [batch for batch, _ in self._running.values()]
        shares = Counter(batch.account_id for batch in running)
        large = sum(batch.bytes > LARGE_BYTES for batch in running)
        fitting = (b for b in waiting if b.bytes <= LARGE_BYTES or large < self._large_at_once)
        return min(
            fitting,
            key=lambda b: (shares[b.account_id], self._served.get(b.account_id, 0)),
            default=None,
        )

    async def _run(self, subject: str) -> None:
        try:
            await self._act(subject)
        except Exception as error:
            failures = self._failures[subject] = self._failures.get(subject, 0) + 1
            wait = min(RETRY_SECONDS_MAX, RETRY_SECONDS_MIN * 2 ** min(failures, 10))
            self._not_before[subject] = time.monotonic() + wait
            measures.ERRANDS_FAILED.labels(self._name).inc()
            log.warning(
                "errand failed; it is tried again",
                errand=self._name,
                id=subject,
                failures=failures,
                error=type(error).__name__,
                exc_info=error,
            )
        else:
            self._failures.pop(subject, None)
            self._not_before.pop(subject, None)
        finally:
            del self._running[subject]


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
