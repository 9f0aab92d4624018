"""Longer work of the active worker, one piece each: a few at once, never two for one subject, and
a failed one again only after a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

import structlog

log = structlog.stdlib.get_logger(__name__)

RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = 60.0


class Errands:
    """`act` is done for each subject that `send` gets; leaving the context cancels what runs."""

    def __init__(self, name: str, act: Callable[[str], Awaitable[None]], *, at_once: int) -> None:
        self._name = name
        self._act = act
        self._at_once = at_once
        self._running: dict[str, asyncio.Task[None]] = {}
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
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def send(self, subjects: Iterable[str]) -> None:
        """Starts what can start now; the rest comes with the next call."""
        now = time.monotonic()
        for subject in subjects:
            if len(self._running) >= self._at_once:
                return
            if subject not in self._running and now >= self._not_before.get(subject, 0.0):
                self._running[subject] = asyncio.create_task(self._run(subject))

    async def _run(self, subject: str) -> None:
        try:
            await self._act(subject)
        except Exception as error:
            failures = self._failures[subject] = self._failures.get(subject, 0) + 1
            wait = min(RETRY_SECONDS_MAX, RETRY_SECONDS_MIN * 2 ** min(failures, 10))
            self._not_before[subject] = time.monotonic() + wait
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
