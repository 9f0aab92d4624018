"""The query of a list, read strictly, and the page that answers it.

`limit` is never clamped in silence, and a bad cursor is refused (`projections/paging.py`). An empty
value is none: the Node SDKs send null so. Query keys that a list does not know are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from api.control import Call
from api.http.json_response import json_response
from domain.errors import InvalidRequest
from projections.paging import Order, Page

T = TypeVar("T")


async def answer_page(
    call: Call,
    list_page: Callable[..., Page[T]],
    show: Callable[[T], dict[str, Any]],
    *,
    default: int,
    most: int,
    **scope: Any,
) -> Response:
    """A page of a list as the query asks for it, each row as `show` shows it. `scope` says which
    list. Raises InvalidRequest."""
    found = await call.read(
        list_page,
        limit=limit_of(call.request, default=default, most=most),
        after=after_of(call.request),
        **scope,
    )
    return json_response(list_object([show(row) for row in found.rows], has_more=found.has_more))


def limit_of(request: Request, *, default: int, most: int) -> int:
    """The `limit` of a list; 0 asks for an empty page. Raises InvalidRequest."""
    text = given_once(request, "limit")
    if not text:
        return default
    if text.isascii() and text.isdigit() and len(text) <= 9 and int(text) <= most:
        return int(text)
    raise InvalidRequest(f"limit must be an integer from 0 to {most:,}.", param="limit")


def after_of(request: Request) -> str | None:
    """The id of the last item that the caller has. Raises InvalidRequest."""
    after = given_once(request, "after")
    if after is not None and "\0" in after:
        raise bad_cursor()
    return after or None


def bad_cursor() -> InvalidRequest:
    """In the words of `projections/paging.py`."""
    return InvalidRequest(
        "after must be the id of the last item of the page before this one.", param="after"
    )


def order_of(request: Request) -> Order:
    """Newest first unless asked otherwise. Raises InvalidRequest."""
    match given_once(request, "order"):
        case None | "" | "desc":
            return "desc"
        case "asc":
            return "asc"
        case _:
            raise InvalidRequest('order must be "asc" or "desc".', param="order")


def given_once(request: Request, name: str) -> str | None:
    """A query value. Raises InvalidRequest if the key is repeated."""
    values = request.query_params.getlist(name)
    if len(values) > 1:
        raise InvalidRequest(f"{name} is given more than once.", param=name)
    return values[0] if values else None


def list_object(items: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """The wire form of a page; the cursors are the ids of its ends. An empty page is the last."""
    return {
        "object": "list",
        "data": list(items),
        "has_more": has_more and bool(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
    }
