"""One line of a batch's output or error file, as OpenAI's SDKs read it.

The runner writes one for every line that it answered or refused, and the finaliser one for every
request that nobody answered. The same request and attempt give the same bytes each time. It must
never write a raw U+2028 or U+2029, which some clients take for a line end.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def response_line(
    name: str, custom_id: str | None, *, status_code: int, body: dict[str, Any]
) -> bytes:
    """A request that was answered, or refused as over HTTP: then `error` beside it is null, too.
    `name` is what the ids in the line are made from."""
    response = {
        "status_code": status_code,
        "request_id": line_id("req_", name),
        "body": body,
    }
    return _line(name, custom_id, response=response, error=None)


def no_response_line(name: str, custom_id: str | None, *, code: str, message: str) -> bytes:
    """A request that never ran."""
    return _line(name, custom_id, response=None, error={"code": code, "message": message})


def error_body(message: str, *, error_type: str, code: str, param: str | None) -> dict[str, Any]:
    """The body of a refusal."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def line_id(prefix: str, name: str) -> str:
    """An id of what is in the line: the same for the same name."""
    return prefix + hashlib.sha256(f"{prefix}/{name}".encode()).hexdigest()[:32]


def line_text(value: object) -> str:
    """JSON as it stands in a line. Raises ValueError for a number that is none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _line(
    name: str,
    custom_id: str | None,
    *,
    response: dict[str, Any] | None,
    error: dict[str, Any] | None,
) -> bytes:
    record = {
        "id": line_id("batch_req_", name),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return line_text(record).encode() + b"\n"
