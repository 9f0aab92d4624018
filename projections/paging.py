"""Keyset pages in the order of creation, which is the position in the log: a total order.

Every list read uses it. A cursor is the last item's id; an item that was deleted still has its
place, so that paging goes on from it. The first page is never given for a bad cursor: SDKs would
loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from domain.errors import InvalidRequest
from projections.read_model import Connection

T = TypeVar("T")
Order = Literal["asc", "desc"]

_FIRST = 0
_LAST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page; `has_more` says whether a next one has at least one row."""

    rows: tuple[T, ...]
    has_more: bool


def bounds(
    connection: Connection,
    *,
    select_position: str,
    scope: dict[str, Any],
    after: str | None,
    order: Order = "desc",
) -> dict[str, int]:
    """The parameters `above` and `below` between whose positions a page lies, both exclusive.

    `select_position` selects `position` by %(after)s within `scope`. Raises InvalidRequest, with
    the same text for an unknown id and another account's.
    """
    if after is None:
        return {"above": _FIRST, "below": _LAST}
    row = connection.execute(select_position, {**scope, "after": after}).fetchone()
    if row is None:
        raise InvalidRequest(
            "after must be the id of the last item of the page before this one.", param="after"
        )
    position = int(row["position"])
    if order == "desc":
        return {"above": _FIRST, "below": position}
    return {"above": position, "below": _LAST}


def page(rows: Sequence[T], *, limit: int) -> Page[T]:
    """A page of rows that were selected with a limit one larger."""
    return Page(rows=tuple(rows[:limit]), has_more=len(rows) > limit)
