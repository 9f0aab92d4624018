"""The attempts that were given to this runner: each is run once, and its end is told surely.

`runner.py` passes on what the worker says. What ended is remembered, to give its report again; so
is what was revoked, or cancelled before it came. Each kind of task has so many slots; what comes
beyond them waits here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from domain.messages import Assign, Attempt, AttemptFailed, Report, TaskKind
from gpu_runners.parent import measures
from gpu_runners.parent.attempts import FinalBody, Publish, RunningAttempt, Tools
from gpu_runners.parent.chunk import run_chunk
from gpu_runners.parent.training_run import run_training

REMEMBERED_MAX = 1_000
"""Ended, revoked and early-cancelled attempts that a runner remembers, each."""
SEND_TRIES = 8
SEND_WAIT_SECONDS = 0.25
SEND_WAIT_SECONDS_MAX = 5.0
SEND_SECONDS_MAX = 20.0


@dataclass(frozen=True, slots=True)
class TaskRun:
    """How a kind of task is run, and the code of an attempt that breaks the runner's own code."""

    run: Callable[[RunningAttempt, Any], Awaitable[FinalBody]]
    failure_code: str


TASK_RUNS: dict[TaskKind, TaskRun] = {
    "batch_chunk": TaskRun(run=run_chunk, failure_code="engine_failed"),
    "train": TaskRun(run=run_training, failure_code="platform_interrupted"),
}

T = TypeVar("T")

logger = structlog.stdlib.get_logger(__name__)


class _Remembered(Generic[T]):
    """The newest attempts of a kind, with what is kept of each."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Attempt, T] = OrderedDict()

    def add(self, attempt: Attempt, value: T) -> None:
        self._kept[attempt] = value
        if len(self._kept) > REMEMBERED_MAX:
            self._kept.popitem(last=False)

    def drop(self, attempt: Attempt) -> None:
        self._kept.pop(attempt, None)

    def get(self, attempt: Attempt) -> T | None:
        return self._kept.get(attempt)

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._kept


class Works:
    """All attempts of one runner. `on_idle` is called when the last one has ended."""

    def __init__(
        self,
        tools: Tools,
        slots: Mapping[TaskKind, int],
        *,
        publish: Publish,
        on_idle: Callable[[], None],
    ) -> None:
        self._tools = tools
        self._publish = publish
        self._on_idle = on_idle
        self._room = {kind: asyncio.Semaphore(count) for kind, count in slots.items()}
        self._running: dict[Attempt, RunningAttempt] = {}
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}
        self._ended = _Remembered[Report]()
        self._revoked = _Remembered[bool]()
        self._cancelled_early = _Remembered[bool]()
        self._resending: dict[Attempt, asyncio.Task[None]] = {}

    @property
    def running(self) -> tuple[Attempt, ...]:
        """What heartbeats name."""
        return tuple(self._running)

    async def abandon(self, *, within_seconds: float) -> None:
        """Ends all that is done here, without a report."""
        tasks = {*self._tasks.values(), *self._resending.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=within_seconds)

    def assign(self, message: Assign, *, may_begin: bool) -> None:
        """Begins an attempt that is new here, if it may; one that ended is told of again."""
        attempt = message.attempt
        if attempt in self._revoked:
            return
        if (report := self._ended.get(attempt)) is not None:
            self._send_again(report)
            return
        if attempt in self._running or not may_begin:
            return
        running = RunningAttempt(attempt=attempt, tools=self._tools, publish=self._publish)
        if attempt in self._cancelled_early:
            running.cancelled.set()
        self._running[attempt] = running
        work = asyncio.create_task(self._work(running, message))
        self._tasks[attempt] = work
        work.add_done_callback(lambda _: self._forget(attempt))

    def cancel(self, attempt: Attempt) -> None:
        """Stops it, and keeps and reports what is finished; it may come before its assignment."""
        if (report := self._ended.get(attempt)) is not None:
            self._send_again(report)
        elif (running := self._running.get(attempt)) is not None:
            running.cancelled.set()
        else:
            self._cancelled_early.add(attempt, True)

    def revoke(self, attempt: Attempt) -> None:
        """Stops it and forgets it; it never runs again."""
        self._revoked.add(attempt, True)
        self._ended.drop(attempt)
        if (work := self._tasks.get(attempt)) is not None:
            work.cancel()

    def _forget(self, attempt: Attempt) -> None:
        self._running.pop(attempt, None)
        self._tasks.pop(attempt, None)
        if not self._tasks:
            self._on_idle()

    def _send_again(self, report: Report) -> None:
        if report.attempt in self._resending:
            return
        task = asyncio.create_task(self._send_surely(report))
        self._resending[report.attempt] = task
        task.add_done_callback(lambda _: self._resending.pop(report.attempt))

    async def _work(self, running: RunningAttempt, message: Assign) -> None:
        kind, end = message.task.kind, "revoked"
        try:
            async with self._room[kind]:
                with measures.RUNNING.labels(kind=kind).track_inprogress():
                    body = await _run(running, message)
            end = body.type
            await running.settle()
            report = running.report(body)
            self._ended.add(running.attempt, report)
        finally:
            measures.ATTEMPTS.labels(kind=kind, end=end).inc()
        await self._send_surely(report)

    async def _send_surely(self, report: Report) -> None:
        """Tries for about a minute; after that the worker's repeated Assign asks for it again."""
        wait_seconds = SEND_WAIT_SECONDS
        for _ in range(SEND_TRIES):
            try:
                async with asyncio.timeout(SEND_SECONDS_MAX):
                    await self._publish(report)
            except Exception as error:  # noqa: BLE001 - the broker's trouble, whatever it is
                logger.warning("report not sent", error=type(error).__name__)
                await asyncio.sleep(wait_seconds)
                wait_seconds = min(wait_seconds * 2, SEND_WAIT_SECONDS_MAX)
            else:
                return


async def _run(running: RunningAttempt, message: Assign) -> FinalBody:
    """Every way in which the work can end becomes a report, but for being revoked."""
    fields = {"work_id": running.attempt.work_id, "chunk": running.attempt.chunk}
    kind = TASK_RUNS[message.task.kind]
    logger.info("attempt started", **fields)
    try:
        body = await kind.run(running, message.task)
    except Exception:
        logger.warning("attempt broke", exc_info=True, **fields)
        body = AttemptFailed(
            code=kind.failure_code, message="The runner could not finish this work."
        )
    logger.info("attempt ended", **fields, result=body.type)
    return body
