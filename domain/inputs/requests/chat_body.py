"""The body of a chat line, read once and for all.

Batch validation reads it to say what is wrong and what it can cost; the engine child reads the same
bytes with the same function and runs what comes of it, so that nothing is held for that does not
run and nothing runs that was not checked. Runs in the engines' environment: nothing but the
standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from domain.inputs.message_text import is_text_parts, message_text
from domain.inputs.requests import sampling
from domain.inputs.requests.faults import Fault, invalid, missing, unsupported
from domain.inputs.requests.fields import Reader, read_fields, string, unread
from domain.inputs.requests.response_format import TEXT, ResponseFormat, read_response_format
from domain.inputs.requests.sampling import Sampling, read_sampling

# "developer" is OpenAI's newer name of the system role, and is rendered as that.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_EMPTY_IS_NONE = ("tool_calls", "annotations")
"""Fields of a message that SDKs write out as empty lists, which mean none."""


@dataclass(frozen=True, slots=True)
class ChatBody:
    """What a chat line asks for. Each message has a role of the template's and a text."""

    messages: tuple[dict[str, str], ...]
    sampling: Sampling
    response_format: ResponseFormat


def read_chat_body(body: Mapping[str, Any]) -> ChatBody | list[Fault]:
    """The request, or everything that is wrong with it. `model` is the caller's to look at."""
    faults: list[Fault] = []
    read = read_fields(body, READERS, faults)
    _check_together(body, read, faults)
    messages = _messages(body.get("messages"), faults)
    if faults:
        return faults
    return ChatBody(
        messages=messages,
        sampling=read_sampling(read),
        response_format=read.get("response_format", TEXT),
    )


def _check_together(body: Mapping[str, Any], read: Mapping[str, Any], faults: list[Fault]) -> None:
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        faults.append(invalid("max_tokens", "cannot be given with max_completion_tokens"))
    if read.get("top_logprobs") and read.get("logprobs") is not True:
        faults.append(invalid("top_logprobs", "needs logprobs true"))


def _messages(given: object, faults: list[Fault]) -> tuple[dict[str, str], ...]:
    if given is None:
        faults.append(missing("messages"))
        return ()
    if not isinstance(given, list) or not given:
        faults.append(invalid("messages", "must be a list of at least one message"))
        return ()
    messages = []
    for index, message in enumerate(given):
        wrong = _message_fault(message, f"messages[{index}]")
        if wrong is not None:
            faults.append(wrong)
            return ()
        messages.append(
            {"role": _ROLES[message["role"]], "content": message_text(message["content"])}
        )
    return tuple(messages)


def _message_fault(message: object, path: str) -> Fault | None:
    if not isinstance(message, dict):
        return invalid(path, "must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        return invalid(f"{path}.role", "must be system, developer, user or assistant")
    for name, value in message.items():
        if name not in ("role", "content") and not _is_none(name, value):
            return unsupported(name, within=path)
    if isinstance(content, str) or is_text_parts(content):
        return None
    return invalid(
        f"{path}.content",
        "must be a string, or a list of text parts: images, audio and files are not offered",
    )


def _is_none(name: str, value: object) -> bool:
    return value is None or (name in _EMPTY_IS_NONE and value == [])


READERS: dict[str, Reader] = {
    "model": unread,
    "messages": unread,
    **sampling.READERS,
    "response_format": read_response_format,
    # Accepted and ignored, as the migration page says.
    "user": string,
}
