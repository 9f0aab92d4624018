"""`python -m adapters.worker`: keeps work going.

Every worker takes in reports and keeps the following read models up. One at a time, by a lock in
PostgreSQL, is the active one: it starts, assigns, sends, validates, finalises and watches; the
others stand by. Each part is a loop that is woken by the log's notifications and by a tick, since
notifications can be lost, and that is started again, with a word in the log, whatever breaks it.
Nothing here decides anything: commands do.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress

import psycopg
import structlog
from pydantic import ValidationError

from adapters import kafka
from adapters.bootstrap import WorkerPlane, worker_plane
from adapters.event_log.event_store import CHANNEL
from adapters.metrics import serve_metrics
from adapters.settings import Settings
from adapters.start import run_process
from adapters.worker.batch_results import BatchResults
from adapters.worker.batch_validation import BatchValidation
from adapters.worker.dispatcher import Dispatcher
from adapters.worker.errands import Errands
from adapters.worker.fleet import Fleet
from adapters.worker.ingest import GROUP, Ingest
from adapters.worker.scheduler import Scheduler
from adapters.worker.watchdogs import Watchdogs
from domain.messages import PROGRESS_TOPIC, Heartbeat
from domain.ports import Consumer

log = structlog.stdlib.get_logger(__name__)

ACTIVE_WORKER_LOCK = 0x6772_6964_6C69_6E65
"""The advisory lock of the active worker: "gridline" in ASCII."""
POLL_SECONDS = 1.0
BROKER_CHECK_SECONDS = 5.0
ROUND_SPACING_SECONDS = 0.02
"""Between two rounds of one loop, however often it is woken."""
RESTART_SECONDS_MIN = 0.1
RESTART_SECONDS_MAX = 5.0
STEADY_SECONDS = 30.0
VALIDATIONS_AT_ONCE = 2
FINALISATIONS_AT_ONCE = 2
STOP_SECONDS_MAX = 1.5

Loop = Callable[[], Awaitable[None]]


class Worker:
    """All loops of one worker process; `run` ends when it is cancelled."""

    def __init__(self, plane: WorkerPlane) -> None:
        self._plane = plane
        self._settings = plane.settings
        self._ingest = Ingest(
            writer=plane.writer,
            progress_event_seconds=plane.settings.progress_event_seconds,
            steady_seconds=time.monotonic,
        )

    async def run(self) -> None:
        """Takes in reports, and everything else while this is the active worker."""
        await kafka.ensure_topics(self._settings)
        async with asyncio.TaskGroup() as group:
            group.create_task(_kept_up("ingest", self._take_in_reports))
            group.create_task(_kept_up("lead", self._lead))

    async def _take_in_reports(self) -> None:
        consumer = await kafka.group_consumer(
            self._settings,
            topics=[PROGRESS_TOPIC],
            group=GROUP,
            starting_positions=self._plane.handled_position,
        )
        try:
            broker = BrokerLife(self._settings, consumer)
            while True:
                records = await consumer.poll(timeout_seconds=POLL_SECONDS)
                if records:
                    await self._ingest.take(records, cluster_id=consumer.cluster_id)
                await broker.check()
        finally:
            await consumer.stop()

    async def _lead(self) -> None:
        """Waits for the lock, then is the active worker for as long as the connection lives that
        holds it."""
        connection = await psycopg.AsyncConnection.connect(
            self._settings.database_url,
            autocommit=True,
            application_name="gridline-active-worker",
            connect_timeout=5,
            keepalives_idle=5,
            keepalives_interval=5,
            keepalives_count=3,
        )
        async with connection:
            await _take_lock(connection)
            log.info("active worker")
            await connection.execute(f"LISTEN {CHANNEL}")
            active = ActiveWorker(self._plane)
            async with asyncio.TaskGroup() as group:
                for name, loop in active.loops().items():
                    group.create_task(_kept_up(name, loop))
                while True:
                    async for _ in connection.notifies(
                        timeout=self._settings.scheduler_tick_seconds, stop_after=1
                    ):
                        active.wake()
                    # Finds out that the connection, and with it the lock, is gone.
                    await connection.execute("SELECT 1")


class ActiveWorker:
    """The loops of the one worker that holds the lock; made anew each time that it is taken."""

    def __init__(self, plane: WorkerPlane) -> None:
        settings = plane.settings
        self._plane = plane
        self._settings = settings
        self._tick_seconds = settings.scheduler_tick_seconds
        self._woken: list[asyncio.Event] = []
        self._fleet = Fleet(
            lease_seconds=settings.lease_seconds,
            heartbeat_seconds=settings.heartbeat_seconds,
            steady_seconds=time.monotonic,
        )
        self._scheduler = Scheduler(
            writer=plane.writer,
            queue=plane.queue,
            fleet=self._fleet,
            steady_seconds=time.monotonic,
        )
        self._validation = BatchValidation(
            writer=plane.writer,
            queue=plane.queue,
            objects=plane.objects,
            chunk_requests=settings.batch_chunk_requests,
        )
        self._results = BatchResults(writer=plane.writer, objects=plane.objects)
        self._watchdogs = Watchdogs(
            writer=plane.writer,
            queue=plane.queue,
            objects=plane.objects,
            clock=plane.clock,
            steady_seconds=time.monotonic,
        )

    def loops(self) -> dict[str, Loop]:
        """By the name that the log calls them."""
        return {
            "heartbeats": self._hear,
            "start": lambda: self._rounds(self._scheduler.start_waiting),
            "explain": lambda: self._ticks(self._scheduler.explain_waits),
            "work": self._keep_work_running,
            "validate": self._validate,
            "finalize": self._finalize,
            "watch": lambda: self._ticks(self._watchdogs.look),
        }

    def wake(self) -> None:
        """Something was appended to the log, or a runner was heard."""
        for event in self._woken:
            event.set()

    async def _hear(self) -> None:
        consumer = await kafka.heartbeat_consumer(self._settings)
        self._fleet.listen_anew()
        try:
            broker = BrokerLife(self._settings, consumer)
            while True:
                for record in await consumer.poll(timeout_seconds=POLL_SECONDS):
                    await self._take_heartbeat(record.value)
                await broker.check()
        finally:
            await consumer.stop()

    async def _take_heartbeat(self, value: bytes) -> None:
        try:
            beat = Heartbeat.model_validate_json(value)
        except ValidationError as error:
            log.warning("unreadable heartbeat", errors=error.error_count())
            return
        self._fleet.hear(beat)
        self.wake()
        if beat.stopping:
            await self._plane.queue.forget_runner(beat.runner_id)
        else:
            await self._plane.queue.save_heartbeat(beat, at=self._plane.clock.now())

    async def _keep_work_running(self) -> None:
        producer = await kafka.producer(self._settings)
        try:
            dispatcher = Dispatcher(
                writer=self._plane.writer,
                producer=producer,
                fleet=self._fleet,
                broker_answers=lambda: kafka.answers(self._settings.kafka_bootstrap),
            )

            async def work_round() -> None:
                for runner_id in self._fleet.look():
                    await self._plane.queue.forget_runner(runner_id)
                assigned = await self._plane.queue.assigned()
                new = await self._scheduler.assign_free(assigned)
                known = {work.attempt for work in assigned}
                added = [work for work in new if work.attempt not in known]
                await dispatcher.reconcile([*assigned, *added])

            await self._rounds(work_round)
        finally:
            await producer.stop()

    async def _validate(self) -> None:
        await self._run_errands(
            self._plane.queue.to_validate,
            Errands("validate", self._validation.validate, at_once=VALIDATIONS_AT_ONCE),
        )

    async def _finalize(self) -> None:
        await self._run_errands(
            self._plane.queue.to_finalize,
            Errands("finalize", self._results.finalize, at_once=FINALISATIONS_AT_ONCE),
        )

    async def _run_errands(
        self, due: Callable[[], Awaitable[Sequence[str]]], errands: Errands
    ) -> None:
        async def send_out() -> None:
            errands.send(await due())

        async with errands:
            await self._rounds(send_out)

    async def _ticks(self, act: Loop) -> None:
        """Acts at each tick alone: what only the passing of time makes due."""
        while True:
            await act()
            await asyncio.sleep(self._tick_seconds)

    async def _rounds(self, act: Loop) -> None:
        """Acts when woken, and at each tick."""
        woken = asyncio.Event()
        self._woken.append(woken)
        try:
            while True:
                woken.clear()
                await act()
                await asyncio.sleep(ROUND_SPACING_SECONDS)
                # Not wait_for: in Python 3.11 it can swallow a cancellation.
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._tick_seconds):
                        await woken.wait()
        finally:
            self._woken.remove(woken)


class BrokerLife:
    """Notices a broker that came back as another one: it may answer a consumer of the last one
    with silence for ever."""

    def __init__(self, settings: Settings, consumer: Consumer) -> None:
        self._settings = settings
        self._consumer = consumer
        self._next_check = time.monotonic() + BROKER_CHECK_SECONDS

    async def check(self) -> None:
        """Raises BrokerChanged, and KafkaError while it is away."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + BROKER_CHECK_SECONDS
        if await kafka.current_cluster_id(self._settings) != self._consumer.cluster_id:
            raise BrokerChanged


class BrokerChanged(Exception):
    """The consumer must be made anew, with the positions of the new broker."""


async def _take_lock(connection: psycopg.AsyncConnection) -> None:
    """Returns once no other worker holds it. It asks now and then instead of waiting in the server,
    where a lock timeout would end it."""
    while True:
        cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", (ACTIVE_WORKER_LOCK,))
        row = await cursor.fetchone()
        if row is not None and row[0]:
            return
        await asyncio.sleep(POLL_SECONDS)


async def _kept_up(name: str, loop: Loop) -> None:
    """Starts the loop again whenever it ends; the waits between grow while it keeps failing."""
    wait = RESTART_SECONDS_MIN
    while True:
        began = time.monotonic()
        try:
            await loop()
        except Exception as error:
            log.warning(
                "loop broke; it starts again",
                loop=name,
                error=_kind(error),
                exc_info=error,
            )
        if time.monotonic() - began > STEADY_SECONDS:
            wait = RESTART_SECONDS_MIN
        await asyncio.sleep(wait)
        wait = min(RESTART_SECONDS_MAX, wait * 2)


def _kind(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return " and ".join(sorted({_kind(each) for each in error.exceptions}))
    return type(error).__name__


async def serve(settings: Settings) -> None:
    """Runs a worker until SIGTERM or SIGINT, and waits for a database that is away."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    well = {"database": False}
    with ExitStack() as stack:
        stack.enter_context(serve_metrics(settings, health=lambda: well))
        plane = await _open_plane(stack, settings, stopping)
        if plane is None:
            return
        well["database"] = True
        running = asyncio.create_task(_kept_up("worker", Worker(plane).run))
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait({running, waiting}, timeout=STOP_SECONDS_MAX)


async def _open_plane(
    stack: ExitStack, settings: Settings, stopping: asyncio.Event
) -> WorkerPlane | None:
    """None if it is stopped before."""
    while not stopping.is_set():
        try:
            return stack.enter_context(worker_plane(settings))
        except psycopg.OperationalError:
            log.warning("the database is away")
            with suppress(TimeoutError):
                async with asyncio.timeout(RESTART_SECONDS_MAX):
                    await stopping.wait()
    return None


def main() -> None:
    """The process."""
    run_process("worker", lambda settings: asyncio.run(serve(settings)))


if __name__ == "__main__":
    main()
