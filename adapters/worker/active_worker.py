"""The active worker: the one that starts, assigns, sends, validates, finalises and watches.

`worker.py` makes one each time that it takes the lock, and keeps its loops going. Each is woken by
the log's notifications and by a tick, since notifications can be lost. Nothing here decides
anything: commands do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import structlog
from pydantic import ValidationError

from adapters import kafka
from adapters.bootstrap import ControlPlane
from adapters.worker import measures
from adapters.worker.batch_results import BatchResults
from adapters.worker.batch_validation import BatchValidation
from adapters.worker.dispatcher import Dispatcher
from adapters.worker.errands import Errands
from adapters.worker.fleet import Fleet
from adapters.worker.loops import Beat, Loop
from adapters.worker.scheduler import Scheduler
from adapters.worker.watchdogs import Sweep, Watchdogs
from domain.messages import Heartbeat
from projections.direct import heartbeats
from projections.work import open_work
from projections.work.open_work import DueBatch

log = structlog.stdlib.get_logger(__name__)

POLL_SECONDS = 1.0
ROUND_SPACING_SECONDS = 0.02
"""Between two rounds of one loop, however often it is woken."""
DUE_MAX = 200
"""How many batches of each kind are seen in one round."""
MEASURE_SECONDS = 5.0
ERRANDS_AT_ONCE = 8
"""Batches that are validated at a time, and as many that are finalised."""
LARGE_ERRANDS_AT_ONCE = 2

Act = Callable[[], Awaitable[None]]


class ActiveWorker:
    """The loops of the one worker that holds the lock; made anew each time that it is taken."""

    def __init__(self, plane: ControlPlane, *, stopping: asyncio.Event) -> None:
        settings = plane.settings
        self._plane = plane
        self._stopping = stopping
        self._settings = settings
        self._tick_seconds = settings.scheduler_tick_seconds
        self._woken: list[asyncio.Event] = []
        self._fleet = Fleet(
            lease_seconds=settings.lease_seconds,
            heartbeat_seconds=settings.heartbeat_seconds,
            slots_max=settings.runner_slots_max,
            steady_seconds=time.monotonic,
        )
        self._scheduler = Scheduler(
            writer=plane.writer,
            read=plane.read,
            fleet=self._fleet,
            steady_seconds=time.monotonic,
        )
        self._validation = BatchValidation(
            writer=plane.writer,
            read=plane.read,
            objects=plane.objects,
            chunk_requests=settings.batch_chunk_requests,
        )
        self._results = BatchResults(writer=plane.writer, objects=plane.objects)
        self._sweep = Sweep(
            writer=plane.writer,
            read=plane.read,
            objects=plane.objects,
            steady_seconds=time.monotonic,
        )
        self._watchdogs = Watchdogs(
            writer=plane.writer,
            read=plane.read,
            objects=plane.objects,
            clock=plane.clock,
            steady_seconds=time.monotonic,
        )

    def loops(self) -> dict[str, Loop]:
        """By the name that the log calls them."""
        return {
            "heartbeats": self._hear,
            "start": lambda beat: self._rounds(self._scheduler.start_waiting, beat),
            "explain": lambda beat: self._ticks(self._scheduler.explain_waits, beat),
            "work": self._keep_work_running,
            "validate": self._validate,
            "finalize": self._finalize,
            "watch": lambda beat: self._ticks(self._watchdogs.look, beat),
            "sweep": lambda beat: self._ticks(lambda: self._sweep.look(beat), beat),
            "measure": self._measure,
        }

    def wake(self) -> None:
        """Something was appended to the log, or a runner was heard."""
        for event in self._woken:
            event.set()

    async def _hear(self, beat: Beat) -> None:
        consumer = await kafka.heartbeat_consumer(self._settings)
        self._fleet.listen_anew()
        try:
            while True:
                for record in await consumer.poll(timeout_seconds=POLL_SECONDS):
                    await self._take_heartbeat(record.value)
                beat()
        finally:
            await consumer.stop()

    async def _take_heartbeat(self, value: bytes) -> None:
        try:
            heard = Heartbeat.model_validate_json(value)
        except ValidationError as error:
            log.warning("unreadable heartbeat", errors=error.error_count())
            return
        if not self._fleet.hear(heard):
            log.warning(
                "heartbeat of an unknown class: its GRIDLINE_GPU_CLASS is none of ours",
                runner_id=heard.runner_id,
                gpu_class=heard.gpu_class,
            )
            return
        self.wake()
        if heard.stopping:
            await self._forget_runner(heard.runner_id)
        else:
            await self._plane.read(heartbeats.upsert, heard, seen_at=self._plane.clock.now())

    async def _keep_work_running(self, beat: Beat) -> None:
        producer = await kafka.producer(self._settings)
        dispatcher = Dispatcher(
            writer=self._plane.writer,
            producer=producer,
            fleet=self._fleet,
            broker_answers=lambda: kafka.answers(self._settings.kafka_bootstrap),
        )
        try:

            async def work_round() -> None:
                for runner_id in self._fleet.look():
                    await self._forget_runner(runner_id)
                assigned = await self._plane.read(open_work.assigned)
                new = await self._scheduler.assign_free(assigned)
                known = {work.attempt for work in assigned}
                added = [work for work in new if work.attempt not in known]
                await dispatcher.reconcile([*assigned, *added])

            await self._rounds(work_round, beat)
        finally:
            await dispatcher.close()
            await producer.stop()

    async def _forget_runner(self, runner_id: str) -> None:
        await self._plane.read(heartbeats.delete, runner_id)

    async def _validate(self, beat: Beat) -> None:
        async def due() -> Sequence[DueBatch]:
            return await self._plane.read(open_work.batches_to_validate, limit=DUE_MAX)

        await self._run_errands(due, self._errands("validate", self._validation.validate), beat)

    async def _finalize(self, beat: Beat) -> None:
        async def due() -> Sequence[DueBatch]:
            return await self._plane.read(open_work.batches_to_finalize, limit=DUE_MAX)

        await self._run_errands(due, self._errands("finalize", self._results.finalize), beat)

    def _errands(self, name: str, act: Callable[[str], Awaitable[None]]) -> Errands:
        return Errands(
            name,
            act,
            at_once=ERRANDS_AT_ONCE,
            large_at_once=LARGE_ERRANDS_AT_ONCE,
            grace=lambda: self._settings.stop_seconds if self._stopping.is_set() else 0.0,
        )

    async def _run_errands(
        self, due: Callable[[], Awaitable[Sequence[DueBatch]]], errands: Errands, beat: Beat
    ) -> None:
        async def send_out() -> None:
            errands.send(await due())

        async with errands:
            await self._rounds(send_out, beat)

    async def _measure(self, beat: Beat) -> None:
        while True:
            now = self._plane.clock.now()
            depths = await self._plane.read(open_work.depths)
            measures.OPEN_WORK.clear()
            measures.OLDEST_SECONDS.clear()
            for depth in depths:
                age = (now - depth.oldest_at).total_seconds()
                measures.OPEN_WORK.labels(depth.kind, depth.stage).set(depth.count)
                measures.OLDEST_SECONDS.labels(depth.kind, depth.stage).set(age)
            measures.RUNNERS.set(self._fleet.present())
            beat()
            await asyncio.sleep(MEASURE_SECONDS)

    async def _ticks(self, act: Act, beat: Beat) -> None:
        """Acts at each tick alone: what only the passing of time makes due."""
        while True:
            await act()
            beat()
            await asyncio.sleep(self._tick_seconds)

    async def _rounds(self, act: Act, beat: Beat) -> None:
        """Acts when woken, and at each tick."""
        woken = asyncio.Event()
        self._woken.append(woken)
        try:
            while True:
                woken.clear()
                await act()
                beat()
                await asyncio.sleep(ROUND_SPACING_SECONDS)
                # Not wait_for: in Python 3.11 it can swallow a cancellation.
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._tick_seconds):
                        await woken.wait()
        finally:
            self._woken.remove(woken)
