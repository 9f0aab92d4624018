"""A fine-tuning job.

    validating_files --start (hold placed)--> queued --runner began--> running --> succeeded
        |  waits for the account's slot or credit     |                   |
        +----------------- fail, cancel --------------+-------------------+--> failed, cancelled

A training is tried once: if its runner is lost after it began, the job fails with
`platform_interrupted` and nothing is charged; an attempt that never began is made again.
Reports of an older attempt or another runner change nothing, and so do those of a job that ended.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Literal

from domain.catalog import AdapterMethod, TrainingMethod
from domain.errors import InvalidState
from domain.inputs.hyperparameters import Hyperparameters
from domain.ledger.receipt import FaultSide, Receipt
from domain.log.aggregate import Aggregate, Envelope, event
from domain.log.stored import Attempt, Exact, StoredModel, StoredObject
from domain.work.quote import FineTuneQuote

JobStatus = Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]
WaitingFor = Literal["account_capacity", "customer_credit", "gridline_capacity", "platform_budget"]

TERMINAL = ("succeeded", "failed", "cancelled")

STARTS_MAX = 8
"""Attempts that were assigned and never began, before the job is `job_unavailable`."""


class JobFile(StoredModel):
    """A training or validation file as the job found it."""

    file_id: str
    object: StoredObject
    rows: int


class JobSettings(StoredModel):
    """What create resolved: nothing is looked up again later."""

    base: str
    base_revision: str
    servable: bool
    method: TrainingMethod
    adapter: AdapterMethod
    hyperparameters: Hyperparameters
    seed: int
    training: JobFile
    validation: JobFile | None
    quote: FineTuneQuote
    time_limit_seconds: int
    has_suffix: bool


class TrainingResult(StoredModel):
    """What a training measured, step by step in a file of its own, and the adapter that it made.

    `trained_tokens` is what is billed, `loss_tokens` carried loss. Losses are the mean
    cross-entropy (DPO: the DPO loss); those before and after are null where nothing was held out.
    """

    trained_tokens: int
    loss_tokens: int
    steps: int
    train_loss: Exact
    train_accuracy: Exact | None
    eval_loss_before: Exact | None
    eval_loss: Exact | None
    eval_accuracy: Exact | None
    eval_rows: int
    rows_trained: int
    rows_dropped: int
    seconds: Exact
    adapter_config: StoredObject
    adapter_weights: StoredObject
    step_metrics: StoredObject
    base_revision: str
    versions: dict[str, str]


class FineTuningJob(Aggregate, topic="gridline.fine_tuning_job"):
    """All that decides about a job. Suffix and metadata are personal and live outside the log."""

    snapshot_interval: ClassVar[int] = 200

    account_id: str
    key_id: str
    settings: JobSettings
    waiting_until: datetime
    queued_at: datetime | None
    status: JobStatus
    waiting_for: WaitingFor | None
    attempt: int
    runner_id: str | None
    deadline: datetime | None
    step: int
    trained_tokens: int
    receipt: Receipt | None

    @event("Created", topic="gridline.fine_tuning_job.created")
    def __init__(
        self,
        *,
        id: str,
        envelope: Envelope,
        account_id: str,
        key_id: str,
        settings: JobSettings,
        waiting_until: datetime,
    ) -> None:
        self.account_id = account_id
        self.key_id = key_id
        self.settings = settings
        self.waiting_until = waiting_until
        self.queued_at = None
        self.status = "validating_files"
        self.waiting_for = None
        self.attempt = 0
        self.runner_id = None
        self.deadline = None
        self.step = 0
        self.trained_tokens = 0
        self.receipt = None

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def may_assign(self) -> bool:
        return self.status == "queued" and self.runner_id is None

    def is_current(self, attempt: Attempt) -> bool:
        """Whether this attempt is the one whose reports count."""
        return (
            not self.is_terminal
            and self.attempt == attempt.attempt
            and self.runner_id == attempt.runner_id
        )

    def wait(self, waiting_for: WaitingFor, *, envelope: Envelope) -> None:
        """It cannot start or run yet; said once for each cause."""
        assert self.status in ("validating_files", "queued")
        if waiting_for != self.waiting_for:
            self._waiting(waiting_for=waiting_for, envelope=envelope)

    def start(self, *, envelope: Envelope) -> None:
        """Credit is held and the training slot taken; a runner may be chosen."""
        assert self.status == "validating_files"
        self._queued(envelope=envelope)

    def assign(self, *, runner_id: str, envelope: Envelope) -> Attempt:
        """The next attempt, by this runner."""
        assert self.may_assign
        attempt = self.attempt + 1
        self._attempt_assigned(attempt=attempt, runner_id=runner_id, envelope=envelope)
        return Attempt(work_id=self.id, chunk=0, attempt=attempt, runner_id=runner_id)

    def begin(self, attempt: Attempt, *, deadline: datetime, envelope: Envelope) -> None:
        """The runner has begun to train."""
        if self.is_current(attempt) and self.status == "queued":
            self._started(attempt=attempt.attempt, deadline=deadline, envelope=envelope)

    def lose_attempt(self, *, envelope: Envelope) -> None:
        """The lease of a runner that had not begun ended: another one may be chosen."""
        assert self.status == "queued"
        assert self.runner_id is not None
        self._attempt_lost(attempt=self.attempt, envelope=envelope)

    def record_progress(
        self,
        attempt: Attempt,
        *,
        step: int,
        steps: int,
        trained_tokens: int,
        train_loss: Exact | None,
        eval_loss_before: Exact | None,
        envelope: Envelope,
    ) -> None:
        """Cumulative counters of the running attempt; they never fall."""
        if self.is_current(attempt) and self.status == "running" and step > self.step:
            self._progressed(
                step=step,
                steps=steps,
                trained_tokens=trained_tokens,
                train_loss=train_loss,
                eval_loss_before=eval_loss_before,
                envelope=envelope,
            )

    def cancel(self, *, envelope: Envelope) -> None:
        """Ends the job at once: its attempt, if it has one, is no longer current and is revoked.
        Nothing is charged. Raises InvalidState when the job has ended."""
        if self.is_terminal:
            raise InvalidState(
                f"The job has ended ({self.status}) and can no longer be cancelled.",
                param="fine_tuning_job_id",
            )
        self._cancelled(trained_tokens=self.trained_tokens, envelope=envelope)

    def succeed(
        self,
        *,
        model: str,
        result: TrainingResult,
        receipt: Receipt,
        envelope: Envelope,
    ) -> None:
        """The adapter is registered and the hold captured."""
        assert self.status == "running"
        self._succeeded(model=model, result=result, receipt=receipt, envelope=envelope)

    def fail(
        self,
        *,
        code: str,
        message: str,
        side: FaultSide,
        trained_tokens: int,
        receipt: Receipt | None,
        envelope: Envelope,
    ) -> None:
        """It ended without a model. A receipt only where something is charged."""
        assert not self.is_terminal
        self._failed(
            code=code,
            message=message,
            side=side,
            trained_tokens=trained_tokens,
            receipt=receipt,
            envelope=envelope,
        )

    @event("Waiting", topic="gridline.fine_tuning_job.waiting")
    def _waiting(self, *, waiting_for: WaitingFor, envelope: Envelope) -> None:
        self.waiting_for = waiting_for

    @event("Queued", topic="gridline.fine_tuning_job.queued")
    def _queued(self, *, envelope: Envelope) -> None:
        self.status = "queued"
        self.queued_at = envelope.at
        self.waiting_for = None

    @event("AttemptAssigned", topic="gridline.fine_tuning_job.attempt_assigned")
    def _attempt_assigned(self, *, attempt: int, runner_id: str, envelope: Envelope) -> None:
        self.attempt = attempt
        self.runner_id = runner_id

    @event("AttemptLost", topic="gridline.fine_tuning_job.attempt_lost")
    def _attempt_lost(self, *, attempt: int, envelope: Envelope) -> None:
        self.runner_id = None

    @event("Started", topic="gridline.fine_tuning_job.started")
    def _started(self, *, attempt: int, deadline: datetime, envelope: Envelope) -> None:
        self.status = "running"
        self.deadline = deadline
        self.waiting_for = None

    @event("Progressed", topic="gridline.fine_tuning_job.progressed")
    def _progressed(
        self,
        *,
        step: int,
        steps: int,
        trained_tokens: int,
        train_loss: Exact | None,
        eval_loss_before: Exact | None,
        envelope: Envelope,
    ) -> None:
        self.step = step
        self.trained_tokens = trained_tokens

    @event("Succeeded", topic="gridline.fine_tuning_job.succeeded")
    def _succeeded(
        self, *, model: str, result: TrainingResult, receipt: Receipt, envelope: Envelope
    ) -> None:
        self.status = "succeeded"
        self.trained_tokens = result.trained_tokens
        self.receipt = receipt

    @event("Failed", topic="gridline.fine_tuning_job.failed")
    def _failed(
        self,
        *,
        code: str,
        message: str,
        side: FaultSide,
        trained_tokens: int,
        receipt: Receipt | None,
        envelope: Envelope,
    ) -> None:
        self.status = "failed"
        self.waiting_for = None
        self.trained_tokens = trained_tokens
        self.receipt = receipt

    @event("Cancelled", topic="gridline.fine_tuning_job.cancelled")
    def _cancelled(self, *, trained_tokens: int, envelope: Envelope) -> None:
        self.status = "cancelled"
        self.waiting_for = None
        self.trained_tokens = trained_tokens
