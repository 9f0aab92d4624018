"""What worker and runner do to a job or batch, done at once, with the commands that they use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

from adapters.event_log.event_store import decode
from adapters.event_log.postgres import connect
from domain import messages
from domain.commands.batches import (
    FinishBatch,
    RecordBatchPlan,
    ResultFile,
    finish_batch,
    record_batch_plan,
)
from domain.commands.work import (
    AssignWork,
    RecordReport,
    StartWork,
    assign_work,
    claimed_objects,
    record_report,
    start_work,
)
from domain.inputs.batch_file import ChunkPlan
from domain.log.stored import Attempt, StoredObject
from domain.messages import (
    CHUNK_ERRORS,
    CHUNK_OUTPUT,
    AttemptFailed,
    ChunkFinished,
    ModelUsage,
    ObjectRef,
    Report,
    ReportBody,
    Started,
    TrainFinished,
    TrainProgress,
)
from projections.follower import Follower
from projections.registry import FOLLOWING
from tests.acceptance.conftest import Served
from tests.integration.product_rig import batch_quote

BASE = "smollm2-135m-instruct"
CONFIG = b'{"r": 16}'
STEP_METRICS = (
    b"step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n"
    b"1,2,0.25,,\n2,1.5,0.5,1.25,0.75\n"
)
WEIGHTS = b"\x00weights" * 5


def store(served: Served, key: str, data: bytes) -> StoredObject:
    """Puts an object as a runner would."""

    async def once() -> AsyncIterator[bytes]:
        yield data

    return asyncio.run(served.plane.objects.put(key, once()))


def _uploaded(served: Served, key: str, data: bytes) -> ObjectRef:
    return ObjectRef.of(store(served, key, data))


def succeed_training(served: Served, job_id: str) -> None:
    """The job ends succeeded; its adapter's files are CONFIG and WEIGHTS."""
    served.run(start_work, StartWork(job_id))
    attempt = served.run(assign_work, AssignWork(work_id=job_id, chunk=0, runner_id="runner_1"))
    _report(served, attempt, 1, Started())
    _report(
        served,
        attempt,
        2,
        TrainProgress(step=1, steps=2, trained_tokens=10, train_loss=2.0, eval_loss_before=3.0),
    )
    _report(
        served,
        attempt,
        3,
        TrainFinished(
            trained_tokens=600,
            loss_tokens=200,
            steps=2,
            train_loss=1.5,
            train_accuracy=0.5,
            eval_loss_before=3.0,
            eval_loss=1.25,
            eval_accuracy=0.75,
            eval_rows=1,
            rows_trained=11,
            rows_dropped=0,
            seconds=2.5,
            adapter_config=_uploaded(served, f"adapters/{job_id}/1/adapter_config.json", CONFIG),
            adapter_weights=_uploaded(
                served, f"adapters/{job_id}/1/adapter_model.safetensors", WEIGHTS
            ),
            step_metrics=_uploaded(served, f"adapters/{job_id}/1/step_metrics.csv", STEP_METRICS),
            base_revision="0.1.2",
        ),
    )


def plan_batch(
    served: Served, batch_id: str, *, requests: int, first_lines: Mapping[str, int] | None = None
) -> None:
    """Validation found nothing wrong; `first_lines` are those of the `ft:` models."""
    chunk = ChunkPlan(start_byte=0, end_byte=1, first_line=1, requests=requests, sha256="0" * 64)
    served.run(
        record_batch_plan,
        RecordBatchPlan(
            batch_id=batch_id,
            chunks=(chunk,),
            first_lines=first_lines or {},
            quote=batch_quote(requests=requests, maximum_nano_usd=20_000_000),
        ),
    )


@contextmanager
def store_away(served: Served) -> Iterator[None]:
    """The object store does not answer, as a disk that is not mounted."""
    directory = served.api.objects_directory
    elsewhere = directory.rename(directory.with_name("unmounted"))
    try:
        yield
    finally:
        elsewhere.rename(directory)


def run_batch(served: Served, batch_id: str, *, requests: int) -> None:
    """The batch is validated and runs: one of its requests has failed, the others are done."""
    plan_batch(served, batch_id, requests=requests)
    start(served, batch_id)
    attempt = served.run(assign_work, AssignWork(work_id=batch_id, chunk=0, runner_id="runner_1"))
    _report(
        served,
        attempt,
        1,
        ChunkFinished(
            completed=requests - 1,
            failed=1,
            usage=(ModelUsage(model=BASE, input_tokens=30, output_tokens=10),),
            output=_chunk_file(batch_id, CHUNK_OUTPUT) if requests > 1 else None,
            errors=_chunk_file(batch_id, CHUNK_ERRORS),
        ),
    )


def _chunk_file(batch_id: str, name: str) -> ObjectRef:
    return ObjectRef(key=f"chunks/{batch_id}/0/1/{name}", bytes=1, sha256="0" * 64)


def finish(served: Served, batch_id: str, *, output: bytes, errors: bytes) -> None:
    """The batch's files are registered and it ends."""
    served.run(
        finish_batch,
        FinishBatch(
            batch_id=batch_id,
            output=_result(served, f"files/{batch_id}-output", output),
            errors=_result(served, f"files/{batch_id}-errors", errors),
        ),
    )


def _result(served: Served, key: str, data: bytes) -> ResultFile:
    return ResultFile(object=store(served, key, data), lines=data.count(b"\n"))


def _report(served: Served, attempt: Attempt, seq: int, body: ReportBody) -> None:
    report = Report(attempt=messages.Attempt.of(attempt), seq=seq, at=datetime.now(UTC), body=body)
    stored = served.run(claimed_objects, report)
    served.run(record_report, RecordReport(report, stored))


def follow(served: Served) -> None:
    """The journal reaches the end of the log."""
    url = served.plane.settings.database_url
    runner = Follower(lambda: connect(url, name="test"), decode, FOLLOWING)
    runner.catch_up()
    runner.close()


def start(served: Served, work_id: str) -> None:
    """The scheduler's turn for a job or batch: it runs, waits or fails."""
    served.run(start_work, StartWork(work_id))


def fail_training(served: Served, job_id: str, *, code: str, message: str) -> None:
    """The job's attempt trains some tokens and then ends without a result."""
    start(served, job_id)
    attempt = served.run(assign_work, AssignWork(work_id=job_id, chunk=0, runner_id="runner_1"))
    _report(served, attempt, 1, Started())
    _report(served, attempt, 2, AttemptFailed(code=code, message=message, trained_tokens=100))
