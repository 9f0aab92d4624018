"""Receipts: all that explains the charge of a job or batch, read from the rows of both and of its
hold (GET /gridline/receipts/{id}). No table of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from domain.ids import BATCH, JOB
from domain.ledger.receipt import Receipt
from domain.work.kinds import find_kind, kind_of
from domain.work.quote import BatchQuote, FineTuneQuote
from projections.money import holds
from projections.money.holds import HoldRow
from projections.read_model import Connection
from projections.work import batches, fine_tuning_jobs


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """Why a job or batch was charged what it was. `receipt` is null where nothing was charged,
    `hold` where it never started, `quote` before a batch is validated, `ended_at` while it is
    open."""

    work_id: str
    kind: str
    account_id: str
    key_id: str
    status: str
    created_at: datetime
    ended_at: datetime | None
    price_version: int
    maximum_nano_usd: int | None
    quote: FineTuneQuote | BatchQuote | None
    hold: HoldRow | None
    receipt: Receipt | None


def find(connection: Connection, *, account_id: str, work_id: str) -> ReceiptRow | None:
    """The account's receipt of a job or batch, or None if it has none of that id."""
    kind = find_kind(work_id)
    return None if kind is None else READERS[kind.prefix](connection, account_id, work_id)


def _of_batch(connection: Connection, account_id: str, batch_id: str) -> ReceiptRow | None:
    batch = batches.get(connection, account_id=account_id, batch_id=batch_id)
    if batch is None:
        return None
    return ReceiptRow(
        work_id=batch.id,
        kind=kind_of(batch.id).name,
        account_id=account_id,
        key_id=batch.key_id,
        status=batch.status,
        created_at=batch.created_at,
        ended_at=(batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at),
        price_version=batch.price_version,
        maximum_nano_usd=batch.maximum_nano_usd,
        quote=batch.quote,
        hold=holds.of_work(connection, account_id=account_id, work_id=batch_id),
        receipt=batch.receipt,
    )


def _of_job(connection: Connection, account_id: str, job_id: str) -> ReceiptRow | None:
    job = fine_tuning_jobs.get(connection, account_id=account_id, job_id=job_id)
    if job is None:
        return None
    return ReceiptRow(
        work_id=job.id,
        kind=kind_of(job.id).name,
        account_id=account_id,
        key_id=job.key_id,
        status=job.status,
        created_at=job.created_at,
        ended_at=job.finished_at,
        price_version=job.settings.quote.price_version,
        maximum_nano_usd=job.settings.quote.maximum_nano_usd,
        quote=job.settings.quote,
        hold=holds.of_work(connection, account_id=account_id, work_id=job_id),
        receipt=job.receipt,
    )


READERS: dict[str, Callable[[Connection, str, str], ReceiptRow | None]] = {
    BATCH: _of_batch,
    JOB: _of_job,
}
"""By the prefix of the ids of each kind of work (`domain/work/kinds.py`)."""
