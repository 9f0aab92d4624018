"""The body of POST /fine_tuning/jobs, with all that depends on the base model decided.

Called by the route, and by whatever else makes jobs. It never looks a file up: that is the caller's
part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from domain.catalog import (
    CATALOG,
    AdapterMethod,
    BaseModel,
    FineTuning,
    TrainingMethod,
    fine_tuning_of,
)
from domain.errors import InvalidRequest
from domain.inputs.body import Body, Object, Text, read_body, said
from domain.inputs.create_fields import Metadata
from domain.inputs.hyperparameters import Hyperparameters, parse_hyperparameters
from domain.limits import SEED_MAX, SUFFIX_CHARACTERS_MAX


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


class _JobBody(Body):
    """`method` is read once the base is known."""

    model: Text
    integrations: Annotated[
        list[Any] | None,
        Field(max_length=0),
        said("Integrations are not offered: {path} must be null or []."),
    ] = None
    method: Any = None
    hyperparameters: Object = Field(default_factory=dict)
    seed: Annotated[
        int, Field(ge=0, le=SEED_MAX), said(f"{{path}} must be an integer from 0 to {SEED_MAX:,}.")
    ] = 0
    training_file: Text
    validation_file: Text | None = None
    suffix: (
        Annotated[
            str,
            Field(min_length=1, max_length=SUFFIX_CHARACTERS_MAX),
            said(f"{{path}} must be a string of 1 to {SUFFIX_CHARACTERS_MAX} characters."),
        ]
        | None
    ) = None
    metadata: Metadata | None = None


class _MethodSettings(Body):
    """`adapter` is read once the base is known."""

    adapter: Any = None
    hyperparameters: Object = Field(default_factory=dict)


class _Supervised(Body):
    type: Literal["supervised"]
    supervised: _MethodSettings = _MethodSettings()
    dpo: None = None
    reinforcement: None = None


class _Dpo(Body):
    type: Literal["dpo"]
    supervised: None = None
    dpo: _MethodSettings = _MethodSettings()
    reinforcement: None = None


def parse_fine_tuning_create(body: object) -> FineTuneCreate:
    """Reads the body. Raises InvalidRequest naming the field."""
    read = read_body(_JobBody, body)
    training = fine_tuning_of(read.model)
    base = CATALOG[read.model]
    method, adapter, nested = _method(read.method, base=base, training=training)
    return FineTuneCreate(
        base=base,
        training=training,
        method=method,
        adapter=adapter,
        hyperparameters=parse_hyperparameters(
            _given_once(read.hyperparameters, nested=nested, method=method),
            base=base,
            training=training,
            method=method,
        ),
        seed=read.seed,
        training_file=read.training_file,
        validation_file=read.validation_file,
        suffix=read.suffix,
        metadata=read.metadata,
    )


def _method(
    given: object, *, base: BaseModel, training: FineTuning
) -> tuple[TrainingMethod, AdapterMethod, dict[str, Any]]:
    """Method, adapter, and the hyperparameters that stand inside it."""
    if given is None:
        return "supervised", training.default_adapter, {}
    if isinstance(given, str):
        return "supervised", _adapter(given, "method", base=base, training=training), {}
    if not isinstance(given, dict):
        raise InvalidRequest('method must be "lora", "qlora" or an object.', param="method")
    method, settings = _method_settings(given)
    if settings.adapter is None:
        return method, training.default_adapter, settings.hyperparameters
    path = f"method.{method}.adapter"
    adapter = _adapter(settings.adapter, path, base=base, training=training)
    return method, adapter, settings.hyperparameters


def _method_settings(given: dict[str, Any]) -> tuple[TrainingMethod, _MethodSettings]:
    match given.get("type"):
        case "supervised":
            return "supervised", read_body(_Supervised, given, at="method").supervised
        case "dpo":
            return "dpo", read_body(_Dpo, given, at="method").dpo
        case _:
            raise InvalidRequest(
                'method.type must be "supervised" or "dpo". Reinforcement fine-tuning is not '
                "offered.",
                param="method",
            )


def _adapter(value: object, name: str, *, base: BaseModel, training: FineTuning) -> AdapterMethod:
    for offered in training.adapters():
        if value == offered:
            return offered
    words = " or ".join(f'"{each}"' for each in training.adapters())
    more = " (or an object with a type)" if name == "method" else ""
    raise InvalidRequest(f"{name} must be {words}{more} on {base.id}.", param=name)


def _given_once(
    top_level: dict[str, Any], *, nested: dict[str, Any], method: TrainingMethod
) -> dict[str, Any]:
    if top_level and nested:
        raise InvalidRequest(
            f"Hyperparameters are given twice: give hyperparameters or "
            f"method.{method}.hyperparameters, not both.",
            param="hyperparameters",
        )
    return top_level or nested
