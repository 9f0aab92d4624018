"""What a running attempt is given: the runner's tools, a way to report progress, a cancel mark.

`runner.py` makes one for each attempt; `chunk.py` and `training_run.py` use it. Progress may be
lost without harm; the final report is the return value of the work, so that it is never sent twice
or forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog

from adapters.process.settings import Settings
from domain.messages import (
    Attempt,
    AttemptFailed,
    ChunkFinished,
    ChunkProgress,
    Report,
    Started,
    TrainCancelled,
    TrainFinished,
    TrainProgress,
)
from domain.ports import Clock, ObjectMissing, Objects
from gpu_runners.parent.adapter_cache import AdapterCache, DigestMismatch
from gpu_runners.parent.slots import EngineSlots

FinalBody = ChunkFinished | TrainFinished | TrainCancelled | AttemptFailed
Body = Started | ChunkProgress | TrainProgress | FinalBody
Publish = Callable[[Report], Awaitable[None]]

STORE_TRIES = 4
STORE_WAIT_SECONDS = 0.5

T = TypeVar("T")

logger = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Tools:
    """What every attempt of one runner shares."""

    settings: Settings
    objects: Objects
    clock: Clock
    engines: EngineSlots
    adapters: AdapterCache
    weights_root: Path
    work_dir: Path


@dataclass(slots=True)
class RunningAttempt:
    """One attempt at work."""

    attempt: Attempt
    tools: Tools
    publish: Publish
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    _seq: int = 0
    _told_at: float = 0.0
    _telling: asyncio.Task[None] | None = None

    def report(self, body: Body) -> Report:
        """The next report of this attempt."""
        self._seq += 1
        now = self.tools.clock.now()
        return Report(attempt=self.attempt, seq=self._seq, at=now, body=body)

    def started(self) -> None:
        """Tells that the work has begun."""
        self._tell(Started())

    def progress(self, body: ChunkProgress | TrainProgress) -> None:
        """Tells progress, at most every `progress_seconds`, and only when the last is out."""
        passed = asyncio.get_running_loop().time() - self._told_at
        if passed >= self.tools.settings.progress_seconds and self._idle:
            self._tell(body)

    async def settle(self) -> None:
        """Waits for the report that is on its way, so that the final one comes after it."""
        if self._telling is not None:
            await asyncio.wait({self._telling}, timeout=5.0)
            self._telling.cancel()

    @property
    def _idle(self) -> bool:
        return self._telling is None or self._telling.done()

    def _tell(self, body: Body) -> None:
        self._told_at = asyncio.get_running_loop().time()
        self._telling = asyncio.create_task(self._send(self.report(body)))

    async def _send(self, report: Report) -> None:
        try:
            await self.publish(report)
        except Exception as error:  # noqa: BLE001 - the broker's trouble; progress may be lost
            logger.warning("progress not sent", error=type(error).__name__)


async def with_store_retries(work: Callable[[], Awaitable[T]]) -> T:
    """Runs a store operation that may be repeated, again after trouble; raises the last error.
    A missing object or a wrong digest is no trouble and is raised at once."""
    for again in range(1, STORE_TRIES):
        try:
            return await work()
        except (ObjectMissing, DigestMismatch):
            raise
        except Exception as error:  # noqa: BLE001 - each store has its own errors
            logger.warning("object store trouble", error=type(error).__name__)
            await asyncio.sleep(STORE_WAIT_SECONDS * 2**again)
    return await work()
