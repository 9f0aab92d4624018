"""One path of the API with its methods: authentication first, then the handler.

`app.py` lists these as routes. A path answers a method that it lacks with 405 in OpenAI's shape.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from api.auth import authenticate
from api.control import Api, Call
from api.http.envelope import record_of
from api.http.errors import BASE_PATH, error_response, method_not_allowed, unknown_path
from domain.errors import NotFound

CallHandler = Callable[[Call], Awaitable[Response]]
OpenHandler = Callable[[Request, Api], Awaitable[Response]]


class _Endpoint:
    """The ASGI application of one path."""

    def __init__(self, path: str, handlers: Mapping[str, CallHandler]) -> None:
        self._path = path
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        record = record_of(scope)
        method = "GET" if request.method == "HEAD" else request.method
        record.route = f"{method if method in self._handlers else '*'} {self._path}"
        handler = self._handlers.get(method)
        if (refusal := _unusable_path(scope)) is not None:
            response = error_response(refusal)
        elif handler is None:
            response = method_not_allowed(request.method, allowed=tuple(self._handlers))
        else:
            api: Api = request.app.state.api
            caller = await authenticate(request, api)
            record.account_id, record.key_id = caller.account_id, caller.key_id
            call = Call(
                request=request,
                caller=caller,
                api=api,
                route=record.route,
                request_id=record.request_id,
            )
            response = await handler(call)
        await response(scope, receive, send)


class _OpenEndpoint:
    """A path for operators, without a key."""

    def __init__(self, path: str, handler: OpenHandler) -> None:
        self._path = path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        record_of(scope).route = f"GET {self._path}"
        if (refusal := _unusable_path(scope)) is not None:
            response = error_response(refusal)
        elif request.method in ("GET", "HEAD"):
            response = await self._handler(request, request.app.state.api)
        else:
            response = method_not_allowed(request.method, allowed=("GET",))
        await response(scope, receive, send)


def _unusable_path(scope: Scope) -> NotFound | None:
    """A path that matches a route only once it is decoded is none: a proxy before us, with rules by
    path, has read it as another one. No id holds NUL, and PostgreSQL takes no text with it."""
    path: str = scope["path"]
    if b"%2f" in scope["raw_path"].lower():
        return NotFound("A slash of the path is sent as %2F. Send it as it is.")
    return unknown_path(path) if "\0" in path or path.endswith("/") else None


def resource(
    path: str,
    *,
    get: CallHandler | None = None,
    post: CallHandler | None = None,
    delete: CallHandler | None = None,
) -> Route:
    """A path under the base path; `path` is Starlette's template."""
    given = {"GET": get, "POST": post, "DELETE": delete}
    handlers = {method: handler for method, handler in given.items() if handler is not None}
    return Route(BASE_PATH + path, endpoint=_Endpoint(BASE_PATH + path, handlers))


def open_path(path: str, *, get: OpenHandler) -> Route:
    """A path outside the base path that takes no key."""
    return Route(path, endpoint=_OpenEndpoint(path, get))
