"""The shape of a read model: which tables it owns, and what an event changes in them.

A projection is applied either inside the append (what the API's reads need at once: the event store
runs its statements under the log's lock) or by `projections/follower.py`, which follows the log.
The same `apply` serves both and a rebuild from zero. It must be a pure function of the event and
its position: no clock, no query, no personal data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import psycopg
from psycopg.abc import Query

from domain.log.aggregate import Aggregate

Statement = tuple[str, Sequence[Any] | Mapping[str, Any]]
"""Constant SQL and its bound parameters."""


def run_statements(connection: psycopg.Connection[Any], statements: Iterable[Statement]) -> None:
    """Runs statements in order, neighbours of the same text as one prepared group."""
    for text, group in groupby(statements, key=itemgetter(0)):
        query: Query = text.encode()
        with connection.cursor() as cursor:
            cursor.executemany(query, [parameters for _, parameters in group])


class Projection(Protocol):
    """One read model.

    `name` is its tracking name; `tables` are the tables it alone writes, which a rebuild empties.
    """

    @property
    def name(self) -> str: ...

    @property
    def tables(self) -> tuple[str, ...]: ...

    def apply(self, event: Aggregate.Event, position: int) -> Sequence[Statement]:
        """The statements that this event asks for, in order; `position` is its place in the log,
        from 1, growing with every event but not without gaps."""
        ...
