"""One request line of a batch, checked against its endpoint, and what it can cost.

Called by `batch_file` while a batch is validated, and by whatever renders one request. A field that
the product would not honour is refused by name, never ignored (`user` alone is accepted and
ignored, as documented); an explicit null is absence. Faults are values, so that a whole file's are
listed; no fault quotes the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from domain.catalog import CATALOG, CHAT_ENDPOINT, BaseModel, Endpoint, base_of_fine_tuned
from domain.inputs.message_text import is_text_parts, message_text
from domain.inputs.strict_json import InvalidJson, parse_json
from domain.inputs.token_estimate import bytes_bound
from domain.limits import (
    CHOICES_MAX,
    CUSTOM_ID_CHARACTERS_MAX,
    DEFAULT_OUTPUT_TOKENS,
    EMBEDDING_INPUTS_MAX,
    STOP_SEQUENCES_MAX,
    TOP_LOGPROBS_MAX,
)
from domain.work.batch import LineError

REFUSED_FIELDS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "stream",
    "stream_options",
    "logit_bias",
    "service_tier",
    "store",
    "prediction",
    "audio",
    "modalities",
    "metadata",
    "reasoning_effort",
    "web_search_options",
    "suffix",
    "best_of",
    "dimensions",
)
"""The migration page's nineteen, the same on both endpoints."""

_LINE_FIELDS = ("custom_id", "method", "url", "body")
# "developer" is OpenAI's newer name of the system role; the runner renders it as that.
_ROLES = ("system", "developer", "user", "assistant")
_SAFE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,39}")
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
Fault = tuple[str, str, str]
"""Code, message and param of one thing that is wrong."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can run. Bounds are in tokens, all choices together."""

    custom_id: str
    model: str
    base: str
    input_token_bound: int
    output_token_bound: int


def parse_request(
    raw: bytes, *, line: int, endpoint: Endpoint, own_models: Mapping[str, str]
) -> BatchRequest | list[LineError]:
    """Reads one line. `own_models` maps the account's servable `ft:` models to their bases.
    Returns the faults of the line where it cannot run."""
    try:
        value = parse_json(raw)
    except InvalidJson as error:
        return [_line_error("invalid_json_line", f"Not valid JSON: {error.message}", None, line)]
    if not isinstance(value, dict):
        return [_line_error("invalid_json_line", "The line must be a JSON object", None, line)]
    faults = [*_envelope_faults(value, endpoint)]
    body = value.get("body")
    bounds = (0, 0)
    base = None
    if isinstance(body, dict):
        base = _base(body.get("model"), endpoint=endpoint, own_models=own_models, faults=faults)
        check = _chat_body if endpoint == CHAT_ENDPOINT else _embeddings_body
        bounds = check(body, base, faults)
    if faults or base is None:
        return [_line_error(code, message, param, line) for code, message, param in faults]
    assert isinstance(body, dict)
    return BatchRequest(
        custom_id=value["custom_id"],
        model=body["model"],
        base=base.id,
        input_token_bound=bounds[0],
        output_token_bound=bounds[1],
    )


def _line_error(code: str, message: str, param: str | None, line: int) -> LineError:
    return LineError(code=code, message=f"Line {line}: {message}.", param=param, line=line)


def _envelope_faults(value: dict[str, Any], endpoint: Endpoint) -> list[Fault]:
    faults: list[Fault] = []
    custom_id = value.get("custom_id")
    if custom_id is None:
        faults.append(_missing("custom_id"))
    elif not isinstance(custom_id, str) or not 1 <= len(custom_id) <= CUSTOM_ID_CHARACTERS_MAX:
        faults.append(
            _invalid("custom_id", f"must be a string of 1 to {CUSTOM_ID_CHARACTERS_MAX} characters")
        )
    method = value.get("method")
    if method is None:
        faults.append(_missing("method"))
    elif method != "POST":
        faults.append(_invalid("method", 'must be "POST"'))
    url = value.get("url")
    if url is None:
        faults.append(_missing("url"))
    elif url != endpoint:
        faults.append(("url_mismatch", f"url must be the batch's endpoint, {endpoint}", "url"))
    body = value.get("body")
    if body is None:
        faults.append(_missing("body"))
    elif not isinstance(body, dict):
        faults.append(_invalid("body", "must be an object"))
    faults += [_unsupported(name) for name in value if name not in _LINE_FIELDS]
    return faults


def _base(
    model: object, *, endpoint: Endpoint, own_models: Mapping[str, str], faults: list[Fault]
) -> BaseModel | None:
    if model is None:
        faults.append(_missing("body.model"))
        return None
    base = CATALOG.get(own_models.get(model, model)) if isinstance(model, str) else None
    if base is None:
        faults.append(_no_such_model(model))
        return None
    if base.endpoint != endpoint:
        faults.append(
            ("model_mismatch", f"body.model is for {base.endpoint} batches", "body.model")
        )
    return base


def _no_such_model(model: object) -> Fault:
    base = CATALOG.get(base_of_fine_tuned(model) or "") if isinstance(model, str) else None
    if base is not None and base.fine_tuning is not None and not base.fine_tuning.servable:
        return (
            "model_not_servable",
            f"body.model is a fine-tune of {base.id}, which is download-only",
            "body.model",
        )
    return (
        "model_not_found",
        "body.model is neither a base model of the catalog nor one of your ft: models",
        "body.model",
    )


def _chat_body(
    body: dict[str, Any], base: BaseModel | None, faults: list[Fault]
) -> tuple[int, int]:
    _check_fields(body, _CHAT_FIELDS, faults)
    _check_together(body, faults)
    texts = _message_texts(body.get("messages"), faults)
    if faults or base is None:
        return 0, 0
    window = base.context_window_tokens
    prompt = (
        sum(bytes_bound(text) for text in texts)
        + base.template_row_tokens
        # One more than the messages: the turn that the answer begins.
        + (len(texts) + 1) * base.template_message_tokens
    )
    most = _first(body, "max_completion_tokens", "max_tokens", default=DEFAULT_OUTPUT_TOKENS)
    return min(prompt, window), min(most, window) * _first(body, "n", default=1)


def _embeddings_body(
    body: dict[str, Any], base: BaseModel | None, faults: list[Fault]
) -> tuple[int, int]:
    _check_fields(body, _EMBEDDINGS_FIELDS, faults)
    if body.get("input") is None:
        faults.append(_missing("body.input"))
    if faults or base is None:
        return 0, 0
    window = base.context_window_tokens
    bounds = _input_bounds(body["input"])
    return sum(min(bound + base.template_row_tokens, window) for bound in bounds), 0


def _check_fields(
    body: dict[str, Any], known: Mapping[str, Callable[[Any], str | None]], faults: list[Fault]
) -> None:
    """`known` maps each field to what is wrong with a value of it, or None."""
    for name, value in body.items():
        check = known.get(name)
        if check is None:
            if value is not None or name not in REFUSED_FIELDS:
                faults.append(_unsupported(name, at="body."))
        elif value is not None:
            wrong = check(value)
            if wrong is not None:
                faults.append(_invalid(f"body.{name}", wrong))


def _check_together(body: dict[str, Any], faults: list[Fault]) -> None:
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        faults.append(
            _invalid("body.max_tokens", "cannot be given with body.max_completion_tokens")
        )
    if body.get("top_logprobs") is not None and body.get("logprobs") is not True:
        faults.append(_invalid("body.top_logprobs", "needs logprobs true"))


def _message_texts(messages: object, faults: list[Fault]) -> list[str]:
    if messages is None:
        faults.append(_missing("body.messages"))
        return []
    if not isinstance(messages, list) or not messages:
        faults.append(_invalid("body.messages", "must be a list of at least one message"))
        return []
    texts: list[str] = []
    for index, message in enumerate(messages):
        wrong = _message_fault(message, f"body.messages[{index}]")
        if wrong is not None:
            faults.append(wrong)
            return []
        texts.append(message_text(message["content"]))
    return texts


def _message_fault(message: object, path: str) -> Fault | None:
    if not isinstance(message, dict):
        return _invalid(path, "must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        return _invalid(f"{path}.role", "must be system, developer, user or assistant")
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            return _unsupported(name, at=f"{path}.")
    if isinstance(content, str) or is_text_parts(content):
        return None
    return _invalid(
        f"{path}.content",
        "must be a string, or a list of text parts: images, audio and files are not offered",
    )


def _input_bounds(value: str | list[Any]) -> list[int]:
    """An upper bound in tokens of each input of a checked embeddings request."""
    if isinstance(value, str):
        return [bytes_bound(value)]
    if isinstance(value[0], int):
        return [len(value)]
    return [bytes_bound(each) if isinstance(each, str) else len(each) for each in value]


def _first(body: dict[str, Any], *names: str, default: int) -> int:
    for name in names:
        value = body.get(name)
        if value is not None:
            return int(value)
    return default


def _missing(param: str) -> Fault:
    return ("missing_required_parameter", f"{param} is missing", param)


def _invalid(param: str, what: str) -> Fault:
    return ("invalid_value", f"{param} {what}", param)


def _unsupported(name: str, *, at: str = "") -> Fault:
    if not _SAFE_NAME.fullmatch(name):
        return (
            "unsupported_parameter",
            f"{at.rstrip('.') or 'the line'} holds an unknown field",
            at + "?",
        )
    return ("unsupported_parameter", f"Unsupported parameter: {at}{name}", at + name)


def _integer(low: int, high: int | None = None) -> Callable[[Any], str | None]:
    limits = f"of at least {low}" if high is None else f"from {low:,} to {high:,}"

    def check(value: Any) -> str | None:
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value >= low
            and (high is None or value <= high)
        ):
            return None
        return f"must be an integer {limits}"

    return check


def _number(low: float, high: float) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            return None
        return f"must be a number from {low:g} to {high:g}"

    return check


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _string(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be a string"


def _anything(_: Any) -> str | None:
    """Checked elsewhere."""
    return None


def _stop(value: Any) -> str | None:
    texts = [value] if isinstance(value, str) else value
    if (
        isinstance(texts, list)
        and 1 <= len(texts) <= STOP_SEQUENCES_MAX
        and all(isinstance(text, str) and text for text in texts)
    ):
        return None
    return f"must be a non-empty string or a list of 1 to {STOP_SEQUENCES_MAX}"


def _encoding_format(value: Any) -> str | None:
    return None if value in ("float", "base64") else 'must be "float" or "base64"'


def _response_format(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("text", "json_object"):
        return None if value.keys() == {"type"} else f"of type {kind} has no other fields"
    if kind != "json_schema":
        return "must be an object of type text, json_object or json_schema"
    if value.keys() != {"type", "json_schema"} or not isinstance(value["json_schema"], dict):
        return "of type json_schema needs a json_schema object, and has no other fields"
    return _json_schema(value["json_schema"])


def _json_schema(given: dict[str, Any]) -> str | None:
    if not given.keys() <= {"name", "schema", "strict", "description"}:
        return "json_schema may have name, schema, strict and description"
    name = given.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        return "json_schema.name must be 1 to 64 letters, digits, underscores or dashes"
    if not isinstance(given.get("schema"), dict):
        return "json_schema.schema must be an object"
    if not isinstance(given.get("strict"), bool | None):
        return "json_schema.strict must be true or false"
    if not isinstance(given.get("description"), str | None):
        return "json_schema.description must be a string"
    if _has_lookaround(given["schema"]):
        return (
            "json_schema.schema has a pattern with lookahead or lookbehind, which is not honoured"
        )
    return None


def _has_lookaround(schema: object) -> bool:
    if isinstance(schema, list):
        return any(_has_lookaround(each) for each in schema)
    if not isinstance(schema, dict):
        return False
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _LOOKAROUND.search(pattern):
        return True
    return any(_has_lookaround(each) for each in schema.values())


def _embedding_input(value: Any) -> str | None:
    if isinstance(value, str):
        return None if value else "must not be empty"
    if not isinstance(value, list) or not value:
        return "must be a string, a list of strings, or lists of token ids"
    if _is_token_ids(value):
        return None
    if len(value) > EMBEDDING_INPUTS_MAX:
        return f"has more than {EMBEDDING_INPUTS_MAX:,} inputs"
    if all(isinstance(each, str) and each for each in value):
        return None
    if all(isinstance(each, list) and each and _is_token_ids(each) for each in value):
        return None
    return "must be a string, a list of strings, or lists of token ids, none of them empty"


def _is_token_ids(value: list[Any]) -> bool:
    return all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value)


_CHAT_FIELDS: dict[str, Callable[[Any], str | None]] = {
    "model": _anything,
    "messages": _anything,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "n": _integer(1, CHOICES_MAX),
    "logprobs": _boolean,
    "top_logprobs": _integer(0, TOP_LOGPROBS_MAX),
    "stop": _stop,
    "seed": _integer(-(2**63), 2**63 - 1),
    "max_tokens": _integer(1),
    "max_completion_tokens": _integer(1),
    "response_format": _response_format,
    "user": _string,
}
_EMBEDDINGS_FIELDS: dict[str, Callable[[Any], str | None]] = {
    "model": _anything,
    "input": _embedding_input,
    "encoding_format": _encoding_format,
    "user": _string,
}
