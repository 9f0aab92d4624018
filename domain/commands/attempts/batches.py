"""What a batch does with attempts of its chunks: `domain/commands/work.py` calls it. Messages end
here: the log keeps shapes of its own.

Whoever can write to the topics can write a report, so none is believed: counts are those of the
chunk, models and tokens within the plan, objects the attempt's own. One that cannot be is a failed
try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from domain.assets.fine_tuned_model import StoredAdapter
from domain.log.stored import Attempt, StoredObject, TokenUsage
from domain.log.unit_of_work import UnitOfWork
from domain.messages import (
    CHUNK_ERRORS,
    CHUNK_OUTPUT,
    AdapterRef,
    AttemptFailed,
    BatchChunkTask,
    ChunkFinished,
    ChunkProgress,
    ObjectRef,
    Report,
    Task,
)
from domain.work.batch import Batch, ChunkResult

FAILED = "engine_failed"
"""The one code of a chunk's failed try: what a report says of it is not the customer's affair."""


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


def record(
    uow: UnitOfWork, attempt: Attempt, report: Report, _stored: Collection[StoredObject]
) -> None:
    """Counts of a running chunk, its result, or its failure."""
    batch = uow.get(Batch, attempt.work_id)
    requests = batch.chunks[attempt.chunk].plan.requests
    match report.body:
        case ChunkProgress(completed=completed, failed=failed):
            if completed + failed <= requests:
                batch.record_progress(
                    attempt, completed=completed, failed=failed, envelope=uow.envelope
                )
        case ChunkFinished() as finished:
            if _is_possible(batch, attempt, finished):
                batch.finish_chunk(attempt, _result(finished), envelope=uow.envelope)
            else:
                batch.fail_attempt(attempt, code=FAILED, envelope=uow.envelope)
        case AttemptFailed():
            batch.fail_attempt(attempt, code=FAILED, envelope=uow.envelope)
        case _:
            pass


def claims(_report: Report) -> tuple[StoredObject, ...]:
    """A chunk's objects are read, and compared, when the batch's files are made of them."""
    return ()


def _is_possible(batch: Batch, attempt: Attempt, report: ChunkFinished) -> bool:
    done, requests = report.completed + report.failed, batch.chunks[attempt.chunk].plan.requests
    # Only what was asked to stop leaves lines unanswered.
    all_there = done == requests or (batch.ending is not None and done < requests)
    prefix = _output_prefix(attempt)
    own = all(
        (ref.key == prefix + name if ref is not None else not count)
        for ref, name, count in (
            (report.output, CHUNK_OUTPUT, report.completed),
            (report.errors, CHUNK_ERRORS, report.failed),
        )
    )
    return all_there and own and _is_within_the_plan(batch, report)


def _is_within_the_plan(batch: Batch, report: ChunkFinished) -> bool:
    """Whether all chunks together use no more of any model than every line could."""
    assert batch.plan is not None
    bounds = {each.model: each for each in batch.plan.quote.worst_case}
    used = Counter[tuple[str, str]]()
    for each in (*batch.usage(), *_result(report).usage):
        if each.model not in bounds:
            return False
        used["input", each.model] += each.input_tokens
        used["output", each.model] += each.output_tokens
    return all(
        used["input", model] <= bound.input_tokens and used["output", model] <= bound.output_tokens
        for model, bound in bounds.items()
    )


def _output_prefix(attempt: Attempt) -> str:
    return f"chunks/{attempt.work_id}/{attempt.chunk}/{attempt.attempt}/"


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
        output_prefix=_output_prefix(attempt),
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
