"""What a fine-tuning job does with attempts of its training: `domain/commands/work.py` calls it.
Messages end here: the log keeps shapes of its own.

Whoever can write to the topics can write a report, so none is believed: tokens are within the
quote, the adapter's files are the attempt's own, and what is registered of them was read from the
store."""

from __future__ import annotations

import math
from collections.abc import Collection
from datetime import timedelta

from domain.commands.fine_tuning import end_failed, lose_runner, succeed
from domain.inputs.hyperparameters import Hyperparameters
from domain.limits import ADAPTER_BYTES_MAX
from domain.log.stored import Attempt, StoredObject, exact, exact_or_none
from domain.log.unit_of_work import UnitOfWork
from domain.messages import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    STEP_METRICS,
    AttemptFailed,
    ObjectRef,
    Report,
    Task,
    TrainCancelled,
    TrainFinished,
    TrainingHyperparameters,
    TrainProgress,
    TrainTask,
)
from domain.work.fine_tuning_job import FineTuningJob, TrainingResult

FAILURE_CHARACTERS_MAX = 1_000
"""Of a runner's message to the customer: it is kept for ever."""
NOTES_CHARACTERS_MAX = 4_000
"""Of what a runner says of its base and its packages."""
OWN_OBJECTS = {
    "adapter_config": ADAPTER_CONFIG,
    "adapter_weights": ADAPTER_WEIGHTS,
    "step_metrics": STEP_METRICS,
}
"""Every field of a training's report that names an object, and the name that it must have below the
attempt's prefix."""
_IMPOSSIBLE = "What was reported cannot be of this training. Nothing is charged; create it again."
_OTHER_FILES = "The stored adapter is not what was reported. Nothing is charged; create it again."
TOKENS_OVER_BOUND = 2
"""The quote's bound is one by construction; this is how far off it may be before nothing of a
report is believed."""
RUN_MARGIN = timedelta(minutes=10)
"""A runner enforces a training's time limit itself; the log's deadline is later by this."""


def assign(uow: UnitOfWork, job_id: str, _chunk: int, runner_id: str) -> Attempt | None:
    """The job's next attempt, if it wants one."""
    job = uow.get(FineTuningJob, job_id)
    return job.assign(runner_id=runner_id, envelope=uow.envelope) if job.may_assign else None


def wait(uow: UnitOfWork, job_id: str) -> None:
    """Tells its owner that no GPU is free."""
    job = uow.get(FineTuningJob, job_id)
    if job.may_assign:
        job.wait("gridline_capacity", envelope=uow.envelope)


def lose(uow: UnitOfWork, attempt: Attempt) -> None:
    """A training that had begun is not tried again."""
    lose_runner(uow, uow.get(FineTuningJob, attempt.work_id))


def give_back(uow: UnitOfWork, attempt: Attempt) -> None:
    """A training that began is left to its deadline: its report may be on the way."""
    job = uow.get(FineTuningJob, attempt.work_id)
    if job.status == "queued":
        lose_runner(uow, job)


def record(
    uow: UnitOfWork, attempt: Attempt, report: Report, stored: Collection[StoredObject]
) -> None:
    """That it began, how far it is, and how it ended."""
    job = uow.get(FineTuningJob, attempt.work_id)
    deadline = uow.now + timedelta(seconds=job.settings.time_limit_seconds) + RUN_MARGIN
    # Whatever comes first shows that the runner has begun: `started` may be lost.
    job.begin(attempt, deadline=deadline, envelope=uow.envelope)
    bound = _most_tokens(job)
    match report.body:
        case TrainProgress() as progress:
            if progress.step > progress.steps or progress.trained_tokens > bound:
                return
            job.record_progress(
                attempt,
                step=progress.step,
                steps=progress.steps,
                trained_tokens=progress.trained_tokens,
                train_loss=exact_or_none(_finite(progress.train_loss)),
                eval_loss_before=exact_or_none(_finite(progress.eval_loss_before)),
                envelope=uow.envelope,
            )
        case TrainFinished() as finished:
            if not _is_possible(job, attempt, finished):
                end_failed(uow, job, code="training_failed", message=_IMPOSSIBLE)
            elif not {*claims(report)} <= {*stored}:
                end_failed(uow, job, code="adapter_invalid", message=_OTHER_FILES)
            else:
                succeed(uow, job, _result(finished))
        case AttemptFailed() as failure:
            possible = failure.trained_tokens <= bound
            end_failed(
                uow,
                job,
                code=failure.code if possible else "training_failed",
                message=failure.message[:FAILURE_CHARACTERS_MAX] if possible else _IMPOSSIBLE,
                trained_tokens=failure.trained_tokens if possible else 0,
            )
        case TrainCancelled():
            # Only a runner that shuts down cancels unasked: the job itself was not cancelled.
            lose_runner(uow, job)
        case _:
            pass


def claims(report: Report) -> tuple[StoredObject, ...]:
    """The adapter that a report says is stored: it is read from the store before it is recorded."""
    if not isinstance(report.body, TrainFinished):
        return ()
    return tuple(getattr(report.body, field).to_log() for field in OWN_OBJECTS)


def _is_possible(job: FineTuningJob, attempt: Attempt, report: TrainFinished) -> bool:
    quote, prefix = job.settings.quote, _output_prefix(attempt)
    objects = {name: getattr(report, field) for field, name in OWN_OBJECTS.items()}
    measured = (
        report.train_loss,
        report.train_accuracy,
        report.eval_loss_before,
        report.eval_loss,
        report.eval_accuracy,
        report.seconds,
    )
    return (
        all(ref.key == prefix + name for name, ref in objects.items())
        and all(ref.bytes <= ADAPTER_BYTES_MAX for ref in objects.values())
        and len(str((report.base_revision, report.versions))) <= NOTES_CHARACTERS_MAX
        and report.loss_tokens <= report.trained_tokens <= _most_tokens(job)
        and report.eval_rows <= quote.eval_rows
        and all(each is None or math.isfinite(each) for each in measured)
    )


def _most_tokens(job: FineTuningJob) -> int:
    """More cannot be of this training. A count a little past the quote's bound is charged at the
    quote's maximum, and is no reason to lose a trained model."""
    return TOKENS_OVER_BOUND * job.settings.quote.training_tokens_upper_bound


def _finite(measured: float | None) -> float | None:
    return measured if measured is not None and math.isfinite(measured) else None


def _output_prefix(attempt: Attempt) -> str:
    return f"adapters/{attempt.work_id}/{attempt.attempt}/"


def task(uow: UnitOfWork, attempt: Attempt) -> Task:
    """The whole training."""
    job = uow.get(FineTuningJob, attempt.work_id)
    settings = job.settings
    validation = settings.validation
    return TrainTask(
        base=settings.base,
        method=settings.method,
        adapter=settings.adapter,
        hyperparameters=_hyperparameters(settings.hyperparameters),
        seed=settings.seed,
        training=ObjectRef.of(settings.training.object),
        validation=ObjectRef.of(validation.object) if validation is not None else None,
        eval_rows=settings.quote.eval_rows,
        time_limit_seconds=settings.time_limit_seconds,
        output_prefix=_output_prefix(attempt),
    )


def _result(report: TrainFinished) -> TrainingResult:
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
        adapter_config=report.adapter_config.to_log(),
        adapter_weights=report.adapter_weights.to_log(),
        step_metrics=report.step_metrics.to_log(),
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
