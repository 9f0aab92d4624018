"""Ends what is past its time and clears away what nothing refers to.

The active worker calls it at each tick. Every rule about time is decided again by the command; this
only finds what is due. It deletes an object only where the log says that the record of it is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Protocol

import structlog

from adapters.worker.errands import each
from adapters.worker.fleet import SteadySeconds
from adapters.worker.system_context import system_context
from domain.commands.batches import (
    StopWaiting,
    stop_waiting,
)
from domain.commands.files import ExpireFile, expire_file
from domain.commands.models import AdapterObject, adapter_is_wanted
from domain.commands.work import ExpireWork, expire_work
from domain.file import File
from domain.ports import Clock, Objects
from domain.unit_of_work import CommandWriter, Handler, UnitOfWork
from domain.work.batch import Batch
from projections.direct import fingerprints
from projections.read_model import Connection, Read
from projections.work import files, open_work

log = structlog.stdlib.get_logger(__name__)

PART = "watchdog"
DUE_MAX = 200
"""How many of each kind are seen to in one look."""
PURGE_SECONDS = 60.0
SWEEP_SECONDS = 3_600.0
UNKNOWN_OBJECT_SECONDS = 86_400.0
"""An upload's object is stored before its file is recorded: what no file knows after this long was
left by a process that died in between."""


class Find(Protocol):
    """Some ids of what is due now."""

    def __call__(self, connection: Connection, /, *, now: datetime, limit: int) -> list[str]: ...


class Watchdogs:
    """`look` at each tick."""

    def __init__(
        self,
        *,
        writer: CommandWriter,
        read: Read,
        objects: Objects,
        clock: Clock,
        steady_seconds: SteadySeconds,
    ) -> None:
        self._writer = writer
        self._read = read
        self._objects = objects
        self._clock = clock
        self._now = steady_seconds
        self._next_purge = self._next_sweep = steady_seconds()
        self._unknown_since: dict[str, float] = {}

    async def look(self) -> None:
        """Ends what is due now; purges and sweeps now and then."""
        now = self._clock.now()
        await each(PART, await self._due(open_work.past_due, now), self._expire)
        await each(PART, await self._due(open_work.batches_not_stopping, now), self._stop_waiting)
        await each(PART, await self._due(files.expired, now), self._expire_file)
        if self._now() >= self._next_purge:
            self._next_purge = self._now() + PURGE_SECONDS
            await self._read(fingerprints.purge, before=now - fingerprints.REPEATED_WITHIN)
        if self._now() >= self._next_sweep:
            self._next_sweep = self._now() + SWEEP_SECONDS
            await self.sweep()

    async def _due(self, find: Find, now: datetime) -> Sequence[str]:
        return await self._read(find, now=now, limit=DUE_MAX)

    async def sweep(self) -> None:
        """Deletes the chunks' objects of ended batches, adapters that no model has or whose model
        is deleted and staged nowhere, the objects of deleted files, and those that no file has
        known for a day."""
        async for key in self._objects.list_keys("chunks/"):
            if await self._ask(_batch_has_ended, key.split("/")[1]):
                await self._delete(key)
        async for key in self._objects.list_keys("adapters/"):
            if not await self._adapter_is_wanted(key):
                await self._delete(key)
        seen: dict[str, float] = {}
        async for key in self._unreferenced_files():
            seen[key] = self._unknown_since.get(key, self._now())
            if self._now() - seen[key] > UNKNOWN_OBJECT_SECONDS:
                await self._delete(key)
        self._unknown_since = seen

    async def _unreferenced_files(self) -> AsyncIterator[str]:
        """Keys of unknown files; the objects of deleted ones are deleted on the way."""
        async for key in self._objects.list_keys("files/"):
            deleted = await self._ask(_file_is_deleted, key.removeprefix("files/"))
            if deleted is None:
                yield key
            elif deleted:
                await self._delete(key)

    async def _delete(self, key: str) -> None:
        await self._objects.delete(key)
        log.info("object swept", key=key)

    async def _expire(self, work_id: str) -> None:
        context = system_context(PART, work_id=work_id, causation="due")
        await self._writer.execute(expire_work, ExpireWork(work_id), context)

    async def _stop_waiting(self, batch_id: str) -> None:
        context = system_context(PART, work_id=batch_id, causation="stop")
        await self._writer.execute(stop_waiting, StopWaiting(batch_id), context)

    async def _expire_file(self, file_id: str) -> None:
        context = system_context(PART, work_id=file_id, causation="expiry")
        key = await self._writer.execute(expire_file, ExpireFile(file_id), context)
        if key is not None:
            await self._objects.delete(key)

    async def _adapter_is_wanted(self, key: str) -> bool:
        asked = AdapterObject(job_id=key.split("/")[1], key=key)
        context = system_context(PART, work_id=asked.job_id, causation="read")
        return await self._writer.execute(adapter_is_wanted, asked, context)

    async def _ask(self, handler: Handler[str, bool | None], id: str) -> bool | None:
        context = system_context(PART, work_id=id, causation="read")
        return await self._writer.execute(handler, id, context)


def _batch_has_ended(uow: UnitOfWork, batch_id: str) -> bool | None:
    """None for a batch that nobody knows. Reads only."""
    batch = uow.find(Batch, batch_id)
    return None if batch is None else batch.is_terminal


def _file_is_deleted(uow: UnitOfWork, file_id: str) -> bool | None:
    """None for a file that nobody knows. Reads only."""
    file = uow.find(File, file_id)
    return None if file is None else file.deleted
