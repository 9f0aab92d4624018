"""The bodies of POST /fine_tuning/jobs and POST /batches, read strictly.

Called by the routes, by the quote without create and by whatever else makes work. A field that the
product does not have is refused by name, never ignored; an explicit null of an optional field is
its absence. It never looks a file up: that is the caller's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from domain.catalog import (
    CATALOG,
    CHAT_ENDPOINT,
    EMBEDDINGS_ENDPOINT,
    AdapterMethod,
    BaseModel,
    Endpoint,
    FineTuning,
    TrainingMethod,
    fine_tuning_of,
)
from domain.errors import InvalidRequest
from domain.inputs.hyperparameters import Hyperparameters, parse_hyperparameters
from domain.limits import (
    COMPLETION_WINDOW_SECONDS,
    EXPIRES_AFTER_SECONDS_MAX,
    EXPIRES_AFTER_SECONDS_MIN,
    METADATA_KEY_CHARACTERS_MAX,
    METADATA_PAIRS_MAX,
    METADATA_VALUE_CHARACTERS_MAX,
    SEED_MAX,
    SUFFIX_CHARACTERS_MAX,
    CompletionWindow,
)

_JOB_FIELDS = (
    "model",
    "training_file",
    "validation_file",
    "hyperparameters",
    "method",
    "suffix",
    "seed",
    "metadata",
    "integrations",
)
_BATCH_FIELDS = (
    "input_file_id",
    "endpoint",
    "completion_window",
    "metadata",
    "output_expires_after",
)


@dataclass(frozen=True, slots=True)
class FineTuneCreate:
    """A create of a job, all defaults filled in."""

    base: BaseModel
    training: FineTuning
    method: TrainingMethod
    adapter: AdapterMethod
    hyperparameters: Hyperparameters
    seed: int
    training_file: str
    validation_file: str | None
    suffix: str | None
    metadata: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class BatchCreate:
    """A create of a batch. `output_expires_seconds` counts from the output file's creation."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: CompletionWindow
    output_expires_seconds: int | None
    metadata: dict[str, str] | None


def parse_fine_tuning_create(body: object) -> FineTuneCreate:
    """Reads the body of POST /fine_tuning/jobs. Raises InvalidRequest naming the field."""
    fields = _fields(body, known=_JOB_FIELDS)
    model = _required_text(fields, "model")
    training = fine_tuning_of(model)
    base = CATALOG[model]
    if fields.get("integrations", []) != []:
        raise InvalidRequest(
            "Integrations are not offered: integrations must be null or [].", param="integrations"
        )
    method, adapter, nested = _method(fields.get("method"), base=base, training=training)
    hyperparameters = parse_hyperparameters(
        _hyperparameters_given_once(fields.get("hyperparameters"), nested=nested, method=method),
        base=base,
        training=training,
        method=method,
    )
    return FineTuneCreate(
        base=base,
        training=training,
        method=method,
        adapter=adapter,
        hyperparameters=hyperparameters,
        seed=_seed(fields.get("seed")),
        training_file=_required_text(fields, "training_file"),
        validation_file=_optional_text(fields, "validation_file"),
        suffix=_suffix(fields.get("suffix")),
        metadata=parse_metadata(fields.get("metadata")),
    )


def parse_batch_create(body: object) -> BatchCreate:
    """Reads the body of POST /batches. Raises InvalidRequest naming the field."""
    fields = _fields(body, known=_BATCH_FIELDS)
    input_file_id = _required_text(fields, "input_file_id")
    endpoint = _endpoint(_required_text(fields, "endpoint"))
    return BatchCreate(
        input_file_id=input_file_id,
        endpoint=endpoint,
        completion_window=_window(_required_text(fields, "completion_window")),
        output_expires_seconds=parse_expires_after(
            fields.get("output_expires_after"), param="output_expires_after"
        ),
        metadata=parse_metadata(fields.get("metadata")),
    )


def parse_metadata(value: object) -> dict[str, str] | None:
    """At most 16 pairs of strings. Raises InvalidRequest (param `metadata`)."""
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > METADATA_PAIRS_MAX:
        raise InvalidRequest(
            f"metadata must be an object of at most {METADATA_PAIRS_MAX} pairs.", param="metadata"
        )
    for key, text in value.items():
        if not isinstance(text, str):
            raise InvalidRequest("metadata values must be strings.", param="metadata")
        if len(key) > METADATA_KEY_CHARACTERS_MAX or len(text) > METADATA_VALUE_CHARACTERS_MAX:
            raise InvalidRequest(
                f"metadata keys are at most {METADATA_KEY_CHARACTERS_MAX} characters, values at "
                f"most {METADATA_VALUE_CHARACTERS_MAX}.",
                param="metadata",
            )
    return value


def parse_expires_after(value: object, *, param: str = "expires_after") -> int | None:
    """Seconds of an `{"anchor": "created_at", "seconds": …}`. Raises InvalidRequest naming
    `param`."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.keys() != {"anchor", "seconds"}:
        raise InvalidRequest(f"{param} must have anchor and seconds, nothing else.", param=param)
    if value["anchor"] != "created_at":
        raise InvalidRequest(f'{param}.anchor must be "created_at".', param=f"{param}.anchor")
    seconds = value["seconds"]
    if (
        not isinstance(seconds, int)
        or isinstance(seconds, bool)
        or not EXPIRES_AFTER_SECONDS_MIN <= seconds <= EXPIRES_AFTER_SECONDS_MAX
    ):
        raise InvalidRequest(
            f"{param}.seconds must be an integer from {EXPIRES_AFTER_SECONDS_MIN} to "
            f"{EXPIRES_AFTER_SECONDS_MAX}.",
            param=f"{param}.seconds",
        )
    return seconds


def _fields(body: object, *, known: tuple[str, ...]) -> dict[str, Any]:
    """The fields that are given; null is absent."""
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    for name in body:
        if name not in known:
            raise InvalidRequest(f"Unsupported parameter: {name}", param=name)
    return {name: value for name, value in body.items() if value is not None}


def _required_text(fields: dict[str, Any], name: str) -> str:
    if name not in fields:
        raise InvalidRequest(f"Missing required parameter: {name}", param=name)
    return _text(fields[name], name)


def _optional_text(fields: dict[str, Any], name: str) -> str | None:
    return _text(fields[name], name) if name in fields else None


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} must be a non-empty string.", param=name)
    return value


def _method(
    value: object, *, base: BaseModel, training: FineTuning
) -> tuple[TrainingMethod, AdapterMethod, object]:
    """Method, adapter, and the hyperparameters that stand inside it."""
    if value is None:
        return "supervised", training.default_adapter, None
    if isinstance(value, str):
        return "supervised", _adapter(value, "method", base=base, training=training), None
    if not isinstance(value, dict):
        raise InvalidRequest('method must be "lora", "qlora" or an object.', param="method")
    match value.get("type"):
        case "supervised" | "dpo" as method:
            settings = _method_settings(value, method)
        case _:
            raise InvalidRequest(
                'method.type must be "supervised" or "dpo". Reinforcement fine-tuning is not '
                "offered.",
                param="method",
            )
    adapter = settings.get("adapter")
    if adapter is None:
        return method, training.default_adapter, settings.get("hyperparameters")
    name = f"method.{method}.adapter"
    return (
        method,
        _adapter(adapter, name, base=base, training=training),
        settings.get("hyperparameters"),
    )


def _method_settings(value: dict[str, Any], method: TrainingMethod) -> dict[str, Any]:
    given = {name: each for name, each in value.items() if each is not None}
    for name in given:
        if name not in ("type", method):
            raise InvalidRequest(f"Unsupported parameter: method.{name}", param=f"method.{name}")
    settings = given.get(method, {})
    if not isinstance(settings, dict):
        raise InvalidRequest(f"method.{method} must be an object.", param=f"method.{method}")
    for name in settings:
        if name not in ("adapter", "hyperparameters"):
            path = f"method.{method}.{name}"
            raise InvalidRequest(f"Unsupported parameter: {path}", param=path)
    return settings


def _adapter(value: object, name: str, *, base: BaseModel, training: FineTuning) -> AdapterMethod:
    for offered in training.adapters():
        if value == offered:
            return offered
    words = " or ".join(f'"{each}"' for each in training.adapters())
    more = " (or an object with a type)" if name == "method" else ""
    raise InvalidRequest(f"{name} must be {words}{more} on {base.id}.", param=name)


def _hyperparameters_given_once(
    top_level: object, *, nested: object, method: TrainingMethod
) -> dict[str, Any]:
    if top_level is not None and nested is not None:
        raise InvalidRequest(
            f"Hyperparameters are given twice: give hyperparameters or "
            f"method.{method}.hyperparameters, not both.",
            param="hyperparameters",
        )
    given = nested if top_level is None else top_level
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidRequest("hyperparameters must be an object.", param="hyperparameters")
    return given


def _seed(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= SEED_MAX:
        raise InvalidRequest(f"seed must be an integer from 0 to {SEED_MAX:,}.", param="seed")
    return value


def _suffix(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= SUFFIX_CHARACTERS_MAX:
        raise InvalidRequest(
            f"suffix must be a string of 1 to {SUFFIX_CHARACTERS_MAX} characters.", param="suffix"
        )
    return value


def _endpoint(value: str) -> Endpoint:
    for offered in (CHAT_ENDPOINT, EMBEDDINGS_ENDPOINT):
        if value == offered:
            return offered
    raise InvalidRequest(
        f"endpoint must be {CHAT_ENDPOINT} or {EMBEDDINGS_ENDPOINT}.", param="endpoint"
    )


def _window(value: str) -> CompletionWindow:
    for offered in COMPLETION_WINDOW_SECONDS:
        if value == offered:
            return offered
    raise InvalidRequest('completion_window must be "24h" or "72h".', param="completion_window")
