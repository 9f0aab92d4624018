"""The hyperparameters of a job: ranges, defaults, and what "auto" means.

Called by `job_create`. A refusal names the field and its range in `param` and message. A boolean is
no number, a string of digits neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from domain.catalog import (
    DEFAULT_SEQ_LENGTH_MAX,
    LONG_CONTEXT_RANK_MAX,
    BaseModel,
    FineTuning,
    TrainingMethod,
)
from domain.errors import InvalidRequest
from domain.inputs.body import Body, read_body, refused, said
from domain.log.stored import Exact, StoredModel, exact

EPOCHS_DEFAULT, EPOCHS_MAX = 1, 10
BATCH_SIZE_DEFAULT, BATCH_SIZE_MAX = 8, 64
MULTIPLIER_DEFAULT, MULTIPLIER_MIN, MULTIPLIER_MAX = 1.0, 0.01, 10.0
RANK_DEFAULT = 16
ALPHA_DEFAULT, ALPHA_MAX = 32, 256
SEQ_LENGTH_DEFAULT, SEQ_LENGTH_MIN, SEQ_LENGTH_MAX = 2_048, 128, 8_192
BETA_DEFAULT, BETA_MAX = 0.1, 2.0
LEARNING_RATE_MAX = 0.01
LEARNING_RATE_BASE: dict[TrainingMethod, float] = {"supervised": 2e-4, "dpo": 5e-6}
LEARNING_RATE_MIN: dict[TrainingMethod, float] = {"supervised": 1e-6, "dpo": 5e-8}


class Hyperparameters(StoredModel):
    """What a job trains with: no "auto" is left. `beta` is null but for DPO;
    `learning_rate_multiplier` is the rate as a multiple of the method's."""

    n_epochs: int
    batch_size: int
    learning_rate: Exact
    learning_rate_multiplier: Exact
    lora_rank: int
    lora_alpha: int
    max_seq_length: int
    beta: Exact | None


@dataclass(frozen=True, slots=True)
class _Tuning:
    """What the ranges depend on."""

    base: BaseModel
    training: FineTuning
    method: TrainingMethod

    def __str__(self) -> str:
        return f"{self.method} tuning of {self.base.id}"

    @property
    def rank_max(self) -> int:
        """Of rows that are not long."""
        return self.training.rank_max(self.method, seq_length=DEFAULT_SEQ_LENGTH_MAX)

    @property
    def learning_rate_min(self) -> float:
        return LEARNING_RATE_MIN[self.method]


def _of_base(seq_length: int, info: ValidationInfo[_Tuning]) -> int:
    longest = info.context.training.seq_length_max(info.context.method)
    if seq_length > longest:
        raise refused(f"{{path}} is at most {longest:,} for {info.context}.")
    return seq_length


def _up_to_rank_max(rank: int, info: ValidationInfo[_Tuning]) -> int:
    if not 1 <= rank <= info.context.rank_max:
        raise ValueError
    return rank


def _from_learning_rate_min(rate: float, info: ValidationInfo[_Tuning]) -> float:
    if rate < info.context.learning_rate_min:
        raise ValueError
    return rate


def _auto(default: float) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value == "auto" else value)


class _HyperparametersBody(Body):
    n_epochs: Annotated[
        int,
        Field(ge=1, le=EPOCHS_MAX),
        _auto(EPOCHS_DEFAULT),
        said(f'{{path}} must be an integer from 1 to {EPOCHS_MAX}, or "auto".'),
    ] = EPOCHS_DEFAULT
    batch_size: Annotated[
        int,
        Field(ge=1, le=BATCH_SIZE_MAX),
        _auto(BATCH_SIZE_DEFAULT),
        said(f'{{path}} must be an integer from 1 to {BATCH_SIZE_MAX}, or "auto".'),
    ] = BATCH_SIZE_DEFAULT
    learning_rate_multiplier: Annotated[
        float,
        Field(ge=MULTIPLIER_MIN, le=MULTIPLIER_MAX),
        _auto(MULTIPLIER_DEFAULT),
        said(
            f'{{path}} must be a number from {MULTIPLIER_MIN:g} to {MULTIPLIER_MAX:g}, or "auto".'
        ),
    ] = MULTIPLIER_DEFAULT
    learning_rate: (
        Annotated[
            float,
            Field(le=LEARNING_RATE_MAX),
            AfterValidator(_from_learning_rate_min),
            said(
                lambda tuning: (
                    f"{{path}} must be a number from {tuning.learning_rate_min:g} to "
                    f"{LEARNING_RATE_MAX:g}."
                )
            ),
        ]
        | None
    ) = None
    lora_rank: (
        Annotated[
            int,
            AfterValidator(_up_to_rank_max),
            said(
                lambda tuning: (
                    f"{{path}} must be an integer from 1 to {tuning.rank_max} for {tuning}."
                )
            ),
        ]
        | None
    ) = None
    lora_alpha: Annotated[
        int,
        Field(ge=1, le=ALPHA_MAX),
        said(f"{{path}} must be an integer from 1 to {ALPHA_MAX}."),
    ] = ALPHA_DEFAULT
    max_seq_length: Annotated[
        int,
        Field(ge=SEQ_LENGTH_MIN, le=SEQ_LENGTH_MAX),
        said(f"{{path}} must be an integer from {SEQ_LENGTH_MIN} to {SEQ_LENGTH_MAX:,}."),
        AfterValidator(_of_base),
    ] = SEQ_LENGTH_DEFAULT
    beta: (
        Annotated[
            float,
            Field(gt=0, le=BETA_MAX),
            _auto(BETA_DEFAULT),
            said(f'{{path}} must be a number over 0 and at most {BETA_MAX:g}, or "auto".'),
        ]
        | None
    ) = None


def parse_hyperparameters(
    given: dict[str, Any], *, base: BaseModel, training: FineTuning, method: TrainingMethod
) -> Hyperparameters:
    """Reads a hyperparameters object. Raises InvalidRequest naming the field."""
    if method != "dpo" and given.get("beta") is not None:
        raise InvalidRequest("beta is a hyperparameter of DPO alone.", param="beta")
    names = [n for n in _HyperparametersBody.model_fields if n != "beta" or method == "dpo"]
    tuning = _Tuning(base=base, training=training, method=method)
    hint = f". Hyperparameters are {', '.join(names)}."
    read = read_body(_HyperparametersBody, given, hint=hint, context=tuning)
    rate, multiplier = _learning_rate(read, method)
    return Hyperparameters(
        n_epochs=read.n_epochs,
        batch_size=read.batch_size,
        learning_rate=rate,
        learning_rate_multiplier=multiplier,
        lora_rank=_rank(read, tuning),
        lora_alpha=read.lora_alpha,
        max_seq_length=read.max_seq_length,
        beta=exact(BETA_DEFAULT if read.beta is None else read.beta) if method == "dpo" else None,
    )


def _rank(read: _HyperparametersBody, tuning: _Tuning) -> int:
    allowed = tuning.training.rank_max(tuning.method, seq_length=read.max_seq_length)
    if read.lora_rank is None:
        return min(RANK_DEFAULT, allowed)
    if read.lora_rank > allowed:
        raise InvalidRequest(
            f"Above max_seq_length {DEFAULT_SEQ_LENGTH_MAX:,}, use lora_rank "
            f"{LONG_CONTEXT_RANK_MAX} or lower.",
            param="lora_rank",
        )
    return read.lora_rank


def _learning_rate(read: _HyperparametersBody, method: TrainingMethod) -> tuple[Decimal, Decimal]:
    """The rate, and it as a multiple of the method's. Both as decimals: 0.0002 times 1.1 is
    0.00022."""
    of_method = exact(LEARNING_RATE_BASE[method])
    if read.learning_rate is None:
        multiplier = exact(read.learning_rate_multiplier)
        return exact(float(of_method * multiplier)), multiplier
    if "learning_rate_multiplier" in read.model_fields_set:
        raise InvalidRequest(
            "Give learning_rate or learning_rate_multiplier, one or the other.",
            param="learning_rate_multiplier",
        )
    multiple = round(read.learning_rate / float(of_method), 12)
    return exact(read.learning_rate), exact(multiple)
