"""Ends what is past its time and clears away what nothing refers to.

The active worker calls it at each tick. Every rule about time is decided again by the command; this
only finds what is due. It deletes an object only where the rows, which are written with the log,
say that the record of it is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Protocol

import structlog

from adapters.worker.errands import each
from adapters.worker.fleet import SteadySeconds
from adapters.worker.loops import Beat
from adapters.worker.system_context import system_context
from domain.commands.batches import (
    StopWaiting,
    stop_waiting,
)
from domain.commands.files import ExpireFile, expire_file
from domain.commands.models import AdapterObject, adapter_is_wanted
from domain.commands.work import ExpireWork, expire_work
from domain.log.unit_of_work import CommandWriter
from domain.ports import Clock, Objects
from projections.direct import fingerprints
from projections.read_model import Connection, Read
from projections.work import files, open_work, stored_objects

log = structlog.stdlib.get_logger(__name__)

PART = "watchdog"
DUE_MAX = 200
"""How many of each kind are seen to in one look."""
PURGE_SECONDS = 60.0
SWEEP_SECONDS = 3_600.0
PAGE_KEYS = 500
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
        self._next_purge = steady_seconds()

    async def look(self) -> None:
        """Ends what is due now; purges now and then."""
        now = self._clock.now()
        await each(PART, await self._due(open_work.past_due, now), self._expire)
        await each(PART, await self._due(open_work.batches_not_stopping, now), self._stop_waiting)
        await each(PART, await self._due(files.expired, now), self._expire_file)
        if self._now() >= self._next_purge:
            self._next_purge = self._now() + PURGE_SECONDS
            await self._read(fingerprints.purge, before=now - fingerprints.REPEATED_WITHIN)

    async def _due(self, find: Find, now: datetime) -> Sequence[str]:
        return await self._read(find, now=now, limit=DUE_MAX)

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


class Sweep:
    """Deletes, now and then, the objects that nothing refers to. It asks the read models, a page of
    keys at a time: a store holds far more than what customers change meanwhile should wait for."""

    def __init__(
        self, *, writer: CommandWriter, read: Read, objects: Objects, steady_seconds: SteadySeconds
    ) -> None:
        self._writer = writer
        self._read = read
        self._objects = objects
        self._now = steady_seconds
        self._next = steady_seconds()
        self._unknown_since: dict[str, float] = {}

    async def look(self, beat: Beat) -> None:
        """Sweeps if it is time; `beat` after each page."""
        if self._now() >= self._next:
            self._next = self._now() + SWEEP_SECONDS
            await self.sweep(beat)

    async def sweep(self, beat: Beat) -> None:
        """Deletes the chunks' objects of ended batches, adapters that no model has or whose model
        is deleted and staged nowhere, the objects of deleted files, and those that no file has
        known for a day."""
        async for keys in self._pages("chunks/", beat):
            await self._delete(await self._read(stored_objects.of_ended_batches, keys=keys))
        async for keys in self._pages("adapters/", beat):
            unowned = await self._read(stored_objects.without_an_owner, keys=keys)
            await self._delete([key for key in unowned if not await self._is_wanted(key)])
        seen: dict[str, float] = {}
        async for keys in self._pages("files/", beat):
            deleted = await self._read(stored_objects.files_deleted, keys=keys)
            unknown = [key for key in keys if key not in deleted]
            seen |= {key: self._unknown_since.get(key, self._now()) for key in unknown}
            too_long = [k for k in unknown if self._now() - seen[k] > UNKNOWN_OBJECT_SECONDS]
            await self._delete([*(key for key, gone in deleted.items() if gone), *too_long])
        self._unknown_since = seen

    async def _pages(self, prefix: str, beat: Beat) -> AsyncIterator[Sequence[str]]:
        page: list[str] = []
        async for key in self._objects.list_keys(prefix):
            page.append(key)
            if len(page) == PAGE_KEYS:
                yield page
                beat()
                page = []
        if page:
            yield page

    async def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._objects.delete(key)
            log.info("object swept", key=key)

    async def _is_wanted(self, key: str) -> bool:
        asked = AdapterObject(job_id=key.split("/")[1], key=key)
        context = system_context(PART, work_id=asked.job_id, causation="read")
        return await self._writer.execute(adapter_is_wanted, asked, context)
