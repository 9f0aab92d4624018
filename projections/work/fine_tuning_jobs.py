"""Fine-tuning jobs as the API shows them. Metadata and suffix are personal and joined from
`work_texts`; the job's events are in `fine_tuning_events.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from psycopg.types.json import Jsonb

from domain.ledger.receipt import FaultSide, Receipt
from domain.log.stored import number
from domain.work.fine_tuning_job import (
    JobSettings,
    JobStatus,
    TrainingResult,
    WaitingFor,
)
from projections.paging import Page, bounds, page
from projections.projection import Statement
from projections.read_model import Connection, ReadModel

DELETED = "The model was deleted: it cannot be named in a batch, listed or downloaded any more."
DOWNLOAD_ONLY = "Fine-tunes of this base are download-only for now and cannot run in a batch."

REASONS: dict[str, str] = {
    "account_capacity": "Account capacity: another job of your account has to end first. This job "
    "starts by itself; do not submit it again.",
    "customer_credit": "Customer credit: your open work holds the credit that this needs. It is "
    "looked at again whenever your credit changes; do not submit it again.",
    "gridline_capacity": "Gridline capacity: no GPU is free. Wait; adding credit or submitting it "
    "again does not help.",
    "platform_budget": "Platform daily limit: wait; the budget resets at 00:00 UTC.",
}
"""What `gridline.reason` says for each cause of waiting (fine-tuning page, "The job")."""

_CREATED = """
    INSERT INTO fine_tuning_jobs
        (id, account_id, key_id, position, status, created_at, waiting_until, training_file_id,
         validation_file_id, settings)
    VALUES
        (%(id)s, %(account_id)s, %(key_id)s, %(position)s, 'validating_files', %(at)s,
         %(waiting_until)s, %(training_file_id)s, %(validation_file_id)s, %(settings)s)
"""
_WAITING = "UPDATE fine_tuning_jobs SET waiting_for = %(waiting_for)s WHERE id = %(id)s"
_QUEUED = "UPDATE fine_tuning_jobs SET status = 'queued', waiting_for = NULL WHERE id = %(id)s"
_STARTED = """
    UPDATE fine_tuning_jobs SET status = 'running', started_at = %(at)s, waiting_for = NULL
    WHERE id = %(id)s
"""
_PROGRESSED = """
    UPDATE fine_tuning_jobs SET step = %(step)s, steps = %(steps)s,
        progress_tokens = %(trained_tokens)s,
        train_loss = coalesce(%(train_loss)s, train_loss),
        eval_loss_before = coalesce(%(eval_loss_before)s, eval_loss_before)
    WHERE id = %(id)s
"""
_SUCCEEDED = """
    UPDATE fine_tuning_jobs SET status = 'succeeded', finished_at = %(at)s, model = %(model)s,
        trained_tokens = %(trained_tokens)s, result = %(result)s, receipt = %(receipt)s,
        step = %(steps)s, steps = %(steps)s, progress_tokens = %(trained_tokens)s,
        train_loss = %(train_loss)s,
        eval_loss_before = coalesce(%(eval_loss_before)s, eval_loss_before)
    WHERE id = %(id)s
"""
_FAILED = """
    UPDATE fine_tuning_jobs SET status = 'failed', finished_at = %(at)s, waiting_for = NULL,
        trained_tokens = %(trained_tokens)s, error_code = %(code)s, error_message = %(message)s,
        fault_side = %(side)s, receipt = %(receipt)s
    WHERE id = %(id)s
"""
_CANCELLED = """
    UPDATE fine_tuning_jobs SET status = 'cancelled', finished_at = %(at)s, waiting_for = NULL,
        trained_tokens = %(trained_tokens)s
    WHERE id = %(id)s
"""

_COLUMNS = """
    SELECT j.id, j.account_id, j.key_id, j.status, j.created_at, j.started_at, j.finished_at,
           j.waiting_until, j.settings, j.waiting_for, j.step, j.steps, j.progress_tokens,
           j.trained_tokens, j.train_loss, j.eval_loss_before, j.error_code, j.error_message,
           j.fault_side, j.model, j.result, j.receipt, t.metadata, t.suffix,
           m.deleted_at IS NOT NULL AS model_deleted
    FROM fine_tuning_jobs j LEFT JOIN work_texts t ON t.work_id = j.id
         LEFT JOIN models m ON m.id = j.model
"""
_GET = _COLUMNS + "WHERE j.id = %(id)s AND j.account_id = %(account_id)s"
_LIST = (
    _COLUMNS
    + """
    WHERE j.account_id = %(account_id)s AND j.position > %(above)s AND j.position < %(below)s
      AND (%(metadata)s::jsonb IS NULL OR t.metadata @> %(metadata)s::jsonb)
      AND (NOT %(without_metadata)s::boolean OR t.metadata IS NULL)
    ORDER BY j.position DESC LIMIT %(limit)s
"""
)
_POSITION = """
    SELECT position FROM fine_tuning_jobs WHERE id = %(after)s AND account_id = %(account_id)s
"""


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job. `trained_tokens` is null until it has ended; `progress_tokens` counts meanwhile.
    `model` is the adapter's name, servable or not; `result` and `receipt` are null but for jobs
    that have them."""

    id: str
    account_id: str
    key_id: str
    status: JobStatus
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    waiting_until: datetime
    settings: JobSettings
    waiting_for: WaitingFor | None
    step: int
    steps: int | None
    progress_tokens: int
    trained_tokens: int | None
    train_loss: float | None
    eval_loss_before: float | None
    error_code: str | None
    error_message: str | None
    fault_side: FaultSide | None
    model: str | None
    result: TrainingResult | None
    receipt: Receipt | None
    metadata: dict[str, str] | None
    suffix: str | None
    model_deleted: bool

    @property
    def estimated_finish(self) -> datetime:
        """The time of creation plus the quote's estimate."""
        return self.created_at + timedelta(seconds=self.settings.quote.estimated_seconds)

    @property
    def fine_tuned_model(self) -> str | None:
        """The model that batches can name; null for a download-only base, and once deleted."""
        return self.model if self.is_servable else None

    @property
    def is_servable(self) -> bool:
        """Whether batches can name the adapter."""
        return self.settings.servable and not self.model_deleted

    @property
    def not_servable_because(self) -> str | None:
        """Why the adapter cannot be named in a batch; null when it can."""
        if self.model_deleted:
            return DELETED
        return None if self.settings.servable else DOWNLOAD_ONLY

    @property
    def reason(self) -> str | None:
        """What the job waits for and what to do about it; null when it does not wait."""
        return REASONS[self.waiting_for] if self.waiting_for is not None else None

    @property
    def eval_source(self) -> Literal["validation_file", "holdout"]:
        """Where the rows of the eval losses come from."""
        return eval_source_of(self.settings)


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A succeeded job's one checkpoint; unknown metrics are absent."""

    id: str
    created_at: datetime
    job_id: str
    model: str
    step_number: int
    metrics: dict[str, float]


def get(connection: Connection, *, account_id: str, job_id: str) -> JobRow | None:
    """The job, or None if the account has none of that id."""
    row = connection.execute(_GET, {"id": job_id, "account_id": account_id}).fetchone()
    return _row(row) if row is not None else None


def list_page(
    connection: Connection,
    *,
    account_id: str,
    limit: int,
    after: str | None = None,
    metadata: dict[str, str] | None = None,
    without_metadata: bool = False,
) -> Page[JobRow]:
    """A page of the account's jobs, newest first: those with all these pairs of metadata, or those
    that have none. Raises InvalidRequest for `after`."""
    scope = {"account_id": account_id}
    between = bounds(connection, select_position=_POSITION, scope=scope, after=after)
    parameters = {
        **scope,
        **between,
        "limit": limit + 1,
        "metadata": Jsonb(metadata) if metadata else None,
        "without_metadata": without_metadata,
    }
    rows = connection.execute(_LIST, parameters).fetchall()
    return page([_row(row) for row in rows], limit=limit)


def checkpoints(job: JobRow) -> tuple[CheckpointRow, ...]:
    """The last step's adapter of a succeeded job, or nothing."""
    if job.result is None or job.model is None or job.finished_at is None:
        return ()
    result = job.result
    known = {
        "step": Decimal(result.steps),
        "train_loss": result.train_loss,
        "train_mean_token_accuracy": result.train_accuracy,
        "full_valid_loss": result.eval_loss,
        "full_valid_mean_token_accuracy": result.eval_accuracy,
    }
    checkpoint = CheckpointRow(
        id="ftckpt_" + hashlib.sha256(f"{job.id}/{result.steps}".encode()).hexdigest()[:32],
        created_at=job.finished_at,
        job_id=job.id,
        model=job.model,
        step_number=result.steps,
        metrics={name: float(value) for name, value in known.items() if value is not None},
    )
    return (checkpoint,)


def eval_source_of(settings: JobSettings) -> Literal["validation_file", "holdout"]:
    """Which rows the losses before and after are measured on."""
    return "validation_file" if settings.validation is not None else "holdout"


def _row(row: dict[str, Any]) -> JobRow:
    result, receipt = row["result"], row["receipt"]
    return JobRow(
        **{
            **row,
            "settings": JobSettings.model_validate(row["settings"]),
            "result": TrainingResult.model_validate(result) if result is not None else None,
            "receipt": Receipt.model_validate(receipt) if receipt is not None else None,
        }
    )


def _jsonb(value: Any) -> Jsonb | None:
    return Jsonb(value.model_dump(mode="json")) if value is not None else None


def _created(event: Any, position: int) -> list[Statement]:
    settings: JobSettings = event.settings
    parameters = {
        "id": event.originator_id,
        "account_id": event.account_id,
        "key_id": event.key_id,
        "position": position,
        "at": event.envelope.at,
        "waiting_until": event.waiting_until,
        "training_file_id": settings.training.file_id,
        "validation_file_id": settings.validation.file_id if settings.validation else None,
        "settings": _jsonb(settings),
    }
    return [(_CREATED, parameters)]


def _waiting(event: Any, _position: int) -> list[Statement]:
    return [(_WAITING, {"id": event.originator_id, "waiting_for": event.waiting_for})]


def _queued(event: Any, _position: int) -> list[Statement]:
    return [(_QUEUED, {"id": event.originator_id})]


def _started(event: Any, _position: int) -> list[Statement]:
    return [(_STARTED, {"id": event.originator_id, "at": event.envelope.at})]


def _progressed(event: Any, _position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "step": event.step,
        "steps": event.steps,
        "trained_tokens": event.trained_tokens,
        "train_loss": number(event.train_loss),
        "eval_loss_before": number(event.eval_loss_before),
    }
    return [(_PROGRESSED, parameters)]


def _succeeded(event: Any, _position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "at": event.envelope.at,
        "model": event.model,
        "trained_tokens": event.result.trained_tokens,
        "steps": event.result.steps,
        "train_loss": number(event.result.train_loss),
        "eval_loss_before": number(event.result.eval_loss_before),
        "result": _jsonb(event.result),
        "receipt": _jsonb(event.receipt),
    }
    return [(_SUCCEEDED, parameters)]


def _failed(event: Any, _position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "at": event.envelope.at,
        "trained_tokens": event.trained_tokens,
        "code": event.code,
        "message": event.message,
        "side": event.side,
        "receipt": _jsonb(event.receipt),
    }
    return [(_FAILED, parameters)]


def _cancelled(event: Any, _position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "at": event.envelope.at,
        "trained_tokens": event.trained_tokens,
    }
    return [(_CANCELLED, parameters)]


FINE_TUNING_JOBS = ReadModel(
    name="fine_tuning_jobs",
    tables=("fine_tuning_jobs",),
    handlers={
        "gridline.fine_tuning_job.created": _created,
        "gridline.fine_tuning_job.waiting": _waiting,
        "gridline.fine_tuning_job.queued": _queued,
        "gridline.fine_tuning_job.started": _started,
        "gridline.fine_tuning_job.progressed": _progressed,
        "gridline.fine_tuning_job.succeeded": _succeeded,
        "gridline.fine_tuning_job.failed": _failed,
        "gridline.fine_tuning_job.cancelled": _cancelled,
    },
)
