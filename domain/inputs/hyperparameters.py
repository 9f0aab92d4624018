"""The hyperparameters of a job: ranges, defaults, and what "auto" means.

Called by `create_bodies`. A refusal names the field and its range in `param` and message. A boolean
is no number, a string of digits neither.
"""

from __future__ import annotations

from typing import Any

from domain.catalog import (
    DEFAULT_SEQ_LENGTH_MAX,
    LONG_CONTEXT_RANK_MAX,
    BaseModel,
    FineTuning,
    TrainingMethod,
)
from domain.errors import InvalidRequest
from domain.stored import Exact, StoredModel, exact

EPOCHS_DEFAULT, EPOCHS_MAX = 1, 10
BATCH_SIZE_DEFAULT, BATCH_SIZE_MAX = 8, 64
MULTIPLIER_DEFAULT, MULTIPLIER_MIN, MULTIPLIER_MAX = 1.0, 0.01, 10.0
RANK_DEFAULT = 16
ALPHA_DEFAULT, ALPHA_MAX = 32, 256
SEQ_LENGTH_DEFAULT, SEQ_LENGTH_MIN = 2_048, 128
BETA_DEFAULT, BETA_MAX = 0.1, 2.0
LEARNING_RATE_MAX = 0.01
LEARNING_RATE_BASE: dict[TrainingMethod, float] = {"supervised": 2e-4, "dpo": 5e-6}
LEARNING_RATE_MIN: dict[TrainingMethod, float] = {"supervised": 1e-6, "dpo": 5e-8}

_NAMES = (
    "n_epochs",
    "batch_size",
    "learning_rate_multiplier",
    "learning_rate",
    "lora_rank",
    "lora_alpha",
    "max_seq_length",
)


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


def parse_hyperparameters(
    given: dict[str, Any], *, base: BaseModel, training: FineTuning, method: TrainingMethod
) -> Hyperparameters:
    """Reads a hyperparameters object; null is absent. Raises InvalidRequest naming the field."""
    values = {name: value for name, value in given.items() if value is not None}
    names = (*_NAMES, "beta") if method == "dpo" else _NAMES
    for name in values:
        if name == "beta" and name not in names:
            raise InvalidRequest("beta is a hyperparameter of DPO alone.", param="beta")
        if name not in names:
            raise InvalidRequest(
                f"Unsupported parameter: {name}. Hyperparameters are {', '.join(names)}.",
                param=name,
            )
    seq_length = _seq_length(values, base=base, training=training, method=method)
    rank = _rank(values, base=base, training=training, method=method, seq_length=seq_length)
    learning_rate, multiplier = _learning_rate(values, method=method)
    return Hyperparameters(
        n_epochs=_auto_integer(values, "n_epochs", EPOCHS_DEFAULT, maximum=EPOCHS_MAX),
        batch_size=_auto_integer(values, "batch_size", BATCH_SIZE_DEFAULT, maximum=BATCH_SIZE_MAX),
        learning_rate=exact(learning_rate),
        learning_rate_multiplier=exact(multiplier),
        lora_rank=rank,
        lora_alpha=_integer(values, "lora_alpha", ALPHA_DEFAULT, minimum=1, maximum=ALPHA_MAX),
        max_seq_length=seq_length,
        beta=exact(_beta(values)) if method == "dpo" else None,
    )


def _seq_length(
    values: dict[str, Any], *, base: BaseModel, training: FineTuning, method: TrainingMethod
) -> int:
    longest = training.seq_length_max(method)
    wanted = _integer(
        values, "max_seq_length", SEQ_LENGTH_DEFAULT, minimum=SEQ_LENGTH_MIN, maximum=8_192
    )
    if wanted > longest:
        raise InvalidRequest(
            f"max_seq_length is at most {longest:,} for {method} tuning of {base.id}.",
            param="max_seq_length",
        )
    return wanted


def _rank(
    values: dict[str, Any],
    *,
    base: BaseModel,
    training: FineTuning,
    method: TrainingMethod,
    seq_length: int,
) -> int:
    of_method = training.rank_max(method, seq_length=SEQ_LENGTH_DEFAULT)
    allowed = training.rank_max(method, seq_length=seq_length)
    wanted = values.get("lora_rank", min(RANK_DEFAULT, allowed))
    if not _is_integer(wanted) or not 1 <= wanted <= of_method:
        raise InvalidRequest(
            f"lora_rank must be an integer from 1 to {of_method} for {method} tuning of {base.id}.",
            param="lora_rank",
        )
    if wanted > allowed:
        raise InvalidRequest(
            f"Above max_seq_length {DEFAULT_SEQ_LENGTH_MAX:,}, use lora_rank "
            f"{LONG_CONTEXT_RANK_MAX} or lower.",
            param="lora_rank",
        )
    return int(wanted)


def _learning_rate(values: dict[str, Any], *, method: TrainingMethod) -> tuple[float, float]:
    """The rate, and it as a multiple of the method's base rate."""
    base_rate = LEARNING_RATE_BASE[method]
    multiplier = values.get("learning_rate_multiplier", "auto")
    if "learning_rate" in values:
        if "learning_rate_multiplier" in values:
            raise InvalidRequest(
                "Give learning_rate or learning_rate_multiplier, one or the other.",
                param="learning_rate_multiplier",
            )
        rate, lowest = values["learning_rate"], LEARNING_RATE_MIN[method]
        if not _is_number(rate) or not lowest <= rate <= LEARNING_RATE_MAX:
            raise InvalidRequest(
                f"learning_rate must be a number from {lowest:g} to {LEARNING_RATE_MAX:g}.",
                param="learning_rate",
            )
        return float(rate), round(rate / base_rate, 12)
    if multiplier == "auto":
        return base_rate, MULTIPLIER_DEFAULT
    if not _is_number(multiplier) or not MULTIPLIER_MIN <= multiplier <= MULTIPLIER_MAX:
        raise InvalidRequest(
            f"learning_rate_multiplier must be a number from {MULTIPLIER_MIN:g} to "
            f'{MULTIPLIER_MAX:g}, or "auto".',
            param="learning_rate_multiplier",
        )
    # As decimals: 0.0002 times 1.1 is 0.00022.
    return float(exact(base_rate) * exact(multiplier)), float(multiplier)


def _beta(values: dict[str, Any]) -> float:
    beta = values.get("beta", "auto")
    if beta == "auto":
        return BETA_DEFAULT
    if not _is_number(beta) or not 0 < beta <= BETA_MAX:
        raise InvalidRequest(
            f'beta must be a number over 0 and at most {BETA_MAX:g}, or "auto".', param="beta"
        )
    return float(beta)


def _auto_integer(values: dict[str, Any], name: str, default: int, *, maximum: int) -> int:
    value = values.get(name, "auto")
    if value == "auto":
        return default
    if not _is_integer(value) or not 1 <= value <= maximum:
        raise InvalidRequest(
            f'{name} must be an integer from 1 to {maximum}, or "auto".', param=name
        )
    return int(value)


def _integer(values: dict[str, Any], name: str, default: int, *, minimum: int, maximum: int) -> int:
    value = values.get(name, default)
    if not _is_integer(value) or not minimum <= value <= maximum:
        raise InvalidRequest(
            f"{name} must be an integer from {minimum} to {maximum:,}.", param=name
        )
    return int(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
