"""No report is believed: whoever can write to the topics gets nobody's file, nobody's money, and
keeps no hold open. A report that cannot be true is a failed try."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from adapters.audit.verify import verify
from adapters.worker.batch_results import BatchResults
from adapters.worker.ingest import Ingest
from domain import messages
from domain.commands import batches, work
from domain.commands.attempts.trainings import OWN_OBJECTS
from domain.ids import derived_file_id, fine_tuned_model_name
from domain.log.stored import Attempt
from domain.messages import (
    AttemptFailed,
    ChunkFinished,
    ModelUsage,
    ObjectRef,
    Report,
    Started,
    TrainFinished,
)
from domain.ports import Record
from domain.work.batch import CHUNK_FAILURES_MAX, Batch
from domain.work.fine_tuning_job import FineTuningJob
from projections.work import models
from tests.conftest import Database
from tests.fakes import FakeObjects, StoreAway
from tests.integration.product_rig import BASE, ProductRig, object_ref, train_finished

OTHERS_FILE = object_ref("files/file-" + "f" * 32)


@pytest.fixture
def rig(database: Database) -> Iterator[ProductRig]:
    rig = ProductRig(database)
    yield rig
    rig.close()


def of(rig: ProductRig, cls: type[Any], id: str) -> Any:
    return rig.run(lambda uow, asked: dict(vars(uow.get(cls, asked))), id)


def started_batch(rig: ProductRig, *, chunks: int = 1) -> str:
    batch_id = rig.create_batch()
    rig.validate(batch_id, chunks=chunks)
    rig.start(batch_id)
    return batch_id


def finished(attempt: Attempt, **changes: Any) -> ChunkFinished:
    """An honest report of four answered lines, with changes."""
    prefix = f"chunks/{attempt.work_id}/{attempt.chunk}/{attempt.attempt}/"
    fields = {
        "completed": 4,
        "failed": 0,
        "usage": (ModelUsage(model=BASE, input_tokens=10, output_tokens=10),),
        "output": object_ref(prefix + "output.jsonl"),
        **changes,
    }
    return ChunkFinished(**fields)


def usage(model: str, tokens: int) -> tuple[ModelUsage, ...]:
    return (ModelUsage(model=model, input_tokens=tokens, output_tokens=0),)


FORGED: dict[str, dict[str, Any]] = {
    "another account's file": {"output": OTHERS_FILE},
    "a path out of the store": {"output": object_ref("../../api-key")},
    "a path out of its prefix": {"output": object_ref("chunks/x/0/1/../../../files/y")},
    "errors elsewhere": {"completed": 3, "failed": 1, "errors": OTHERS_FILE},
    "no output": {"output": None},
    "an unknown model": {"usage": usage("nobody", 1)},
    "a dearer model of the catalog": {"usage": usage("llama-3.1-8b-instruct", 1)},
    "more tokens than there can be": {"usage": usage(BASE, 10**30)},
    "more tokens in two parts": {"usage": usage(BASE, 10**9) + usage(BASE, 1)},
    "more lines than it has": {"completed": 5},
    "fewer lines, unasked": {"completed": 3, "cancelled": True},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_chunks_report_that_cannot_be_true_is_a_failed_try(
    rig: ProductRig, forged: dict[str, Any]
) -> None:
    batch_id = started_batch(rig)
    for _ in range(CHUNK_FAILURES_MAX):
        attempt = rig.assign(batch_id, 0)
        rig.report(attempt, finished(attempt, **forged))
        assert of(rig, Batch, batch_id)["chunks"][0].result is None
    assert of(rig, Batch, batch_id)["chunks"][0].state == "abandoned"
    rig.finish_batch(batch_id, completed=0, failed=4)
    assert of(rig, Batch, batch_id)["status"] == "completed"
    rig.runner().catch_up()
    assert verify(rig.connection).differences == ()


def test_chunks_together_use_no_more_than_the_plan(rig: ProductRig) -> None:
    batch_id = started_batch(rig, chunks=2)
    first, second = rig.assign(batch_id, 0), rig.assign(batch_id, 1)
    rig.report(first, finished(first, usage=usage(BASE, 10**9)))
    rig.report(second, finished(second, usage=usage(BASE, 1)))
    assert [c.state for c in of(rig, Batch, batch_id)["chunks"]] == ["finished", "pending"]


def test_what_was_asked_to_stop_may_leave_lines(rig: ProductRig) -> None:
    batch_id = started_batch(rig)
    attempt = rig.assign(batch_id, 0)
    rig.run(batches.cancel_batch, batches.CancelBatch(rig.account_id, batch_id))
    rig.report(attempt, finished(attempt, completed=3, cancelled=True))
    assert of(rig, Batch, batch_id)["chunks"][0].state == "finished"


FORGED_TRAININGS: dict[str, dict[str, Any]] = {
    "another account's file": {"adapter_weights": OTHERS_FILE},
    "a path out of the store": {"adapter_config": object_ref("../../api-key")},
    "another account's file as metrics": {"step_metrics": OTHERS_FILE},
    "a book of versions": {"versions": {"torch": "x" * 10_000}},
    "more tokens than there can be": {"trained_tokens": 10**30},
    "more loss tokens than tokens": {"loss_tokens": 901},
    "no number": {"train_loss": float("nan")},
    "no end": {"seconds": float("inf")},
    "a huge adapter": {
        "adapter_weights": ObjectRef(
            key="adapters/{job}/1/adapter_model.safetensors", bytes=2**40, sha256="0" * 64
        )
    },
}


@pytest.mark.parametrize("forged", FORGED_TRAININGS.values(), ids=FORGED_TRAININGS)
def test_a_trainings_report_that_cannot_be_true_makes_no_model_and_costs_nothing(
    rig: ProductRig, forged: dict[str, Any]
) -> None:
    job_id = started_job(rig)
    ref = forged.get("adapter_weights")
    if ref is not None:
        own = ref.model_copy(update={"key": ref.key.replace("{job}", job_id)})
        forged = {"adapter_weights": own}
    rig.report(rig.assign(job_id), train_finished(job_id).model_copy(update=forged))
    assert_failed(rig, job_id, code="training_failed")


def test_every_object_that_a_trainings_report_names_must_be_its_own() -> None:
    named = {
        field
        for field, info in TrainFinished.model_fields.items()
        if "ObjectRef" in str(info.annotation)
    }
    assert named == OWN_OBJECTS.keys()


def test_a_failure_reported_with_impossible_tokens_costs_nothing(rig: ProductRig) -> None:
    job_id = started_job(rig)
    attempt = rig.assign(job_id)
    rig.report(attempt, Started())
    body = AttemptFailed(code="invalid_row", message="m" * 10**6, trained_tokens=10**30)
    rig.report(attempt, body)
    assert_failed(rig, job_id, code="training_failed")


def started_job(rig: ProductRig) -> str:
    job_id = rig.create_job()
    rig.start(job_id)
    return job_id


def assert_failed(rig: ProductRig, job_id: str, *, code: str) -> None:
    job = of(rig, FineTuningJob, job_id)
    assert (job["status"], job["receipt"]) == ("failed", None)
    name = fine_tuned_model_name(BASE, rig.account_id, job_id)
    assert models.get(rig.connection, account_id=rig.account_id, model=name) is None
    row = rig.connection.execute(
        "SELECT error_code, length(error_message) AS length FROM fine_tuning_jobs"
    ).fetchone()
    assert row is not None
    assert row["error_code"] == code
    assert row["length"] <= 1_000
    rig.runner().catch_up()
    assert verify(rig.connection).differences == ()


# What the store has -----------------------------------------------------------------------------

CONFIG, WEIGHTS = b"{}", b"weights"


def trained(job_id: str, objects: FakeObjects) -> TrainFinished:
    """The report of a runner that stored its adapter."""
    prefix = f"adapters/{job_id}/1/"
    config = objects.add(prefix + "adapter_config.json", CONFIG)
    weights = objects.add(prefix + "adapter_model.safetensors", WEIGHTS)
    metrics = objects.add(prefix + "step_metrics.csv", b"step\n")
    files = {
        "adapter_config": ObjectRef.of(config),
        "adapter_weights": ObjectRef.of(weights),
        "step_metrics": ObjectRef.of(metrics),
    }
    return train_finished(job_id).model_copy(update=files)


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (WEIGHTS, "succeeded"),
        (b"another", "failed"),
        (WEIGHTS + b"!", "failed"),
        (None, "failed"),
    ],
    ids=["as reported", "other bytes", "more bytes", "missing"],
)
async def test_an_adapter_is_registered_only_as_the_store_has_it(
    rig: ProductRig, found: bytes | None, status: str
) -> None:
    job_id, objects = started_job(rig), FakeObjects()
    attempt = messages.Attempt.of(rig.assign(job_id))
    body = trained(job_id, objects)
    report = Report(attempt=attempt, seq=1, at=rig.clock.now(), body=body)
    del objects.stored[body.adapter_weights.key]
    if found is not None:
        objects.add(body.adapter_weights.key, found)
    ingest = Ingest(
        writer=rig.writer,
        objects=objects,
        progress_event_seconds=15,
        steady_seconds=lambda: 0.0,
    )
    value = report.model_dump_json().encode()
    await ingest.take([Record("progress", 0, 0, job_id, value, position_name="progress/0")])
    assert of(rig, FineTuningJob, job_id)["status"] == status


async def test_nothing_is_read_for_a_report_about_others_objects(rig: ProductRig) -> None:
    job_id, objects = started_job(rig), FakeObjects()
    attempt = messages.Attempt.of(rig.assign(job_id))
    forged = train_finished(job_id).model_copy(update={"adapter_weights": OTHERS_FILE})
    report = Report(attempt=attempt, seq=1, at=rig.clock.now(), body=forged)
    claimed = rig.run(work.claimed_objects, report)
    assert OTHERS_FILE.key not in {each.key for each in claimed}
    late = attempt.model_copy(update={"attempt": 7})
    report = report.model_copy(update={"attempt": late, "body": trained(job_id, objects)})
    assert rig.run(work.claimed_objects, report) == ()


def answers(*ids: str) -> bytes:
    return b"".join(b'{"custom_id":"%s"}\n' % each.encode() for each in ids)


@pytest.mark.parametrize(
    "content",
    [answers("a", "b", "c"), answers("a", "b", "c", "d", "e"), b"", b"no json\n" * 4],
    ids=["fewer lines", "more lines", "nothing", "four lines of something"],
)
async def test_a_result_with_other_lines_than_reported_counts_as_never_given(
    rig: ProductRig, content: bytes
) -> None:
    batch_id, objects = started_batch(rig, chunks=2), FakeObjects()
    await put_input(rig, batch_id, objects)
    for chunk, stored in enumerate([answers("a", "b", "c", "d"), content]):
        attempt = rig.assign(batch_id, chunk)
        ref = objects.add(finished(attempt).output.key, stored)  # type: ignore[union-attr]
        claimed = ref if chunk == 0 else ref.model_copy(update={"sha256": "1" * 64})
        rig.report(attempt, finished(attempt, output=ObjectRef.of(claimed)))
    await BatchResults(writer=rig.writer, objects=objects).finalize(batch_id)
    batch = of(rig, Batch, batch_id)
    assert batch["status"] == "completed"
    assert [line.tokens for line in batch["receipt"].lines] == [10, 10]
    errors = objects.stored[f"files/{derived_file_id(batch_id, 'error')}"]
    assert errors.count(b"engine_failed") == 4


async def test_answers_to_questions_that_a_chunk_does_not_have_are_no_answers(
    rig: ProductRig,
) -> None:
    batch_id, objects = started_batch(rig), FakeObjects()
    await put_input(rig, batch_id, objects)
    attempt = rig.assign(batch_id, 0)
    rig.run(batches.cancel_batch, batches.CancelBatch(rig.account_id, batch_id))
    ref = objects.add(finished(attempt).output.key, answers("x", "y"))  # type: ignore[union-attr]
    rig.report(attempt, finished(attempt, completed=2, cancelled=True, output=ObjectRef.of(ref)))
    await BatchResults(writer=rig.writer, objects=objects).finalize(batch_id)
    batch = of(rig, Batch, batch_id)
    assert (batch["status"], batch["receipt"]) == ("cancelled", None)


async def put_input(rig: ProductRig, batch_id: str, objects: FakeObjects) -> None:
    """Eight lines of a hundred bytes each four, as the rig plans them."""
    plan = of(rig, Batch, batch_id)["plan"]
    lines = [answers(each).rstrip().ljust(24) + b"\n" for each in "abcdefgh"]
    objects.add(of(rig, Batch, batch_id)["input"].key, b"".join(lines[: 4 * len(plan.chunks)]))


async def test_files_that_can_never_be_written_do_not_keep_a_batch_open(rig: ProductRig) -> None:
    batch_id, objects = started_batch(rig), FakeObjects()
    rig.finish_chunk(rig.assign(batch_id, 0))
    objects.failures = 10**6
    results = BatchResults(writer=rig.writer, objects=objects)
    rig.clock.advance(timedelta(hours=25))
    with pytest.raises(StoreAway):
        await results.finalize(batch_id)
    rig.clock.advance(timedelta(minutes=31))
    await results.finalize(batch_id)
    batch = of(rig, Batch, batch_id)
    assert (batch["status"], batch["receipt"]) == ("completed", None)
    rig.runner().catch_up()
    assert verify(rig.connection).differences == ()
