"""All of one worker: every worker takes in reports; one at a time is the active one.

`__main__.py` runs it. The active one is who holds a lock in PostgreSQL: it starts, assigns, sends,
validates, finalises and watches (`active_worker.py`); the others stand by. Nothing here decides
anything: commands do.
"""

from __future__ import annotations

import asyncio
import time

import psycopg
import structlog

from adapters import kafka
from adapters.bootstrap import ControlPlane
from adapters.event_log import positions
from adapters.event_log.event_store import CHANNEL
from adapters.kafka import Partition, StartingPoint
from adapters.worker import measures
from adapters.worker.active_worker import ActiveWorker
from adapters.worker.ingest import GROUP, Ingest
from adapters.worker.loops import Beat, Loops
from domain.messages import PROGRESS_TOPIC

log = structlog.stdlib.get_logger(__name__)

POLL_SECONDS = 1.0
ACTIVE_WORKER_LOCK = 0x6772_6964_6C69_6E65
"""The advisory lock of the active worker: "gridline" in ASCII."""


class Worker:
    """All loops of one worker process; `run` ends when it is cancelled. Whoever sets `stopping`
    before gives what is being validated and finalised the time to finish."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.stopping = asyncio.Event()
        self._settings = plane.settings
        self.loops = Loops()
        self._ingest = Ingest(
            writer=plane.writer,
            objects=plane.objects,
            progress_event_seconds=plane.settings.progress_event_seconds,
            steady_seconds=time.monotonic,
        )

    async def run(self) -> None:
        """Takes in reports, and everything else while this is the active worker."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.loops.keep("ingest", self._take_in_reports))
            group.create_task(self.loops.keep("lead", self._lead))

    async def _take_in_reports(self, beat: Beat) -> None:
        await kafka.ensure_topics(self._settings)
        consumer = await kafka.group_consumer(
            self._settings,
            topics=[PROGRESS_TOPIC],
            group=GROUP,
            find_start=self._find_start,
        )
        try:
            while True:
                records = await consumer.poll(timeout_seconds=POLL_SECONDS)
                if records:
                    await self._ingest.take(records)
                measures.REPORTS_BEHIND.set(consumer.records_behind)
                beat()
        finally:
            await consumer.stop()

    async def _find_start(self, partition: Partition) -> StartingPoint:
        name, handled = await self._plane.read(
            positions.go_on,
            cluster_id=partition.cluster_id,
            topic=partition.topic,
            partition=partition.number,
            end=partition.end,
        )
        return StartingPoint(name, handled)

    async def _lead(self, beat: Beat) -> None:
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
            await _take_lock(connection, beat)
            log.info("active worker")
            await connection.execute(f"LISTEN {CHANNEL}")
            active = ActiveWorker(self._plane, stopping=self.stopping)
            with measures.ACTIVE.track_inprogress():
                await self._be_active(connection, active, beat)

    async def _be_active(
        self, connection: psycopg.AsyncConnection, active: ActiveWorker, beat: Beat
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for name, loop in active.loops().items():
                group.create_task(self.loops.keep(name, loop))
            while True:
                async for _ in connection.notifies(
                    timeout=self._settings.scheduler_tick_seconds, stop_after=1
                ):
                    active.wake()
                # Finds out that the connection, and with it the lock, is gone.
                await connection.execute("SELECT 1")
                beat()


async def _take_lock(connection: psycopg.AsyncConnection, beat: Beat) -> None:
    """Returns once no other worker holds it. It asks now and then instead of waiting in the server,
    where a lock timeout would end it."""
    while True:
        cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", (ACTIVE_WORKER_LOCK,))
        row = await cursor.fetchone()
        if row is not None and row[0]:
            return
        beat()
        await asyncio.sleep(POLL_SECONDS)
