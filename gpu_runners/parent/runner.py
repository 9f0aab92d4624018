"""The runner: the small parent that talks Kafka and objects, and never dies of its work.

`__main__.py` starts one for each GPU (or CPU). It acts on the attempts addressed to it, once each,
keeps the final reports of ended ones to give them again, and says by heartbeat what it is doing,
also when that is nothing. Each task runs in a child process; torch and vLLM are never imported
here, and no row, prompt or key reaches the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import structlog
from pydantic import ValidationError

from adapters.settings import Settings
from domain.messages import (
    PROGRESS_TOPIC,
    RUNNERS_TOPIC,
    WORK_MESSAGE,
    Assign,
    Attempt,
    AttemptFailed,
    Cancel,
    Heartbeat,
    Report,
    Revoke,
    TaskKind,
)
from domain.ports import Clock, Consumer, Objects, Producer, Record
from gpu_runners.parent.adapter_cache import AdapterCache
from gpu_runners.parent.attempts import FinalBody, RunningAttempt, Tools
from gpu_runners.parent.chunk import run_chunk
from gpu_runners.parent.contact import BrokerAnswers, Contact, RunnerBroken
from gpu_runners.parent.slots import EngineSlot, EngineSlots
from gpu_runners.parent.training_run import run_training
from gpu_runners.parent.work_directory import WorkDirectory
from gpu_runners.weights.store import Weights

REMEMBERED_MAX = 1_000
"""Ended, revoked and early-cancelled attempts that a runner remembers, each."""
SEND_TRIES = 8
SEND_WAIT_SECONDS = 0.25
SEND_WAIT_SECONDS_MAX = 5.0
SEND_SECONDS_MAX = 20.0
POLL_SECONDS = 1.0
STOPPING_SECONDS_MAX = 2.0


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


class Runner:
    """One runner. Use it as an async context manager around `run`, which returns after `stop`."""

    def __init__(
        self,
        *,
        runner_id: str,
        settings: Settings,
        producer: Producer,
        consumer: Consumer,
        objects: Objects,
        clock: Clock,
        weights: Weights,
        weights_root: Path,
        bases: tuple[str, ...],
        broker_answers: BrokerAnswers,
    ) -> None:
        self._id = runner_id
        self._settings = settings
        self._producer = producer
        self._consumer = consumer
        self._clock = clock
        self._bases = bases
        self._directory = WorkDirectory()
        work_dir = self._directory.path
        slots = [
            EngineSlot(settings, weights, work_dir) for _ in range(settings.runner_slots_batch)
        ]
        self.engines = EngineSlots(slots)
        self._tools = Tools(
            settings=settings,
            objects=objects,
            clock=clock,
            engines=self.engines,
            adapters=AdapterCache(work_dir / "adapters", objects),
            weights_root=weights_root,
            work_dir=work_dir,
        )
        self._slots: dict[TaskKind, int] = {
            "batch_chunk": settings.runner_slots_batch,
            "train": settings.runner_slots_train,
        }
        self._room = {kind: asyncio.Semaphore(count) for kind, count in self._slots.items()}
        self._running: dict[Attempt, RunningAttempt] = {}
        self._works: dict[Attempt, asyncio.Task[None]] = {}
        self._ended = _Remembered[Report]()
        self._revoked = _Remembered[bool]()
        self._cancelled_early = _Remembered[bool]()
        self._resending: dict[Attempt, asyncio.Task[None]] = {}
        self._beats_contact, self._work_contact = (
            Contact(name, lease_seconds=settings.lease_seconds, broker_answers=broker_answers)
            for name in ("heartbeats", "work messages")
        )
        self._beat_now = asyncio.Event()
        self._draining = False
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._directory.remove()

    def drain(self) -> None:
        """A planned stop: no new work, and `run` returns when what runs has ended, at the latest
        after `drain_seconds`. Called again, it returns at once."""
        if self._draining:
            self.stop()
            return
        logger.info("draining", running=len(self._running))
        self._draining = True
        self._beat_now.set()
        grace_seconds = self._settings.drain_seconds if self._works else 0.0
        asyncio.get_running_loop().call_later(grace_seconds, self.stop)

    def stop(self) -> None:
        """Ends `run` soon: children are stopped, what runs is abandoned to the worker's care."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs until `stop`. Raises RunnerBroken when one of its loops ends unasked."""
        loops = {
            asyncio.create_task(self._heartbeats(), name="heartbeats"),
            asyncio.create_task(self._consume(), name="work"),
            asyncio.create_task(self._watch_contacts(), name="contacts"),
        }
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({stopped, *loops}, return_when=asyncio.FIRST_COMPLETED)
            _require_alive(loops)
        finally:
            await self._leave({stopped, *loops})

    async def _leave(self, loops: set[asyncio.Task[Any]]) -> None:
        abandoned = tuple(self._running)
        tasks = {*loops, *self._works.values(), *self._resending.values()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=STOPPING_SECONDS_MAX)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOPPING_SECONDS_MAX):
                await self._heartbeat(running=abandoned, stopping=True)
        await self.engines.stop()

    async def _heartbeats(self) -> None:
        while True:
            self._beat_now.clear()
            # Not wait_for: before Python 3.12 it can swallow the cancel that ends this loop.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.heartbeat_seconds):
                    await self._heartbeat(running=tuple(self._running))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.heartbeat_seconds):
                    await self._beat_now.wait()

    async def _watch_contacts(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_seconds)
            await self._beats_contact.look()
            await self._work_contact.look()

    async def _heartbeat(self, *, running: tuple[Attempt, ...], stopping: bool = False) -> None:
        beat = Heartbeat(
            runner_id=self._id,
            gpu_class=self._settings.gpu_class,
            sent_at=self._clock.now(),
            slots=self._slots,
            running=running,
            bases=self._bases,
            warm_base=self.engines.warm_base,
            draining=self._draining,
            stopping=stopping,
        )
        value = beat.model_dump_json().encode()
        try:
            await self._producer.send(RUNNERS_TOPIC, key=self._id, value=value)
        except Exception as error:  # noqa: BLE001 - the broker's trouble; the next one may pass
            logger.warning("heartbeat not sent", error=type(error).__name__)
        else:
            self._beats_contact.worked()

    async def _consume(self) -> None:
        while True:
            try:
                records = await self._consumer.poll(timeout_seconds=POLL_SECONDS)
            except Exception as error:  # noqa: BLE001 - the broker's trouble; the log is sent again
                logger.warning("work not read", error=type(error).__name__)
                await asyncio.sleep(POLL_SECONDS)
                continue
            self._work_contact.worked()
            for record in records:
                self._take(record)

    def _take(self, record: Record) -> None:
        try:
            message = WORK_MESSAGE.validate_json(record.value)
        except ValidationError:
            logger.warning("unreadable work message", offset=record.offset)
            return
        if message.attempt.runner_id != self._id:
            return
        match message:
            case Assign():
                self._assign(message)
            case Cancel():
                self._cancel(message.attempt)
            case Revoke():
                self._revoke(message.attempt)

    def _assign(self, message: Assign) -> None:
        attempt = message.attempt
        if attempt in self._revoked:
            return
        if (report := self._ended.get(attempt)) is not None:
            self._send_again(report)
            return
        if attempt in self._running or self._draining:
            return
        running = RunningAttempt(attempt=attempt, tools=self._tools, publish=self._publish)
        if attempt in self._cancelled_early:
            running.cancelled.set()
        self._running[attempt] = running
        work = asyncio.create_task(self._work(running, message))
        self._works[attempt] = work
        work.add_done_callback(lambda _: self._forget(attempt))

    def _cancel(self, attempt: Attempt) -> None:
        if (report := self._ended.get(attempt)) is not None:
            self._send_again(report)
        elif (running := self._running.get(attempt)) is not None:
            running.cancelled.set()
        else:
            self._cancelled_early.add(attempt, True)

    def _revoke(self, attempt: Attempt) -> None:
        self._revoked.add(attempt, True)
        self._ended.drop(attempt)
        if (work := self._works.get(attempt)) is not None:
            work.cancel()

    def _forget(self, attempt: Attempt) -> None:
        self._running.pop(attempt, None)
        self._works.pop(attempt, None)
        if self._draining and not self._works:
            self.stop()

    def _send_again(self, report: Report) -> None:
        if report.attempt in self._resending:
            return
        task = asyncio.create_task(self._send_surely(report))
        self._resending[report.attempt] = task
        task.add_done_callback(lambda _: self._resending.pop(report.attempt))

    async def _work(self, running: RunningAttempt, message: Assign) -> None:
        kind = message.task.kind
        fields = {"work_id": running.attempt.work_id, "chunk": running.attempt.chunk}
        try:
            async with self._room[kind]:
                logger.info("attempt started", **fields)
                body = await TASK_RUNS[kind].run(running, message.task)
        except Exception:
            logger.warning("attempt broke", exc_info=True, **fields)
            body = AttemptFailed(
                code=TASK_RUNS[kind].failure_code,
                message="The runner could not finish this work.",
            )
        await running.settle()
        report = running.report(body)
        self._ended.add(running.attempt, report)
        logger.info("attempt ended", **fields, result=body.type)
        await self._send_surely(report)

    async def _publish(self, report: Report) -> None:
        value = report.model_dump_json().encode()
        await self._producer.send(PROGRESS_TOPIC, key=report.attempt.work_id, value=value)

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


def _require_alive(loops: set[asyncio.Task[None]]) -> None:
    """A runner with a dead loop looks alive and is not. Raises RunnerBroken."""
    for loop in loops:
        if loop.done():
            error = None if loop.cancelled() else loop.exception()
            if isinstance(error, RunnerBroken):
                raise error
            raise RunnerBroken(f"the loop {loop.get_name()!r} ended unasked") from error
