"""Turns the body of a batch line into what an engine runs, or refuses it by field name.

The infer child calls it for every line. Batch validation has refused most faults before; what gets
here is checked again, because a field that is not understood must never be ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from domain.errors import InvalidRequest
from domain.inputs.message_text import is_text_parts, message_text
from domain.limits import DEFAULT_OUTPUT_TOKENS

CHAT_FIELDS = frozenset(
    {
        "model",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logprobs",
        "top_logprobs",
        "response_format",
        "user",
    }
)
EMBEDDING_FIELDS = frozenset({"model", "input", "encoding_format", "user"})

N_MAX = 128
STOP_MAX = 4
TOP_LOGPROBS_MAX = 20
EMBEDDING_INPUTS_MAX = 2048


@dataclass(frozen=True, slots=True)
class Sampling:
    """OpenAI's sampling fields with OpenAI's defaults. `max_tokens` None: up to the window.
    `logprobs` None: not asked for; else the number of alternatives per token. `json_schema` is a
    schema, or {} with `json_object`."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    json_object: bool = False
    json_schema: dict[str, Any] | None = None


def chat_sampling(body: dict[str, Any]) -> Sampling:
    """Raises InvalidRequest naming the field."""
    _refuse_unknown(body, CHAT_FIELDS)
    json_object, json_schema = _response_format(body.get("response_format"))
    return Sampling(
        max_tokens=_max_tokens(body),
        temperature=_number(body, "temperature", 1.0, low=0.0, high=2.0),
        top_p=_number(body, "top_p", 1.0, low=0.0, high=1.0),
        n=_integer(body, "n", low=1, high=N_MAX) or 1,
        stop=_stop(body.get("stop")),
        seed=_integer(body, "seed", low=-(2**63), high=2**63 - 1),
        presence_penalty=_number(body, "presence_penalty", 0.0, low=-2.0, high=2.0),
        frequency_penalty=_number(body, "frequency_penalty", 0.0, low=-2.0, high=2.0),
        logprobs=_logprobs(body),
        json_object=json_object,
        json_schema=json_schema,
    )


def chat_messages(body: dict[str, Any]) -> list[dict[str, str]]:
    """The messages as the template takes them. Raises InvalidRequest naming the message."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("'messages' must be a list of at least one message.", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def embedding_inputs(body: dict[str, Any]) -> list[str] | list[list[int]]:
    """The inputs as a list: a string, strings, token ids or lists of them. Raises InvalidRequest
    naming the field."""
    _refuse_unknown(body, EMBEDDING_FIELDS)
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise InvalidRequest(
            "'encoding_format' must be 'float' or 'base64'.", param="encoding_format"
        )
    given = body.get("input")
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise _bad_input()
    if all(_is_token(item) for item in given):
        return [given]
    if len(given) > EMBEDDING_INPUTS_MAX:
        raise _bad_input()
    if all(isinstance(item, str) and item for item in given):
        return given
    if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in given):
        return given
    raise _bad_input()


def _bad_input() -> InvalidRequest:
    return InvalidRequest(
        f"'input' must be a non-empty string, a list of token ids, or a list of at most "
        f"{EMBEDDING_INPUTS_MAX} of either.",
        param="input",
    )


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _refuse_unknown(body: dict[str, Any], known: frozenset[str]) -> None:
    for name, value in body.items():
        if name not in known and value is not None:
            raise InvalidRequest(
                f"Unsupported parameter: '{name}'.", param=name, code="unsupported_parameter"
            )


def _message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object.", param=where)
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise InvalidRequest(f"{where}.role is not offered.", param=f"{where}.role")
    if not isinstance(content, str) and not is_text_parts(content):
        raise InvalidRequest(
            f"{where}.content must be a string, or a list of text parts.", param=f"{where}.content"
        )
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            raise InvalidRequest(f"{where}.{name} is not offered.", param=f"{where}.{name}")
    return {"role": "system" if role == "developer" else role, "content": message_text(content)}


def _max_tokens(body: dict[str, Any]) -> int:
    newer = _integer(body, "max_completion_tokens", low=1, high=None)
    older = _integer(body, "max_tokens", low=1, high=None)
    # Without either, what validation held credit for.
    return newer or older or DEFAULT_OUTPUT_TOKENS


def _number(body: dict[str, Any], name: str, default: float, *, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequest(f"'{name}' must be a number from {low:g} to {high:g}.", param=name)
    return float(value)


def _integer(body: dict[str, Any], name: str, *, low: int, high: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    beyond = high is not None and isinstance(value, int) and value > high
    if isinstance(value, bool) or not isinstance(value, int) or value < low or beyond:
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"'{name}' must be an integer {limits}.", param=name)
    return value


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or len(texts) > STOP_MAX
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise InvalidRequest(
            f"'stop' must be a non-empty string or up to {STOP_MAX} of them.", param="stop"
        )
    return tuple(texts)


def _logprobs(body: dict[str, Any]) -> int | None:
    wanted = body.get("logprobs")
    if wanted not in (None, True, False):
        raise InvalidRequest("'logprobs' must be true or false.", param="logprobs")
    alternatives = _integer(body, "top_logprobs", low=0, high=TOP_LOGPROBS_MAX)
    if not wanted:
        if alternatives:
            raise InvalidRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        return None
    return alternatives or 0


def _response_format(value: object) -> tuple[bool, dict[str, Any] | None]:
    match value:
        case None | {"type": "text"}:
            return False, None
        case {"type": "json_object"}:
            return True, None
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return False, schema
        case _:
            raise InvalidRequest(
                "'response_format' must be of type text, json_object, or json_schema with a schema "
                "in json_schema.schema.",
                param="response_format",
            )
