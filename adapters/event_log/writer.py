"""The single writer: one thread that merges queued commands into one append.

Appends serialise on the log's lock through fsync while events in one append are nearly free, so
merging is what makes commands fast. API and workers each have one; handlers, ingest and the
scheduler reach the log only through it. Before each batch it reads the log past what it has seen
and evicts what others changed, so that even refusals, which write nothing, are never decided on
old state. Nothing is told to a caller before the append that it was decided in has committed. Its
thread never ends because of a command or of PostgreSQL.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import structlog
from eventsourcing.persistence import (
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
)

from adapters.event_log import snapshots
from adapters.event_log.command_unit import AggregateCache, CommandUnit
from adapters.event_log.event_store import Append, EventStore, PositionConflict
from domain.errors import ConcurrentUpdate, Overloaded, StorageOutcomeUnknown
from domain.log.aggregate import Aggregate
from domain.log.unit_of_work import C, CommandContext, Handler, PersonalRow, R
from domain.ports import Clock, IdSource

log = structlog.stdlib.get_logger(__name__)

BATCH_COMMANDS_MAX = 64
QUEUE_COMMANDS_MAX = 1024
MERGED_ATTEMPTS = 3
SINGLE_ATTEMPTS = 10
BACKOFF_SECONDS_MAX = 0.05
LINGER_SECONDS = 0.001
RECONNECT_SECONDS_MAX = 60.0
REFRESH_EVENTS_MAX = 20_000
"""More foreign events than this and the whole cache is dropped instead."""

_CONNECTION_LOST = (OperationalError, InterfaceError, InternalError)


@dataclass(frozen=True, slots=True, eq=False)
class _Queued:
    handler: Handler[Any, Any]
    command: Any
    context: CommandContext
    tracking: tuple[str, int] | None
    future: Future[Any]


@dataclass(slots=True)
class _Decision:
    """What a batch has decided so far; told to its callers once `append` has committed."""

    events: list[Aggregate.Event] = field(default_factory=list)
    personal: list[PersonalRow] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    changed: dict[str, Aggregate] = field(default_factory=dict)
    values: list[tuple[_Queued, Any]] = field(default_factory=list)
    refusals: list[tuple[_Queued, Exception]] = field(default_factory=list)

    def append(self) -> Append:
        return Append(
            events=self.events,
            personal=self.personal,
            positions=self.positions,
            snapshots=_due_snapshots(self.events, self.changed),
        )

    def tell(self) -> None:
        for queued, value in self.values:
            queued.future.set_result(value)
        for queued, error in self.refusals:
            queued.future.set_exception(error)


class _Conflict(Exception):
    """The batch must be decided again: another process was faster."""


class _Spoilt(Exception):
    """A command failed in a way that leaves the batch's aggregates in doubt."""


class Writer:
    """Implements `domain.log.unit_of_work.CommandWriter` over PostgreSQL.

    It owns the event store that it is given, and closes it.
    """

    def __init__(self, store: EventStore, *, clock: Clock, ids: IdSource) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._cache = AggregateCache(store.load)
        self._seen = store.last_position()
        self._queue: queue.Queue[_Queued | None] = queue.Queue(maxsize=QUEUE_COMMANDS_MAX)
        self._last_batch_size = 1
        self._closing = threading.Event()
        self._entrance = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gridline-writer", daemon=True)
        self._thread.start()

    def submit(
        self,
        handler: Handler[C, R],
        command: C,
        context: CommandContext,
        *,
        tracking: tuple[str, int] | None = None,
    ) -> Future[R]:
        """See CommandWriter; never blocks. A full queue is Overloaded."""
        future: Future[R] = Future()
        queued = _Queued(handler, command, context, tracking, future)
        try:
            with self._entrance:
                if self._closing.is_set():
                    raise queue.Full
                self._queue.put_nowait(queued)
        except queue.Full:
            future.set_exception(
                Overloaded("Too many changes are waiting. Try again.", retry_after_seconds=1)
            )
        return future

    async def execute(
        self,
        handler: Handler[C, R],
        command: C,
        context: CommandContext,
        *,
        tracking: tuple[str, int] | None = None,
    ) -> R:
        """See CommandWriter."""
        return await asyncio.wrap_future(self.submit(handler, command, context, tracking=tracking))

    def close(self) -> None:
        """Finishes what is queued, then closes the store."""
        with self._entrance:
            self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self._store.close()

    # The thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while waiting := self._next_batch():
            try:
                self._process(waiting)
            except (Overloaded, StorageOutcomeUnknown) as error:
                log.error("the database stays away", commands=len(waiting))  # noqa: TRY400
                _fail(waiting, error)
            except Exception as error:
                log.exception("writer failed a batch", commands=len(waiting))
                self._cache.clear()
                _fail(waiting, error)
            self._cache.trim()

    def _next_batch(self) -> list[_Queued]:
        """The next commands, at most a batch; empty when the writer is closed and drained.

        After a batch of several, their callers are about to come back: waiting a moment for them
        saves an append that would hold one command alone.
        """
        waiting: list[_Queued] = []
        wanted = self._last_batch_size
        while len(waiting) < BATCH_COMMANDS_MAX:
            try:
                if not waiting:
                    queued = self._queue.get()
                elif len(waiting) < wanted:
                    queued = self._queue.get(timeout=LINGER_SECONDS)
                else:
                    queued = self._queue.get_nowait()
            except queue.Empty:
                break
            if queued is None:
                if waiting:
                    self._queue.put(None)
                break
            if queued.future.set_running_or_notify_cancel():
                waiting.append(queued)
        self._last_batch_size = len(waiting)
        return waiting

    def _process(self, waiting: Sequence[_Queued]) -> None:
        """Merged, then, where that fails, one by one in the order in which they came."""
        if len(waiting) == 1 or not self._merged(waiting):
            for queued in waiting:
                self._alone(queued)

    def _merged(self, waiting: Sequence[_Queued]) -> bool:
        """Whether all were settled in one append."""
        for attempt in range(MERGED_ATTEMPTS):
            try:
                self._attempt(waiting)
            except _Conflict:
                self._back_off(attempt)
            except _Spoilt:
                return False
            else:
                return True
        return False

    def _alone(self, queued: _Queued) -> None:
        for attempt in range(SINGLE_ATTEMPTS):
            try:
                self._attempt([queued])
            except _Conflict:
                self._back_off(attempt)
            except _Spoilt as spoilt:
                queued.future.set_exception(spoilt.__cause__)
                return
            else:
                return
        queued.future.set_exception(
            ConcurrentUpdate(
                "The same objects were changed by others meanwhile. Try again.",
                retry_after_seconds=1,
            )
        )

    def _attempt(self, waiting: Sequence[_Queued]) -> None:
        """Decides all of them on fresh state, saves once, and tells the callers.

        Raises _Conflict or _Spoilt; then nothing was saved or told, and what was touched is
        evicted.
        """
        decision = _Decision()
        try:
            self._refresh()
            self._decide(waiting, decision)
        except _CONNECTION_LOST as error:
            self._cache.clear()
            self._once_reachable(self._store.last_position, otherwise=Overloaded(_AWAY))
            raise _Conflict from error
        append = decision.append()
        try:
            self._note_own(self._store.append(append))
        except (IntegrityError, PositionConflict) as error:
            self._cache.evict(decision.changed)
            raise _Conflict from error
        except _CONNECTION_LOST as error:
            self._cache.clear()
            landed = self._once_reachable(
                lambda: self._store.landed(append.events), otherwise=StorageOutcomeUnknown(_UNKNOWN)
            )
            if not landed:
                raise _Conflict from error
        except Exception as error:
            self._cache.evict(decision.changed)
            raise _Spoilt from error
        decision.tell()

    def _decide(self, waiting: Sequence[_Queued], decision: _Decision) -> None:
        known: dict[str, int | None] = {}
        names = {queued.tracking[0] for queued in waiting if queued.tracking}
        if names:
            known = {**dict.fromkeys(names), **self._store.positions(sorted(names))}

        def position_of(name: str) -> int | None:
            if name not in known:
                known[name] = self._store.positions([name]).get(name)
            return known[name]

        for queued in waiting:
            unit = CommandUnit(
                context=queued.context,
                now=self._clock.now(),
                ids=self._ids,
                cache=self._cache,
                position_of=position_of,
            )
            try:
                if queued.tracking is not None:
                    unit.tracking(*queued.tracking)
                value = queued.handler(unit, queued.command)
            except _CONNECTION_LOST:
                raise
            except Exception as error:
                if unit.is_spoilt_by(error):
                    self._cache.evict(decision.changed)
                    self._cache.evict(unit.touched)
                    raise _Spoilt from error
                decision.refusals.append((queued, error))
                continue
            events = unit.collect()
            decision.events += events
            for event in events:
                decision.changed[event.originator_id] = unit.touched[event.originator_id]
            decision.personal += unit.personal_rows
            decision.positions |= unit.positions
            known |= unit.positions
            decision.values.append((queued, value))

    def _refresh(self) -> None:
        """Evicts what other processes have changed since the last batch."""
        rows = self._store.versions_after(self._seen, limit=REFRESH_EVENTS_MAX)
        if len(rows) == REFRESH_EVENTS_MAX:
            self._cache.clear()
            self._seen = self._store.last_position()
            return
        for position, stream_id, version in rows:
            self._cache.see(stream_id, version)
            self._seen = position

    def _note_own(self, positions: Sequence[int]) -> None:
        """Our own events need no reading back, unless others' came between."""
        if positions and positions[0] == self._seen + 1:
            self._seen = positions[-1]

    def _once_reachable(self, ask: Callable[[], R], *, otherwise: Exception) -> R:
        """The database's answer, waiting for it (and for the log's lock) within a bound; past it
        raises `otherwise`."""
        deadline = time.monotonic() + RECONNECT_SECONDS_MAX
        pause_seconds = 0.02
        while time.monotonic() < deadline:
            try:
                return ask()
            except _CONNECTION_LOST:
                if self._closing.wait(pause_seconds):
                    break
                pause_seconds = min(1.0, 2 * pause_seconds)
        raise otherwise

    def _back_off(self, attempt: int) -> None:
        bound = min(BACKOFF_SECONDS_MAX, 0.002 * 2**attempt)
        self._closing.wait(random.uniform(0, bound))  # noqa: S311 - jitter is no secret


_AWAY = "The database is away. Send the request again."
_UNKNOWN = "The database went away while this was saved. Send the same request again."


def _fail(waiting: Sequence[_Queued], error: Exception) -> None:
    for queued in waiting:
        if not queued.future.done():
            queued.future.set_exception(error)


def _due_snapshots(
    events: Sequence[Aggregate.Event], changed: dict[str, Aggregate]
) -> list[Aggregate]:
    """The changed aggregates that pass a multiple of their class's snapshot interval."""
    new_events: dict[str, int] = {}
    for event in events:
        new_events[event.originator_id] = new_events.get(event.originator_id, 0) + 1
    due = []
    for stream_id, aggregate in changed.items():
        every = snapshots.interval(type(aggregate))
        before = aggregate.version - new_events[stream_id]
        if every and aggregate.version // every > before // every:
            due.append(aggregate)
    return due
