"""What every projection of the product is made of: its tables, and one function an event topic.

The read models beside this file each make one; the event store and the runner apply them. Handlers
are found by topic, which is the name that an event keeps for ever and costs one look in a
dictionary, under the log's lock. A handler is pure: it returns statements and runs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from eventsourcing.utils import get_topic

from domain.aggregate import Aggregate
from projections.projection import Statement

Connection = psycopg.Connection[dict[str, Any]]
"""What every read function takes: dict rows."""

Handler = Callable[[Any, int], Sequence[Statement]]
"""(event, position in the log) to statements. The library makes the event classes when a module is
loaded, so that no checker knows their fields."""


@dataclass(frozen=True, slots=True)
class ReadModel:
    """Implements `projections.projection.Projection`. `tables` come in an order in which they can
    be emptied."""

    name: str
    tables: tuple[str, ...]
    handlers: Mapping[str, Handler]

    def apply(self, event: Aggregate.Event, position: int) -> Sequence[Statement]:
        """What the event changes; nothing for a topic without a handler."""
        handler = self.handlers.get(get_topic(type(event)))
        return handler(event, position) if handler is not None else ()
