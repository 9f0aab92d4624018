"""The lines of a chunk's two result files, exactly as OpenAI's SDKs read them.

`chunk.py` asks for what stands around an answer's text, which comes from the engine child and is
never read here; and for whole lines of refusals. One line in, one line out. It must never say
anything of the request but its id and its model's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from domain.inputs.result_line import error_body, line_id, response_line
from domain.messages import Attempt
from gpu_runners.parent.chunk_input import RequestLine

# No string can hold these: a quote inside one has a backslash before it.
_CHOICES = b',"choices":null,'
_DATA = b',"data":null,'


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands before and after an answer's text in its line."""

    head: bytes
    tail: bytes


def chat_frame(
    attempt: Attempt, line: RequestLine, *, created: int, input_tokens: int, output_tokens: int
) -> Frame:
    """Of a `chat.completion`: all but its choices."""
    body = {
        "id": line_id("chatcmpl-", _name(attempt, line)),
        "object": "chat.completion",
        "created": created,
        "model": line.model,
        "choices": None,
        "usage": {
            "prompt_tokens": input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        },
        "system_fingerprint": None,
    }
    return _frame(attempt, line, body, around=_CHOICES)


def embeddings_frame(attempt: Attempt, line: RequestLine, *, input_tokens: int) -> Frame:
    """Of an embeddings answer: all but its data."""
    body = {
        "object": "list",
        "data": None,
        "model": line.model,
        "usage": {"prompt_tokens": input_tokens, "total_tokens": input_tokens},
    }
    return _frame(attempt, line, body, around=_DATA)


def error_line(
    attempt: Attempt,
    line: RequestLine,
    *,
    status: int,
    error_type: str,
    code: str,
    message: str,
    param: str | None,
) -> bytes:
    """A line of the error file: an HTTP-style refusal, so `error` beside it is null."""
    body = error_body(message, error_type=error_type, code=code, param=param)
    return response_line(_name(attempt, line), line.custom_id, status_code=status, body=body)


def _frame(attempt: Attempt, line: RequestLine, body: dict[str, Any], *, around: bytes) -> Frame:
    name = _name(attempt, line)
    text = response_line(name, line.custom_id, status_code=200, body=body)
    head, _, tail = text.partition(around)
    before, after = around.split(b"null")
    return Frame(head + before, after + tail)


def _name(attempt: Attempt, line: RequestLine) -> str:
    """The same each time that this attempt writes the line, different for any other."""
    return f"{attempt.work_id}/{attempt.chunk}/{attempt.attempt}/{line.number}"
