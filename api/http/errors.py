"""Turns every failure into OpenAI's error body: the one place where refusals meet HTTP.

Called by the middleware in `envelope.py` and by Starlette for what the router refuses. It must
never let the text of an unexpected exception out: that can quote a customer's data.
"""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from api.http.json_response import json_response
from domain.errors import GridlineError, MethodNotAllowed, NotFound

BASE_PATH = "/openai/v1"
MESSAGE_CHARACTERS_MAX = 1_000
"""A refusal may name what was sent, but a client that sends a name of a megabyte gets it cut."""
PARAM_CHARACTERS_MAX = 200


def error_response(error: GridlineError) -> Response:
    """The refusal as OpenAI words it: four keys always, `limit` where there is one.

    The SDKs send 409 and 429 again on their own; `x-should-retry` stops them where that is no use.
    """
    body: dict[str, Any] = {
        "message": _cut(error.message, MESSAGE_CHARACTERS_MAX),
        "type": error.error_type,
        "param": None if error.param is None else _cut(error.param, PARAM_CHARACTERS_MAX),
        "code": error.code,
    }
    if error.limit is not None:
        body["limit"] = error.limit
    response = json_response({"error": body}, status=error.status)
    if error.status in (409, 429) and not error.retryable:
        response.headers["x-should-retry"] = "false"
    retry_after_seconds = error.retry_after_seconds
    if retry_after_seconds is None and error.retryable:
        retry_after_seconds = 1
    if retry_after_seconds is not None:
        response.headers["retry-after"] = str(retry_after_seconds)
    if error.status == 401:
        response.headers["www-authenticate"] = 'Bearer realm="gridline"'
    return response


def _cut(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"


def internal_error_response() -> Response:
    """Our own mistake: no detail leaves the server, the request id finds it in the log."""
    return json_response(
        {
            "error": {
                "message": "The server had an error while it handled your request. Send it again; "
                "if it persists, tell us the x-request-id of this answer.",
                "type": "server_error",
                "param": None,
                "code": None,
            }
        },
        status=500,
    )


async def on_gridline_error(_: Request, error: Exception) -> Response:
    """Starlette's handler for the product's own refusals."""
    assert isinstance(error, GridlineError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler for what its router refuses."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return method_not_allowed(request.method, allowed=())
    return error_response(unknown_path(request.url.path))


def unknown_path(path: str) -> NotFound:
    """The refusal of a path that is no route."""
    if path.endswith("/") and path.startswith(f"{BASE_PATH}/"):
        return NotFound(f"There is no route {path} here. Routes have no slash at their end.")
    return NotFound("There is no such route here. See the API's documentation for its routes.")


def method_not_allowed(method: str, *, allowed: tuple[str, ...]) -> Response:
    """405, with the methods that the path has."""
    words = ", ".join(allowed)
    response = error_response(
        MethodNotAllowed(f"{method} is not offered on this path. It has: {words or 'no method'}.")
    )
    response.headers["allow"] = words
    return response
