"""What a batch does with attempts of its chunks: `domain/commands/work.py` calls it. Messages end
here: the log keeps shapes of its own."""

from __future__ import annotations

from domain.fine_tuned_model import StoredAdapter
from domain.messages import (
    AdapterRef,
    AttemptFailed,
    BatchChunkTask,
    ChunkFinished,
    ChunkProgress,
    ObjectRef,
    Report,
    Task,
)
from domain.stored import Attempt, TokenUsage
from domain.unit_of_work import UnitOfWork
from domain.work.batch import Batch, ChunkResult


def assign(uow: UnitOfWork, batch_id: str, chunk: int, runner_id: str) -> Attempt | None:
    """The chunk's next attempt, if it wants one."""
    batch = uow.get(Batch, batch_id)
    if not batch.may_assign or batch.chunks[chunk].state != "pending":
        return None
    return batch.assign(chunk, runner_id=runner_id, envelope=uow.envelope)


def wait(_uow: UnitOfWork, _batch_id: str) -> None:
    """A batch has its window, and says nothing of runners."""


def lose(uow: UnitOfWork, attempt: Attempt) -> None:
    """Another runner gets the chunk, a bounded number of times."""
    uow.get(Batch, attempt.work_id).lose_attempt(attempt, envelope=uow.envelope)


def record(uow: UnitOfWork, attempt: Attempt, report: Report) -> None:
    """Counts of a running chunk, its result, or its failure."""
    batch = uow.get(Batch, attempt.work_id)
    match report.body:
        case ChunkProgress(completed=completed, failed=failed):
            batch.record_progress(
                attempt, completed=completed, failed=failed, envelope=uow.envelope
            )
        case ChunkFinished() as finished:
            batch.finish_chunk(attempt, _result(finished), envelope=uow.envelope)
        case AttemptFailed(code=code):
            batch.fail_attempt(attempt, code=code, envelope=uow.envelope)
        case _:
            pass


def task(uow: UnitOfWork, attempt: Attempt) -> Task:
    """The chunk's lines, and what they run on."""
    batch = uow.get(Batch, attempt.work_id)
    assert batch.plan is not None
    chunk = batch.chunks[attempt.chunk].plan
    return BatchChunkTask(
        input_key=batch.input.key,
        start_byte=chunk.start_byte,
        end_byte=chunk.end_byte,
        first_line=chunk.first_line,
        requests=chunk.requests,
        sha256=chunk.sha256,
        endpoint=batch.endpoint,
        base=batch.plan.quote.base,
        adapters=tuple(_adapter(adapter) for adapter in batch.plan.adapters),
        output_prefix=f"chunks/{batch.id}/{attempt.chunk}/{attempt.attempt}/",
    )


def _result(report: ChunkFinished) -> ChunkResult:
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
        output=report.output.to_log() if report.output is not None else None,
        errors=report.errors.to_log() if report.errors is not None else None,
    )


def _adapter(stored: StoredAdapter) -> AdapterRef:
    return AdapterRef(
        name=stored.name,
        config=ObjectRef.of(stored.config),
        weights=ObjectRef.of(stored.weights),
        rank=stored.rank,
    )
