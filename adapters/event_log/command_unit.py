"""One command at work: the unit of work that its handler sees, and the cache its aggregates are in.

Shared by the writer and its in-memory twin, so that a rule behaves alike in both. Neither class
reads a clock or touches storage: they are given what they need.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import datetime

from domain.errors import DuplicateDelivery, GridlineError, NotFound
from domain.limits import MIB
from domain.log.aggregate import Aggregate, Envelope
from domain.log.unit_of_work import A, CommandContext, PersonalRow
from domain.ports import IdSource

CACHED_BYTES_MAX = 256 * MIB
"""Of memory that the aggregates of a process may take, as `_weight_bytes` estimates it."""
WEIGHED_AGAIN_EVENTS = 8
"""An aggregate is weighed again after so many events: weighing each at each command would cost."""
_AGGREGATE_BYTES = 4_096
_ITEM_BYTES = 5_120
"""Of what a list or dict of an aggregate holds: a batch's chunk with its plan and result is the
largest."""

Load = Callable[[type[Aggregate], str], Aggregate | None]


class AggregateCache:
    """Aggregates as the log has them, plus the changes of commands not saved yet.

    Whoever drives it evicts what must not be believed: after a failure, or when another process's
    events show up.
    """

    def __init__(self, load: Load, *, bytes_max: int = CACHED_BYTES_MAX) -> None:
        self._load = load
        self._bytes_max = bytes_max
        self._aggregates: OrderedDict[str, Aggregate] = OrderedDict()
        self._weights: dict[str, int] = {}
        self._weighed_from: dict[str, int] = {}
        self._bytes = 0
        self._used: set[str] = set()

    def find(self, cls: type[A], id: str) -> A | None:
        """The aggregate, loaded on first use; None for a missing one or one of another class."""
        aggregate = self._aggregates.get(id)
        if aggregate is None:
            aggregate = self._load(cls, id)
            if aggregate is None:
                return None
            self._aggregates[id] = aggregate
        else:
            self._aggregates.move_to_end(id)
        self._used.add(id)
        return aggregate if isinstance(aggregate, cls) else None

    def add(self, aggregate: Aggregate) -> None:
        """A new one. Asserts that there is none of its id."""
        assert aggregate.id not in self._aggregates, f"{aggregate.id} exists"
        self._aggregates[aggregate.id] = aggregate
        self._used.add(aggregate.id)

    def see(self, id: str, version: int) -> None:
        """Evicts an aggregate of which the log holds a newer version."""
        aggregate = self._aggregates.get(id)
        if aggregate is not None and aggregate.version < version:
            self.evict([id])

    def evict(self, stream_ids: Iterable[str]) -> None:
        """Forgets these; the next use loads them."""
        for stream_id in stream_ids:
            self._aggregates.pop(stream_id, None)
            self._bytes -= self._weights.pop(stream_id, 0)
            self._weighed_from.pop(stream_id, None)

    def clear(self) -> None:
        """Forgets all."""
        self._aggregates.clear()
        self._weights.clear()
        self._weighed_from.clear()
        self._bytes = 0

    def trim(self) -> None:
        """Forgets the longest unused beyond the bound; not while changes are unsaved."""
        for stream_id in self._used & self._aggregates.keys():
            aggregate = self._aggregates[stream_id]
            if aggregate.version >= self._weighed_from.get(stream_id, 0):
                weight = _weight_bytes(aggregate)
                self._bytes += weight - self._weights.get(stream_id, 0)
                self._weights[stream_id] = weight
                self._weighed_from[stream_id] = aggregate.version + WEIGHED_AGAIN_EVENTS
        self._used.clear()
        while self._bytes > self._bytes_max:
            self.evict([next(iter(self._aggregates))])


def _weight_bytes(aggregate: Aggregate) -> int:
    items = sum(len(each) for each in vars(aggregate).values() if isinstance(each, list | dict))
    return _AGGREGATE_BYTES + _ITEM_BYTES * items


class CommandUnit:
    """Implements `domain.log.unit_of_work.UnitOfWork` for one run of one handler."""

    def __init__(
        self,
        *,
        context: CommandContext,
        now: datetime,
        ids: IdSource,
        cache: AggregateCache,
        position_of: Callable[[str], int | None],
    ) -> None:
        self.now = now
        self.envelope = Envelope(
            at=now,
            actor=context.actor,
            command_id=context.command_id,
            correlation_id=context.correlation_id,
            causation=context.causation,
        )
        self.personal_rows: list[PersonalRow] = []
        self.positions: dict[str, int] = {}
        self.touched: dict[str, Aggregate] = {}
        self._ids = ids
        self._cache = cache
        self._position_of = position_of

    def new_id(self, prefix: str) -> str:
        """See UnitOfWork."""
        return self._ids.new(prefix)

    def find(self, cls: type[A], id: str) -> A | None:
        """See UnitOfWork."""
        aggregate = self._cache.find(cls, id)
        if aggregate is not None:
            self.touched[id] = aggregate
        return aggregate

    def get(self, cls: type[A], id: str) -> A:
        """See UnitOfWork."""
        aggregate = self.find(cls, id)
        if aggregate is None:
            raise NotFound(f"There is no {cls.__name__} with the id {id}.")
        return aggregate

    def add(self, aggregate: Aggregate) -> None:
        """See UnitOfWork."""
        self._cache.add(aggregate)
        self.touched[aggregate.id] = aggregate

    def personal(self, row: PersonalRow) -> None:
        """See UnitOfWork."""
        self.personal_rows.append(row)

    def tracking(self, name: str, position: int) -> None:
        """See UnitOfWork."""
        recorded = self.positions.get(name, self._position_of(name))
        if recorded is not None and position <= recorded:
            raise DuplicateDelivery(f"position {position} of {name} is already recorded")
        self.positions[name] = position

    def collect(self) -> list[Aggregate.Event]:
        """Takes the new events, in the order in which the handler first met their aggregates."""
        return [
            event
            for aggregate in self.touched.values()
            for event in aggregate.collect_events()
            if isinstance(event, Aggregate.Event)
        ]

    def is_spoilt_by(self, error: Exception) -> bool:
        """Whether the aggregates can no longer be believed: changed before a refusal, or left
        half-changed by our own mistake."""
        return not isinstance(error, GridlineError | DuplicateDelivery) or any(
            aggregate.pending_events for aggregate in self.touched.values()
        )
