"""The published prices as a value, and what work is charged for at them.

The price book publishes a list; quotes, holds and receipts pin its version. Amounts are nano-USD,
rates nano-USD per million tokens. The file has decimal strings of USD; a number there is refused,
because a binary fraction is no price.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from domain.catalog import CATALOG, TrainingMethod, base_of_fine_tuned
from domain.errors import InvalidRequest
from domain.ledger import money
from domain.ledger.receipt import ReceiptLine
from domain.limits import MINIMUM_FROM_PERCENT
from domain.log.stored import TokenUsage

_LIST_FIELDS = {
    "training_usd_per_mtok": "training_nano_usd_per_mtok",
    "dpo_usd_per_mtok": "dpo_nano_usd_per_mtok",
    "input_usd_per_mtok": "input_nano_usd_per_mtok",
    "output_usd_per_mtok": "output_nano_usd_per_mtok",
    "minimum_per_job_usd": "minimum_per_job_nano_usd",
    "minimum_per_batch_usd": "minimum_per_batch_nano_usd",
}


NEW_LIST = "new price list"
"""The validation context of a list that is about to be published."""


def _exact_nano_usd(value: object) -> object:
    if not isinstance(value, str):
        return value
    return money.nano_usd(value)


NanoUsd = Annotated[int, BeforeValidator(_exact_nano_usd), Field(ge=0, strict=True)]


class ModelPrices(BaseModel):
    """The prices of one base; a rate that a base has no use for is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    training_nano_usd_per_mtok: NanoUsd | None = None
    dpo_nano_usd_per_mtok: NanoUsd | None = None
    input_nano_usd_per_mtok: NanoUsd
    output_nano_usd_per_mtok: NanoUsd = 0
    minimum_per_job_nano_usd: NanoUsd = 0
    minimum_per_batch_nano_usd: NanoUsd

    @model_validator(mode="before")
    @classmethod
    def _read_list_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {_LIST_FIELDS.get(name, name): value for name, value in data.items()}

    def trained_rate(self, method: TrainingMethod) -> int:
        """Nano-USD per 1M trained tokens. Raises InvalidRequest for a base without training."""
        rate = self.dpo_nano_usd_per_mtok if method == "dpo" else self.training_nano_usd_per_mtok
        if rate is None:
            raise InvalidRequest("This base model has no price for this method.", param="method")
        return rate


class PriceList(BaseModel):
    """One published version of all prices. `machine_hour_usd` is by GPU memory class in GB, or
    `cpu`, and serves the estimate of a quote alone: no charge is made of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(ge=1, strict=True)
    effective_from: datetime
    machine_hour_usd: dict[str, NanoUsd]
    models: dict[str, ModelPrices]

    @model_validator(mode="after")
    def _names_every_base(self, info: ValidationInfo) -> Self:
        """Asked of a new list alone: one in the log may be older than a base of the catalog."""
        if info.context is not NEW_LIST:
            return self
        missing = sorted(CATALOG.keys() - self.models.keys())
        if missing:
            raise ValueError(f"no prices for {', '.join(missing)}")
        untrainable = [
            name
            for name, base in CATALOG.items()
            if base.fine_tuning and self.models[name].training_nano_usd_per_mtok is None
        ]
        if untrainable:
            raise ValueError(f"no training price for {', '.join(untrainable)}")
        return self

    @classmethod
    def from_json(cls, text: str | bytes) -> PriceList:
        """Reads a price file. Raises pydantic.ValidationError naming the field, or the base that it
        leaves out."""
        return cls.model_validate_json(text, context=NEW_LIST)

    def of(self, model: str) -> ModelPrices:
        """The prices of a base, or of an `ft:` model, which are those of its base. Raises
        InvalidRequest for one that the list leaves out, as a list does that is older than a base of
        the catalog."""
        base = base_of_fine_tuned(model) or model
        if base not in self.models:
            raise InvalidRequest(
                f"{base} has no published price yet, so no work can be made on it. Name another "
                "base model, or ask the operator to publish its price.",
                param="model",
            )
        return self.models[base]

    def machine_hour_nano_usd(self, memory_class_gb: int | None) -> int:
        """What an hour of the machine of a class is estimated at; None is a CPU. Raises
        InvalidRequest for a class that the list leaves out."""
        machine = "cpu" if memory_class_gb is None else str(memory_class_gb)
        if machine not in self.machine_hour_usd:
            raise InvalidRequest(
                "The machine that this job needs has no published price yet, so the job cannot be "
                "quoted. Name another base model, or ask the operator to publish it.",
                param="model",
            )
        return self.machine_hour_usd[machine]

    def to_wire(self) -> dict[str, Any]:
        """What GET /gridline/prices answers: decimal strings of USD, exact."""
        wire_names = {ours: wire for wire, ours in _LIST_FIELDS.items()}
        return {
            "object": "gridline.prices",
            "version": self.version,
            "effective_from": int(self.effective_from.timestamp()),
            "currency": "usd",
            "models": {
                name: {
                    wire_names[field]: None if amount is None else money.usd_text(amount)
                    for field, amount in prices
                }
                for name, prices in self.models.items()
            },
            "rules": RULES,
        }


RULES = (
    "A charge is the sum of tokens times rate, rounded up once to a billionth of a dollar.",
    "A fine-tuning job that succeeds is charged its trained tokens, at least the minimum per job "
    "and never more than its quote. One that fails for a cause on your side after training started "
    "is charged its trained tokens without the minimum. Any other is not charged.",
    "A batch that completes is charged the tokens its lines used, at least the minimum per batch "
    "once any line succeeded. One that is cancelled is charged what finished, with the minimum "
    f"only if at least {MINIMUM_FROM_PERCENT} % of its lines succeeded; one that expires what "
    "finished, without the minimum. A batch that fails validation, or has no successful line, is "
    "not charged.",
)


def training_lines(
    *, prices: PriceList, base: str, method: TrainingMethod, trained_tokens: int
) -> tuple[ReceiptLine, ...]:
    """What a training is charged for: its trained tokens, all epochs. Raises InvalidRequest for a
    base without training."""
    rate = prices.of(base).trained_rate(method)
    line = ReceiptLine(
        what="training", model=base, tokens=trained_tokens, rate_nano_usd_per_mtok=rate
    )
    return (line,)


def batch_lines(*, prices: PriceList, usage: Iterable[TokenUsage]) -> tuple[ReceiptLine, ...]:
    """What a batch is charged for: the input and output tokens of each model name."""
    lines: list[ReceiptLine] = []
    for used in usage:
        rates = prices.of(used.model)
        lines.append(
            ReceiptLine(
                what="input",
                model=used.model,
                tokens=used.input_tokens,
                rate_nano_usd_per_mtok=rates.input_nano_usd_per_mtok,
            )
        )
        lines.append(
            ReceiptLine(
                what="output",
                model=used.model,
                tokens=used.output_tokens,
                rate_nano_usd_per_mtok=rates.output_nano_usd_per_mtok,
            )
        )
    return tuple(lines)
