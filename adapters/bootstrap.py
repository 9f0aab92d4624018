"""The composition root: the one place where real things are chosen for a process.

The API, the worker and the operator's commands open a plane here and close it at their end;
settings come in as a value. Nothing else in the product names an implementation of a port, and the
worker's parts get their reads from here, since only this module knows the projections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar

import psycopg
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

from adapters.clock import RandomIds, clock_of
from adapters.event_log.event_store import EventStore, decode
from adapters.event_log.postgres import Connection, connect
from adapters.event_log.writer import Writer
from adapters.objects import open_store
from adapters.settings import Settings
from adapters.worker.ingest import tracking_name
from domain.errors import Overloaded
from domain.messages import Heartbeat
from domain.ports import Clock, IdSource, Objects
from domain.work.scheduling import AssignedWork, StartableWork, WaitingWork
from projections.direct import fingerprints, runners
from projections.follower import ProjectionRunner
from projections.registry import FOLLOWING, INLINE
from projections.work import files, models
from projections.work import open_work as work

P = ParamSpec("P")
T = TypeVar("T")

READ_CONNECTIONS_MAX = 16
READ_WAIT_SECONDS_MAX = 10.0
WAITING_OF_EACH = 200
"""Waiting chunks of one account and base that are looked at: more than any fleet's free slots."""
DUE_MAX = 200
FINGERPRINTS_KEPT = timedelta(minutes=30)
"""Three tries of an SDK at its time-out of ten minutes each."""

_POSITION = """
    SELECT notification_id FROM gridline_tracking WHERE application_name = %s
"""


@dataclass(frozen=True)
class ControlPlane:
    """What a process that changes and reads things works with."""

    settings: Settings
    writer: Writer
    reads: ConnectionPool[Connection]
    clock: Clock
    ids: IdSource

    @cached_property
    def objects(self) -> Objects:
        """Opened at first use: an operator's command needs none. Raises ValueError."""
        return open_store(self.settings.object_store_url)

    async def read(
        self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs a read function in a thread, on a connection of the pool. Raises Overloaded while
        the database is away."""

        def on_connection() -> T:
            with self.reads.connection() as connection:
                return function(connection, *args, **kwargs)

        try:
            return await asyncio.to_thread(on_connection)
        except psycopg.OperationalError as error:
            raise Overloaded("The database is away. Send the request again.") from error


@contextmanager
def control_plane(settings: Settings) -> Iterator[ControlPlane]:
    """Opens and closes it. Raises UnsafeDatabase, and psycopg.OperationalError where the database
    is away."""
    # The library would wait half a minute and then say less.
    connect(settings.database_url, name="gridline-start").close()
    clock, ids = clock_of(settings), RandomIds()
    store = EventStore(settings.database_url, projections=INLINE)
    writer = Writer(store, clock=clock, ids=ids)
    try:
        with _read_pool(settings.database_url) as reads:
            yield ControlPlane(settings=settings, writer=writer, reads=reads, clock=clock, ids=ids)
    finally:
        writer.close()


@dataclass(frozen=True)
class WorkerPlane(ControlPlane):
    """What a worker works with besides."""

    @cached_property
    def queue(self) -> ProjectedWork:
        """Implements `adapters.worker.work_queue.WorkQueue`."""
        return ProjectedWork(self)

    async def handled_position(self, cluster_id: str, topic: str, partition: int) -> int | None:
        """The last offset of a partition whose record was handled, in this life of the broker."""
        return await self.read(_position, tracking_name(cluster_id, topic, partition))


@contextmanager
def worker_plane(settings: Settings) -> Iterator[WorkerPlane]:
    """A control plane, and the read models that follow the log, kept up by a thread."""
    following = ProjectionRunner(
        lambda: connect(settings.database_url, name="gridline-projections"), decode, FOLLOWING
    )
    with control_plane(settings) as plane:
        following.start()
        try:
            yield WorkerPlane(
                settings=settings,
                writer=plane.writer,
                reads=plane.reads,
                clock=plane.clock,
                ids=plane.ids,
            )
        finally:
            following.close()


class ProjectedWork:
    """`adapters.worker.work_queue.WorkQueue` over the projections."""

    def __init__(self, plane: ControlPlane) -> None:
        self._read = plane.read

    async def startable(self) -> Sequence[StartableWork]:
        return [
            StartableWork(
                work_id=row.work_id,
                account_id=row.account_id,
                account_position=row.account_changed_position,
            )
            for row in await self._read(work.startable)
        ]

    async def waiting(self) -> Sequence[WaitingWork]:
        return await self._read(work.waiting, each=WAITING_OF_EACH)

    async def assigned(self) -> Sequence[AssignedWork]:
        return await self._read(work.assigned)

    async def to_validate(self) -> Sequence[str]:
        return await self._read(work.batches_to_validate, limit=DUE_MAX)

    async def to_finalize(self) -> Sequence[str]:
        return await self._read(work.batches_to_finalize, limit=DUE_MAX)

    async def windows_over(self, now: datetime) -> Sequence[str]:
        return await self._read(work.batches_past_window, now=now, limit=DUE_MAX)

    async def stops_overdue(self, now: datetime) -> Sequence[str]:
        return await self._read(work.batches_not_stopping, now=now, limit=DUE_MAX)

    async def jobs_overdue(self, now: datetime) -> Sequence[str]:
        return await self._read(work.jobs_to_expire, now=now, limit=DUE_MAX)

    async def files_expired(self, now: datetime) -> Sequence[str]:
        return await self._read(files.expired, now=now, limit=DUE_MAX)

    async def own_models(self, account_id: str) -> Mapping[str, str]:
        rows = await self._read(models.list_all, account_id=account_id)
        return {row.id: row.base for row in rows if row.servable}

    async def save_heartbeat(self, beat: Heartbeat, *, at: datetime) -> None:
        await self._read(runners.upsert, beat, seen_at=at)

    async def forget_runner(self, runner_id: str) -> None:
        await self._read(runners.delete, runner_id)

    async def forget_fingerprints(self, now: datetime) -> None:
        await self._read(fingerprints.purge, before=now - FINGERPRINTS_KEPT)


def _position(connection: Connection, name: str) -> int | None:
    row = connection.execute(_POSITION, (name,)).fetchone()
    return row["notification_id"] if row is not None else None


def _read_pool(database_url: str) -> ConnectionPool[Connection]:
    """Connections are tried before each use: the database may have been restarted."""
    kwargs: dict[str, Any] = {
        "autocommit": True,
        "row_factory": dict_row,
        "application_name": "gridline-reads",
        "connect_timeout": 5,
    }
    return ConnectionPool(
        database_url,
        kwargs=kwargs,
        min_size=1,
        max_size=READ_CONNECTIONS_MAX,
        timeout=READ_WAIT_SECONDS_MAX,
        check=ConnectionPool.check_connection,
        open=False,
    )
