"""What every projection of the product is made of: its tables, and one function an event topic.

The read models beside this file each make one; the event store and the follower apply them.
Handlers are found by topic, which is the name that an event keeps for ever and costs one look in a
dictionary, under the log's lock. A handler is pure: it returns statements and runs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import psycopg
from eventsourcing.utils import get_topic

from domain.log.aggregate import Aggregate
from projections.projection import Statement

Connection = psycopg.Connection[dict[str, Any]]
"""What every read function takes: dict rows."""

_ONE_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def one_snapshot(connection: Connection) -> Iterator[None]:
    """What is read inside is of one moment, however many statements it takes."""
    with connection.transaction():
        connection.execute(_ONE_SNAPSHOT)
        yield


class Read(Protocol):
    """Runs a read function in a thread, on a connection of a pool. Raises Overloaded while the
    database is away. Every answer may be a moment old: a command looks again before it decides."""

    async def __call__(
        self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T: ...


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
