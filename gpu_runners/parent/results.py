"""The lines of a batch's output and error files, exactly as OpenAI's SDKs read them.

The runner calls it for every finished line; one line in, one line out. It must never write a raw
U+2028 or U+2029, which some clients take for a line end.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from domain.messages import Attempt
from gpu_runners.child_pipes import unpack_vector


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request line of a chunk. `number` counts from 1 in the whole input file."""

    number: int
    custom_id: str
    body: dict[str, Any]

    @property
    def model(self) -> str:
        return str(self.body["model"])


def answer_line(attempt: Attempt, line: RequestLine, body: dict[str, Any]) -> bytes:
    """A line of the output file."""
    return _line(attempt, line, status_code=200, body=body)


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
    error = {"message": message, "type": error_type, "param": param, "code": code}
    return _line(attempt, line, status_code=status, body={"error": error})


def chat_completion(
    attempt: Attempt,
    line: RequestLine,
    *,
    created: int,
    choices: list[dict[str, Any]],
    input_tokens: int,
    output_tokens: int,
) -> dict[str, Any]:
    """The `chat.completion` body. `choices` hold text, finish_reason and logprobs."""
    return {
        "id": _id("chatcmpl-", attempt, line),
        "object": "chat.completion",
        "created": created,
        "model": line.model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice["text"], "refusal": None},
                "logprobs": _logprobs(choice["logprobs"]),
                "finish_reason": choice["finish_reason"],
            }
            for index, choice in enumerate(choices)
        ],
        "usage": {
            "prompt_tokens": input_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens,
        },
        "system_fingerprint": None,
    }


def embedding_list(line: RequestLine, *, vectors: list[str], input_tokens: int) -> dict[str, Any]:
    """The embeddings body. `vectors` are little-endian float32 in base64, as the engine sent them;
    the line's `encoding_format` decides how they are written."""
    as_text = line.body.get("encoding_format") == "base64"
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": vector if as_text else unpack_vector(vector),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": line.model,
        "usage": {"prompt_tokens": input_tokens, "total_tokens": input_tokens},
    }


def _logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if entries is None else {"content": entries, "refusal": None}


def _line(attempt: Attempt, line: RequestLine, *, status_code: int, body: dict[str, Any]) -> bytes:
    record = {
        "id": _id("batch_req_", attempt, line),
        "custom_id": line.custom_id,
        "response": {
            "status_code": status_code,
            "request_id": _id("req_", attempt, line),
            "body": body,
        },
        "error": None,
    }
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return text.encode() + b"\n"


def _id(prefix: str, attempt: Attempt, line: RequestLine) -> str:
    """The same each time that this attempt writes the line, different for any other."""
    named = f"{prefix}/{attempt.work_id}/{attempt.chunk}/{attempt.attempt}/{line.number}"
    return prefix + hashlib.sha256(named.encode()).hexdigest()[:32]
