"""Error lines for requests that no runner answered, so that every request has exactly one line.

The finaliser writes them when a batch is cancelled or expires, or when a chunk was given up. Pure;
what a line asked for never enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from domain.inputs.result_line import error_body, no_response_line, response_line

NeverRan = Literal["batch_cancelled", "batch_expired"]

_MESSAGES: dict[NeverRan, str] = {
    "batch_cancelled": "The batch was cancelled before this request ran.",
    "batch_expired": "The completion window ended before this request ran.",
}


@dataclass(frozen=True, slots=True)
class UnansweredRequest:
    """A request line of a batch's input; `number` is its 1-based line. `custom_id` is null where
    the input is lost, so that nobody knows it any more."""

    batch_id: str
    number: int
    custom_id: str | None


def never_ran_line(request: UnansweredRequest, code: NeverRan) -> bytes:
    """A request that was never run: no response, and an error that says why."""
    message = _MESSAGES[code]
    return no_response_line(_name(request), request.custom_id, code=code, message=message)


def given_up_line(request: UnansweredRequest) -> bytes:
    """A request whose chunk failed at every try: a response as from a server that broke."""
    body = error_body(
        "The engine failed each time that this request was tried.",
        error_type="server_error",
        code="engine_failed",
        param=None,
    )
    return response_line(_name(request), request.custom_id, status_code=500, body=body)


def _name(request: UnansweredRequest) -> str:
    """The same each time, since the files are written again after a crash."""
    return f"{request.batch_id}/unanswered/{request.number}"
