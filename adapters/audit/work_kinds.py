"""What the audit knows of each kind of work, on purpose apart from `domain/work/kinds.py`: a charge
that the product books or prices wrongly must differ here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from domain.ledger.prices import PriceList
from domain.log.aggregate import Aggregate
from domain.work.batch import Batch
from domain.work.fine_tuning_job import FineTuningJob

ReceiptLine = tuple[str, str, int, int]
"""(what, model, tokens, rate)."""


@dataclass(frozen=True, slots=True)
class AuditedKind:
    """`started` are the statuses in which work has started and not ended."""

    prefix: str
    aggregate: type[Aggregate]
    income: str
    started: tuple[str, ...]
    measured: Callable[[Any, PriceList], list[ReceiptLine]]
    """The lines that the receipt must have."""
    minimum: Callable[[PriceList, str], int]
    """By the base of the receipt."""


def _of_batch(batch: Batch, prices: PriceList) -> list[ReceiptLine]:
    lines: list[ReceiptLine] = []
    for used in batch.usage():
        rates = prices.of(used.model)
        lines += [
            ("input", used.model, used.input_tokens, rates.input_nano_usd_per_mtok),
            ("output", used.model, used.output_tokens, rates.output_nano_usd_per_mtok),
        ]
    return lines


def _of_training(job: FineTuningJob, prices: PriceList) -> list[ReceiptLine]:
    base, method = job.settings.base, job.settings.method
    return [("training", base, job.trained_tokens, prices.of(base).trained_rate(method))]


AUDITED: dict[str, AuditedKind] = {
    "batch_": AuditedKind(
        prefix="batch_",
        aggregate=Batch,
        income="Income:Usage:Batch",
        started=("in_progress", "finalizing"),
        measured=_of_batch,
        minimum=lambda prices, base: prices.of(base).minimum_per_batch_nano_usd,
    ),
    "ftjob-": AuditedKind(
        prefix="ftjob-",
        aggregate=FineTuningJob,
        income="Income:Usage:Training",
        started=("queued", "running"),
        measured=_of_training,
        minimum=lambda prices, base: prices.of(base).minimum_per_job_nano_usd,
    ),
}


def audited_kind(work_id: str) -> AuditedKind | None:
    """The kind of an id, or None for an id that is of no work."""
    return next((kind for prefix, kind in AUDITED.items() if work_id.startswith(prefix)), None)
