"""The shape of a read model: which tables it owns, and what an event changes in them.

A projection is applied either inside the append (what the API's reads need at once: the event store
runs its statements under the log's lock) or by `projections/runner.py`, which follows the log. The
same `apply` serves both and a rebuild from zero. It must be a pure function of the event and its
position: no clock, no query, no personal data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from domain.aggregate import Aggregate

Statement = tuple[str, Sequence[Any] | Mapping[str, Any]]
"""Constant SQL and its bound parameters."""


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
