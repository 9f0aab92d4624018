"""The runner: the small parent that talks Kafka and objects, and never dies of its work.

`__main__.py` starts one for each GPU (or CPU). It acts on the attempts addressed to it, once each,
keeps the final reports of ended ones to give them again, and says by heartbeat what it is doing,
also when that is nothing. Each task runs in a child process; torch and vLLM are never imported
here, and no row, prompt or key reaches the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Self

import structlog
from pydantic import ValidationError

from adapters.process.settings import Settings
from domain.messages import (
    PROGRESS_TOPIC,
    RUNNERS_TOPIC,
    WORK_MESSAGE,
    Assign,
    Attempt,
    Cancel,
    Heartbeat,
    Report,
    Revoke,
    TaskKind,
)
from domain.ports import Clock, Consumer, Objects, Producer, Record
from gpu_runners.parent import measures
from gpu_runners.parent.adapter_cache import AdapterCache
from gpu_runners.parent.attempts import Tools
from gpu_runners.parent.contact import BrokerAnswers, Contact, RunnerBroken
from gpu_runners.parent.slots import EngineSlot, EngineSlots
from gpu_runners.parent.work_directory import WorkDirectory
from gpu_runners.parent.works import Works
from gpu_runners.weights.store import Weights

POLL_SECONDS = 1.0
STOPPING_SECONDS_MAX = 2.0


logger = structlog.stdlib.get_logger(__name__)


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
        self.engines = EngineSlots(
            [
                EngineSlot(settings, weights, self._directory.path)
                for _ in range(settings.runner_slots_batch)
            ]
        )
        self._slots: dict[TaskKind, int] = {
            "batch_chunk": settings.runner_slots_batch,
            "train": settings.runner_slots_train,
        }
        tools = Tools(
            settings=settings,
            objects=objects,
            clock=clock,
            engines=self.engines,
            adapters=AdapterCache(self._directory.path / "adapters", objects),
            weights_root=weights.root,
            work_dir=self._directory.path,
        )
        self._works = Works(tools, self._slots, publish=self._publish, on_idle=self._idle)
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
        running = self._works.running
        logger.info("draining", running=len(running))
        self._draining = True
        measures.DRAINING.set(1)
        self._beat_now.set()
        grace_seconds = self._settings.drain_seconds if running else 0.0
        asyncio.get_running_loop().call_later(grace_seconds, self.stop)

    def _idle(self) -> None:
        if self._draining:
            self.stop()

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
        abandoned = self._works.running
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops, timeout=STOPPING_SECONDS_MAX)
        await self._works.abandon(within_seconds=STOPPING_SECONDS_MAX)
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
                    await self._heartbeat(running=self._works.running)
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
            measures.BEATS_FAILED.inc()
        else:
            self._beats_contact.worked()
            measures.BEAT_AT.set_to_current_time()

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
                self._works.assign(message, may_begin=not self._draining)
            case Cancel():
                self._works.cancel(message.attempt)
            case Revoke():
                self._works.revoke(message.attempt)

    async def _publish(self, report: Report) -> None:
        value = report.model_dump_json().encode()
        await self._producer.send(PROGRESS_TOPIC, key=report.attempt.work_id, value=value)


def _require_alive(loops: set[asyncio.Task[None]]) -> None:
    """A runner with a dead loop looks alive and is not. Raises RunnerBroken."""
    for loop in loops:
        if loop.done():
            error = None if loop.cancelled() else loop.exception()
            if isinstance(error, RunnerBroken):
                raise error
            raise RunnerBroken(f"the loop {loop.get_name()!r} ended unasked") from error
