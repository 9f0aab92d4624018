"""The writer's twin in memory: the same handlers over the library's in-memory recorder.

For property tests, which run thousands of commands and replay the log after each. It commits one
command at a time, stores events as the same bytes as PostgreSQL does, and writes no projections.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from eventsourcing.popo import POPOApplicationRecorder

from adapters.event_log.command_unit import AggregateCache, CommandUnit
from adapters.event_log.event_store import EventMapper, fold, stored
from domain.log.aggregate import Aggregate
from domain.log.unit_of_work import A, C, CommandContext, Handler, PersonalRow, R
from domain.ports import Clock, IdSource

PersonalKey = tuple[tuple[str, Any], ...]


class MemoryWriter:
    """Implements `domain.log.unit_of_work.CommandWriter`, synchronously.

    `personal` is what the deletable tables would hold, by table and key; `positions` the tracking.
    """

    def __init__(self, *, clock: Clock, ids: IdSource) -> None:
        self.personal: dict[str, dict[PersonalKey, dict[str, Any]]] = {}
        self.positions: dict[str, int] = {}
        self._clock = clock
        self._ids = ids
        self._mapper = EventMapper()
        self._recorder = POPOApplicationRecorder()
        self._cache = AggregateCache(self.load)

    def submit(
        self,
        handler: Handler[C, R],
        command: C,
        context: CommandContext,
        *,
        tracking: tuple[str, int] | None = None,
    ) -> Future[R]:
        """A future that is already done."""
        future: Future[R] = Future()
        try:
            future.set_result(self._run(handler, command, context, tracking))
        except Exception as error:  # noqa: BLE001 - the caller's future takes whatever it is
            future.set_exception(error)
        return future

    async def execute(
        self,
        handler: Handler[C, R],
        command: C,
        context: CommandContext,
        *,
        tracking: tuple[str, int] | None = None,
    ) -> R:
        """Runs the command at once."""
        return self._run(handler, command, context, tracking)

    def close(self) -> None:
        """Nothing to release."""

    def load(self, cls: type[A], id: str) -> A | None:
        """The aggregate folded afresh from its stored bytes, or None."""
        rows = self._recorder.select_events(id)
        aggregate = fold([self._mapper.to_domain_event(row) for row in rows])
        return aggregate if isinstance(aggregate, cls) else None

    def events(self, *, after: int = 0) -> list[tuple[int, Aggregate.Event]]:
        """The log after a position, decoded from its stored bytes."""
        count = self._recorder.max_notification_id() or 0
        rows = self._recorder.select_notifications(after + 1, count)
        return [(row.id, self._mapper.to_domain_event(row)) for row in rows]

    def _run(
        self,
        handler: Handler[C, R],
        command: C,
        context: CommandContext,
        tracking: tuple[str, int] | None,
    ) -> R:
        unit = CommandUnit(
            context=context,
            now=self._clock.now(),
            ids=self._ids,
            cache=self._cache,
            position_of=self.positions.get,
        )
        try:
            if tracking is not None:
                unit.tracking(*tracking)
            result = handler(unit, command)
            self._recorder.insert_events([stored(event) for event in unit.collect()])
        except BaseException:
            self._cache.evict(unit.touched)
            raise
        self.positions.update(unit.positions)
        for row in unit.personal_rows:
            self._keep(row)
        self._cache.trim()
        return result

    def _keep(self, row: PersonalRow) -> None:
        table = self.personal.setdefault(row.table, {})
        key = tuple(sorted(row.key.items()))
        if row.values is None:
            for each in [k for k, kept in table.items() if row.key.items() <= kept.items()]:
                del table[each]
        else:
            table[key] = {**row.key, **table.get(key, {}), **row.values}
