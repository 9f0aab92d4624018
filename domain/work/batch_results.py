"""Error lines for requests that no runner answered, so that every request has exactly one line.

The finaliser writes them when a batch is cancelled or expires, or when a chunk was given up. The
shapes are those that runners write (`gpu_runners/parent/results.py`). Pure; what a line asked for
never enters.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

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
    return _line(request, response=None, error={"code": code, "message": _MESSAGES[code]})


def given_up_line(request: UnansweredRequest) -> bytes:
    """A request whose chunk failed at every try: a response as from a server that broke."""
    error = {
        "message": "The engine failed each time that this request was tried.",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }
    response = {
        "status_code": 500,
        "request_id": _id("req_", request),
        "body": {"error": error},
    }
    return _line(request, response=response, error=None)


def _line(
    request: UnansweredRequest, *, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    record = {
        "id": _id("batch_req_", request),
        "custom_id": request.custom_id,
        "response": response,
        "error": error,
    }
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Some clients take these two for line ends.
    text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return text.encode() + b"\n"


def _id(prefix: str, request: UnansweredRequest) -> str:
    """The same each time, since the files are written again after a crash."""
    named = f"{prefix}/{request.batch_id}/unanswered/{request.number}"
    return prefix + hashlib.sha256(named.encode()).hexdigest()[:32]
