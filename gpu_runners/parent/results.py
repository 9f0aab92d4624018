"""The bodies of a batch's answers, exactly as OpenAI's SDKs read them, in the lines of its files.

The runner calls it for every finished line; one line in, one line out. It must never say
anything of the request but its id and its model's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from domain.messages import Attempt
from domain.result_line import error_body, line_id, response_line
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
    return response_line(_name(attempt, line), line.custom_id, status_code=200, body=body)


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
        "id": line_id("chatcmpl-", _name(attempt, line)),
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


def _name(attempt: Attempt, line: RequestLine) -> str:
    """The same each time that this attempt writes the line, different for any other."""
    return f"{attempt.work_id}/{attempt.chunk}/{attempt.attempt}/{line.number}"
