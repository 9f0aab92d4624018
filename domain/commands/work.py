"""Giving work to runners, taking it back from lost ones, and recording what they report."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from domain.commands.fine_tuning import end_failed, lose_runner, succeed
from domain.fine_tuned_model import StoredAdapter
from domain.ids import BATCH
from domain.inputs.hyperparameters import Hyperparameters
from domain.messages import (
    AdapterRef,
    Attempt,
    AttemptFailed,
    BatchChunkTask,
    ChunkFinished,
    ChunkProgress,
    ObjectRef,
    Report,
    Started,
    Task,
    TrainCancelled,
    TrainFinished,
    TrainingHyperparameters,
    TrainProgress,
    TrainTask,
)
from domain.stored import TokenUsage, exact, exact_or_none
from domain.unit_of_work import UnitOfWork
from domain.work.batch import Batch, ChunkResult
from domain.work.fine_tuning_job import FineTuningJob, TrainingResult

RUN_MARGIN = timedelta(minutes=10)
"""A runner enforces a training's time limit itself; the log's deadline is later by this."""


@dataclass(frozen=True, slots=True)
class AssignWork:
    """`chunk` is 0 for a training."""

    work_id: str
    chunk: int
    runner_id: str


def assign_work(uow: UnitOfWork, command: AssignWork) -> Attempt | None:
    """Records the next attempt by this runner, or None if the work no longer wants one."""
    if command.work_id.startswith(BATCH):
        batch = uow.get(Batch, command.work_id)
        if not batch.may_assign or batch.chunks[command.chunk].state != "pending":
            return None
        return batch.assign(command.chunk, runner_id=command.runner_id, envelope=uow.envelope)
    job = uow.get(FineTuningJob, command.work_id)
    if not job.may_assign:
        return None
    return job.assign(runner_id=command.runner_id, envelope=uow.envelope)


@dataclass(frozen=True, slots=True)
class WaitForRunner:
    job_id: str


def wait_for_runner(uow: UnitOfWork, command: WaitForRunner) -> None:
    """Says that a queued training waits for a runner (fine-tuning page, "The job"), once."""
    job = uow.get(FineTuningJob, command.job_id)
    if job.may_assign:
        job.wait("gridline_capacity", envelope=uow.envelope)


@dataclass(frozen=True, slots=True)
class LoseAttempt:
    attempt: Attempt


def lose_attempt(uow: UnitOfWork, command: LoseAttempt) -> None:
    """The lease of the attempt's runner ended; an attempt that is not current changes nothing."""
    attempt = command.attempt
    if attempt.work_id.startswith(BATCH):
        batch = uow.get(Batch, attempt.work_id)
        if batch.is_current(attempt):
            batch.lose_attempt(attempt, envelope=uow.envelope)
        return
    job = uow.get(FineTuningJob, attempt.work_id)
    if job.is_current(attempt):
        lose_runner(uow, job)


def give_attempt_back(uow: UnitOfWork, command: LoseAttempt) -> None:
    """The runner is there and does not take the attempt. A training that began is left to its
    deadline: its report may be on the way."""
    attempt = command.attempt
    if not attempt.work_id.startswith(BATCH):
        job = uow.get(FineTuningJob, attempt.work_id)
        if job.status != "queued":
            return
    lose_attempt(uow, command)


@dataclass(frozen=True, slots=True)
class RecordReport:
    """A runner's report; its broker position is recorded in the same append."""

    report: Report


def record_report(uow: UnitOfWork, command: RecordReport) -> None:
    """Records what a report of the current attempt says; any other changes nothing."""
    report = command.report
    if report.attempt.work_id.startswith(BATCH):
        batch = uow.find(Batch, report.attempt.work_id)
        if batch is not None and batch.is_current(report.attempt):
            _record_batch_report(uow, batch, report)
        return
    job = uow.find(FineTuningJob, report.attempt.work_id)
    if job is not None and job.is_current(report.attempt):
        _record_job_report(uow, job, report)


def _record_batch_report(uow: UnitOfWork, batch: Batch, report: Report) -> None:
    match report.body:
        case ChunkProgress(completed=completed, failed=failed):
            batch.record_progress(
                report.attempt, completed=completed, failed=failed, envelope=uow.envelope
            )
        case ChunkFinished() as result:
            batch.finish_chunk(report.attempt, _chunk_result(result), envelope=uow.envelope)
        case AttemptFailed(code=code):
            batch.fail_attempt(report.attempt, code=code, envelope=uow.envelope)
        case _:
            pass


def _record_job_report(uow: UnitOfWork, job: FineTuningJob, report: Report) -> None:
    deadline = uow.now + timedelta(seconds=job.settings.time_limit_seconds) + RUN_MARGIN
    # Whatever comes first shows that the runner has begun: `started` may be lost.
    job.begin(report.attempt, deadline=deadline, envelope=uow.envelope)
    match report.body:
        case Started():
            pass
        case TrainProgress() as progress:
            job.record_progress(
                report.attempt,
                step=progress.step,
                steps=progress.steps,
                trained_tokens=progress.trained_tokens,
                train_loss=exact_or_none(progress.train_loss),
                eval_loss_before=exact_or_none(progress.eval_loss_before),
                envelope=uow.envelope,
            )
        case TrainFinished() as result:
            succeed(uow, job, _training_result(result))
        case AttemptFailed() as failure:
            end_failed(
                uow,
                job,
                code=failure.code,
                message=failure.message,
                trained_tokens=failure.trained_tokens,
            )
        case TrainCancelled():
            # Only a runner that shuts down cancels unasked: the job itself was not cancelled.
            lose_runner(uow, job)
        case _:
            pass


def _chunk_result(report: ChunkFinished) -> ChunkResult:
    return ChunkResult(
        completed=report.completed,
        failed=report.failed,
        usage=tuple(
            TokenUsage(
                model=used.model,
                input_tokens=used.input_tokens,
                output_tokens=used.output_tokens,
            )
            for used in report.usage
        ),
        output=report.output.stored() if report.output is not None else None,
        errors=report.errors.stored() if report.errors is not None else None,
    )


def _training_result(report: TrainFinished) -> TrainingResult:
    return TrainingResult(
        trained_tokens=report.trained_tokens,
        loss_tokens=report.loss_tokens,
        steps=report.steps,
        train_loss=exact(report.train_loss),
        train_accuracy=exact_or_none(report.train_accuracy),
        eval_loss_before=exact_or_none(report.eval_loss_before),
        eval_loss=exact_or_none(report.eval_loss),
        eval_accuracy=exact_or_none(report.eval_accuracy),
        eval_rows=report.eval_rows,
        rows_trained=report.rows_trained,
        rows_dropped=report.rows_dropped,
        seconds=exact(report.seconds),
        adapter_config=report.adapter_config.stored(),
        adapter_weights=report.adapter_weights.stored(),
        base_revision=report.base_revision,
        versions=report.versions,
    )


def _hyperparameters(stored: Hyperparameters) -> TrainingHyperparameters:
    return TrainingHyperparameters(
        n_epochs=stored.n_epochs,
        batch_size=stored.batch_size,
        learning_rate=float(stored.learning_rate),
        lora_rank=stored.lora_rank,
        lora_alpha=stored.lora_alpha,
        max_seq_length=stored.max_seq_length,
        beta=float(stored.beta) if stored.beta is not None else None,
    )


def _adapter(stored: StoredAdapter) -> AdapterRef:
    return AdapterRef(
        name=stored.name,
        config=ObjectRef.of(stored.config),
        weights=ObjectRef.of(stored.weights),
        rank=stored.rank,
    )


def task_of(work: Batch | FineTuningJob, attempt: Attempt) -> Task:
    """What the runner needs to know to run this attempt; the same each time it is sent."""
    if isinstance(work, Batch):
        assert work.plan is not None
        chunk = work.chunks[attempt.chunk].plan
        return BatchChunkTask(
            input_key=work.input.key,
            start_byte=chunk.start_byte,
            end_byte=chunk.end_byte,
            first_line=chunk.first_line,
            requests=chunk.requests,
            endpoint=work.endpoint,
            base=work.plan.base,
            adapters=tuple(_adapter(adapter) for adapter in work.plan.adapters),
            output_prefix=f"chunks/{work.id}/{attempt.chunk}/{attempt.attempt}/",
        )
    settings = work.settings
    return TrainTask(
        base=settings.base,
        method=settings.method,
        adapter=settings.adapter,
        hyperparameters=_hyperparameters(settings.hyperparameters),
        seed=settings.seed,
        training=ObjectRef.of(settings.training.object),
        validation=ObjectRef.of(settings.validation.object) if settings.validation else None,
        eval_rows=settings.quote.eval_rows,
        time_limit_seconds=settings.time_limit_seconds,
        output_prefix=f"adapters/{work.id}/{attempt.attempt}/",
    )
