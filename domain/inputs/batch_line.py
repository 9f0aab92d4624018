"""One request line of a batch, checked against its endpoint, and what it can cost.

Called by `batch_file` while a batch is validated. The body is read by the same functions as the
engine child reads it with (`requests/`); what depends on the model is added here. Faults are
values, so that a whole file's are listed; no fault quotes the line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from domain.catalog import CATALOG, CHAT_ENDPOINT, BaseModel, Endpoint, base_of_fine_tuned
from domain.inputs.jsonl import array_hint
from domain.inputs.requests.chat_body import ChatBody, read_chat_body
from domain.inputs.requests.embeddings_body import EmbeddingsBody, read_embeddings_body
from domain.inputs.requests.faults import Fault, invalid, missing, unsupported
from domain.inputs.requests.sampling import Sampling
from domain.inputs.strict_json import InvalidJson, parse_json
from domain.inputs.token_estimate import bytes_bound
from domain.limits import (
    ANSWER_LOGPROBS_MAX,
    ANSWER_TOKENS_MAX,
    BATCH_ERRORS_MAX,
    CUSTOM_ID_CHARACTERS_MAX,
)
from domain.log.stored import StoredModel

CHAT_INSTEAD = {"/v1/responses": "input", "/v1/completions": "prompt"}
"""OpenAI's other endpoints that answer texts, and the field of theirs that messages take the place
of."""
_LINE_FIELDS = ("custom_id", "method", "url", "body")
_ENVELOPE = frozenset(_LINE_FIELDS)


class LineError(StoredModel):
    """One entry of `errors.data`: about the file, or one line of it."""

    code: str
    message: str
    param: str | None
    line: int | None


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
        return [_not_a_line(f"Not valid JSON: {error.message}{array_hint(raw, line=line)}", line)]
    if not isinstance(value, dict):
        return [_not_a_line(f"The line must be a JSON object{array_hint(raw, line=line)}", line)]
    errors = [_error(fault, line) for fault in _envelope_faults(value, endpoint)]
    body = value.get("body")
    if not isinstance(body, dict):
        return errors
    base = _base(body.get("model"), endpoint=endpoint, own_models=own_models)
    read = _read_body(body, base, endpoint)
    if isinstance(base, Fault) or isinstance(read, list):
        faults = [*_faults(base), *_faults(read)]
        return errors + [_error(fault, line, at="body.") for fault in faults]
    return errors or _request(value, base, read)


def _not_a_line(message: str, line: int) -> LineError:
    return LineError(
        code="invalid_json_line", message=f"Line {line}: {message}.", param=None, line=line
    )


def _error(fault: Fault, line: int, *, at: str = "") -> LineError:
    message = f"Line {line}: {fault.message(at)}."
    return LineError(code=fault.code, message=message, param=at + fault.path, line=line)


def _faults(read: object) -> list[Fault]:
    """Those among what a reader gave."""
    if isinstance(read, Fault):
        return [read]
    return read if isinstance(read, list) else []


def _envelope_faults(line: dict[str, Any], endpoint: Endpoint) -> list[Fault]:
    if _is_envelope(line, endpoint):
        return []
    faults = [_envelope_fault(name, line.get(name), endpoint) for name in _LINE_FIELDS]
    unknown = (unsupported(name) for name in line if name not in _LINE_FIELDS)
    return [*filter(None, faults), *islice(unknown, BATCH_ERRORS_MAX)]


def _is_envelope(line: dict[str, Any], endpoint: Endpoint) -> bool:
    """Whether there is no more to be said, as of nearly every line."""
    return (
        line.keys() == _ENVELOPE
        and line["method"] == "POST"
        and line["url"] == endpoint
        and isinstance(line["body"], dict)
        and isinstance(line["custom_id"], str)
        and 1 <= len(line["custom_id"]) <= CUSTOM_ID_CHARACTERS_MAX
    )


def _envelope_fault(name: str, value: object, endpoint: Endpoint) -> Fault | None:
    match name, value:
        case _, None:
            return missing(name)
        case "custom_id", str() if 1 <= len(value) <= CUSTOM_ID_CHARACTERS_MAX:
            return None
        case "custom_id", _:
            return invalid(name, f"must be a string of 1 to {CUSTOM_ID_CHARACTERS_MAX} characters")
        case "method", _ if value != "POST":
            return invalid(name, 'must be "POST"')
        case "url", _ if value != endpoint:
            return _other_url(value, endpoint)
        case "body", _ if not isinstance(value, dict):
            return invalid(name, "must be an object")
    return None


def _other_url(value: object, endpoint: Endpoint) -> Fault:
    after = f" must be the batch's endpoint, {endpoint}"
    if endpoint == CHAT_ENDPOINT and isinstance(value, str) and value in CHAT_INSTEAD:
        after += f"; {value} is not offered: write messages in place of {CHAT_INSTEAD[value]}"
    return Fault(code="url_mismatch", path="url", after=after)


def _base(model: object, *, endpoint: Endpoint, own_models: Mapping[str, str]) -> BaseModel | Fault:
    if model is None:
        return missing("model")
    base = CATALOG.get(own_models.get(model, model)) if isinstance(model, str) else None
    if base is None:
        return _no_such_model(model)
    if base.endpoint != endpoint:
        return Fault(code="model_mismatch", path="model", after=f" is for {base.endpoint} batches")
    return base


def _no_such_model(model: object) -> Fault:
    base = CATALOG.get(base_of_fine_tuned(model) or "") if isinstance(model, str) else None
    if base is not None and base.fine_tuning is not None and not base.fine_tuning.servable:
        what = f" is a fine-tune of {base.id}, which is download-only"
        return Fault(code="model_not_servable", path="model", after=what)
    what = " is neither a base model of the catalog nor one of your ft: models"
    return Fault(code="model_not_found", path="model", after=what)


def _read_body(
    body: dict[str, Any], base: BaseModel | Fault, endpoint: Endpoint
) -> ChatBody | EmbeddingsBody | list[Fault]:
    read = read_chat_body(body) if endpoint == CHAT_ENDPOINT else read_embeddings_body(body)
    if isinstance(read, list) or isinstance(base, Fault):
        return read
    if isinstance(read, ChatBody):
        fault = _answer_too_large(read.sampling, base)
        return read if fault is None else [fault]
    # The model's own length is what happens anyway.
    return read if read.dimensions in (None, base.dimensions) else [unsupported("dimensions")]


def _answer_too_large(sampling: Sampling, base: BaseModel) -> Fault | None:
    """What a line may ask for can be handed over whole, whatever the model says."""
    tokens = _answer_tokens(sampling, base)
    if tokens > ANSWER_TOKENS_MAX:
        asked = f"times the most tokens of an answer is {tokens:,}"
        return invalid("n", f"{asked}; a line may answer with {ANSWER_TOKENS_MAX:,} in all")
    if sampling.logprobs is None:
        return None
    entries = tokens * (1 + sampling.logprobs)
    if entries > ANSWER_LOGPROBS_MAX:
        asked = f"would list up to {entries:,} tokens, alternatives counted"
        return invalid("logprobs", f"{asked}, where {ANSWER_LOGPROBS_MAX:,} may be: {_LOWER}")
    return None


_LOWER = "lower the most tokens of an answer, n or top_logprobs"


def _answer_tokens(sampling: Sampling, base: BaseModel) -> int:
    return min(sampling.max_tokens, base.context_window_tokens) * sampling.n


def _request(
    line: dict[str, Any], base: BaseModel, read: ChatBody | EmbeddingsBody
) -> BatchRequest:
    if isinstance(read, ChatBody):
        input_tokens, output_tokens = _chat_bounds(read, base)
    else:
        input_tokens, output_tokens = _embeddings_bounds(read, base), 0
    return BatchRequest(
        custom_id=line["custom_id"],
        model=line["body"]["model"],
        base=base.id,
        input_token_bound=input_tokens,
        output_token_bound=output_tokens,
    )


def _chat_bounds(chat: ChatBody, base: BaseModel) -> tuple[int, int]:
    window = base.context_window_tokens
    prompt = (
        sum(bytes_bound(message["content"]) for message in chat.messages)
        + base.template_row_tokens
        # One more than the messages: the turn that the answer begins.
        + (len(chat.messages) + 1) * base.template_message_tokens
    )
    return min(prompt, window), _answer_tokens(chat.sampling, base)


def _embeddings_bounds(embeddings: EmbeddingsBody, base: BaseModel) -> int:
    window = base.context_window_tokens
    bounds = (
        bytes_bound(each) if isinstance(each, str) else len(each) for each in embeddings.inputs
    )
    return sum(min(bound + base.template_row_tokens, window) for bound in bounds)
