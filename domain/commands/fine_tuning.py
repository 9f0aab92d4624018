"""A fine-tuning job's commands from its start to its end; creating one is in
`create_fine_tuning_job.py`, what runners report in `attempts/trainings.py`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from domain import ids
from domain.assets.file import File
from domain.assets.fine_tuned_model import FineTunedModel
from domain.commands.files import name_row
from domain.commands.idempotency import forget
from domain.commands.ownership import job_of
from domain.commands.settlement import HoldTerms, capture_hold, place_hold, release_hold
from domain.ledger.account import Account
from domain.ledger.price_book import PriceBook
from domain.ledger.prices import training_lines
from domain.ledger.receipt import End, Receipt, Terms, settle
from domain.limits import FILE_KEPT_SECONDS, HOLD_MARGIN_SECONDS, WAITING_SECONDS_MAX
from domain.log.unit_of_work import UnitOfWork
from domain.work.fine_tuning_job import STARTS_MAX, FineTuningJob, TrainingResult
from domain.work.job_errors import side_of

WAITING_LIMIT = timedelta(seconds=WAITING_SECONDS_MAX)
"""For the account's slot and credit, and then again for a GPU."""
HOLD_MARGIN = timedelta(seconds=HOLD_MARGIN_SECONDS)


def start_fine_tuning_job(uow: UnitOfWork, job_id: str) -> None:
    """Takes the account's one training slot and holds the credit; or waits; or fails with
    `job_unavailable` or `insufficient_quota`. Nothing has run."""
    job = uow.get(FineTuningJob, job_id)
    if job.status != "validating_files":
        return
    if uow.now >= job.waiting_until:
        end_failed(
            uow,
            job,
            code="job_unavailable",
            message="No capacity for your account became free within 24 hours. Nothing ran.",
        )
        return
    account = uow.get(Account, job.account_id)
    if account.training_job_id is not None:
        job.wait("account_capacity", envelope=uow.envelope)
        return
    run_limit = timedelta(seconds=job.settings.time_limit_seconds)
    funding = place_hold(
        uow,
        HoldTerms(
            work_id=job.id,
            account_id=job.account_id,
            key_id=job.key_id,
            maximum_nano_usd=job.settings.quote.maximum_nano_usd,
            price_version=job.settings.quote.price_version,
            expires_at=uow.now + WAITING_LIMIT + run_limit + HOLD_MARGIN,
        ),
    )
    if funding == "held":
        account.take_training_slot(job.id, envelope=uow.envelope)
        job.start(envelope=uow.envelope)
    elif funding == "wait":
        job.wait("customer_credit", envelope=uow.envelope)
    else:
        end_failed(
            uow,
            job,
            code="insufficient_quota",
            message="Not enough credit to start the job. Nothing ran. Add credit and create it "
            "again.",
        )


@dataclass(frozen=True, slots=True)
class CancelFineTuningJob:
    account_id: str
    job_id: str


def cancel_fine_tuning_job(uow: UnitOfWork, command: CancelFineTuningJob) -> None:
    """Ends the job at once; nothing is charged. Raises NotFound or InvalidState."""
    job = job_of(uow, command.account_id, command.job_id)
    job.cancel(envelope=uow.envelope)
    forget(uow, job.id)
    release_hold(uow, job.id)
    _free(uow, job, model_registered=False)


def expire_fine_tuning_job(uow: UnitOfWork, job_id: str) -> None:
    """A job whose deadline is over: it waited for a runner for 24 hours, or ran past its limit."""
    job = uow.get(FineTuningJob, job_id)
    waits_since = job.queued_at if job.status == "queued" else None
    if waits_since is not None and uow.now >= waits_since + WAITING_LIMIT:
        end_failed(
            uow,
            job,
            code="job_unavailable",
            message="No GPU became free within 24 hours. Nothing ran and nothing is charged.",
        )
    elif job.status == "running" and job.deadline is not None and uow.now >= job.deadline:
        end_failed(
            uow,
            job,
            code="job_expired",
            message="The job did not finish within its time limit. Nothing is charged.",
        )


def succeed(uow: UnitOfWork, job: FineTuningJob, result: TrainingResult) -> None:
    """Registers the adapter, captures the charge, frees the slots and ends the job."""
    settings = job.settings
    name = ids.fine_tuned_model_name(settings.base, job.account_id, job.id)
    end = End(ended="succeeded", minimum_applies=True)
    receipt = _receipt(uow, job, trained_tokens=result.trained_tokens, end=end)
    uow.add(
        FineTunedModel(
            id=name,
            envelope=uow.envelope,
            account_id=job.account_id,
            job_id=job.id,
            base=settings.base,
            base_revision=result.base_revision,
            config=result.adapter_config,
            weights=result.adapter_weights,
            rank=settings.hyperparameters.lora_rank,
            servable=settings.servable,
        )
    )
    _store_step_metrics(uow, job, result)
    capture_hold(uow, job.id, receipt.charge_nano_usd)
    _free(uow, job, model_registered=True)
    job.succeed(model=name, result=result, receipt=receipt, envelope=uow.envelope)


def _store_step_metrics(uow: UnitOfWork, job: FineTuningJob, result: TrainingResult) -> None:
    file = File(
        id=ids.step_metrics_file_id(job.id),
        envelope=uow.envelope,
        account_id=job.account_id,
        purpose="fine-tune-results",
        object=result.step_metrics,
        expires_at=uow.now + timedelta(seconds=FILE_KEPT_SECONDS),
        training=None,
    )
    uow.add(file)
    uow.personal(name_row(file.id, job.account_id, "step_metrics.csv"))


def end_failed(
    uow: UnitOfWork,
    job: FineTuningJob,
    *,
    code: str,
    message: str,
    trained_tokens: int = 0,
) -> None:
    """Ends the job without a model; the side of the code decides the charge (`docs/errors.md`)."""
    side = side_of(code)
    receipt = None
    if side == "customer" and job.status == "running" and trained_tokens > 0:
        end = End(ended="failed", minimum_applies=False, code=code, side=side)
        receipt = _receipt(uow, job, trained_tokens=trained_tokens, end=end)
        capture_hold(uow, job.id, receipt.charge_nano_usd)
    else:
        release_hold(uow, job.id)
    _free(uow, job, model_registered=False)
    job.fail(
        code=code,
        message=message,
        side=side,
        trained_tokens=trained_tokens,
        receipt=receipt,
        envelope=uow.envelope,
    )


def lose_runner(uow: UnitOfWork, job: FineTuningJob) -> None:
    """The runner's lease ended: a training that had begun is not tried again."""
    if job.status == "running":
        end_failed(
            uow,
            job,
            code="platform_interrupted",
            message="The machine that ran the job was lost. Nothing is charged; create it again.",
        )
    elif job.attempt >= STARTS_MAX:
        end_failed(
            uow,
            job,
            code="job_unavailable",
            message="The job could not be started. Nothing ran and nothing is charged.",
        )
    else:
        job.lose_attempt(envelope=uow.envelope)


def _receipt(uow: UnitOfWork, job: FineTuningJob, *, trained_tokens: int, end: End) -> Receipt:
    """The charge for the tokens trained, at most the quote."""
    settings, quote = job.settings, job.settings.quote
    prices = uow.get(PriceBook, ids.PRICE_BOOK_ID).of_version(quote.price_version)
    files = (settings.training, *((settings.validation,) if settings.validation else ()))
    return settle(
        Terms(
            price_version=quote.price_version,
            base=settings.base,
            base_revision=settings.base_revision,
            minimum_nano_usd=quote.minimum_nano_usd,
            maximum_nano_usd=quote.maximum_nano_usd,
            input_sha256=tuple(file.object.sha256 for file in files),
        ),
        training_lines(
            prices=prices,
            base=settings.base,
            method=settings.method,
            trained_tokens=trained_tokens,
        ),
        end,
    )


def _free(uow: UnitOfWork, job: FineTuningJob, *, model_registered: bool) -> None:
    account = uow.get(Account, job.account_id)
    if account.training_job_id == job.id:
        account.free_training_slot(job.id, envelope=uow.envelope)
    account.free_fine_tune_slot(job.id, model_registered=model_registered, envelope=uow.envelope)
    settings = job.settings
    for file in (settings.training, settings.validation):
        if file is not None:
            uow.get(File, file.file_id).unpin(job.id, envelope=uow.envelope)
