"""Work always ends: whatever comes late, never comes, or is lost, no hold stays open and no slot
taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from adapters.audit.verify import verify
from adapters.event_log.event_store import EventStore
from adapters.worker.batch_results import BatchResults
from adapters.worker.dispatcher import ASSIGNS_MAX, BEATS_BEFORE_REPEAT, Dispatcher
from adapters.worker.fleet import Fleet
from adapters.worker.watchdogs import Sweep
from domain import messages
from domain.assets.fine_tuned_model import FineTunedModel
from domain.commands import batches, files
from domain.commands import models as model_commands
from domain.commands import prices as price_commands
from domain.commands import work as work_commands
from domain.ids import derived_file_id, fine_tuned_model_name, step_metrics_file_id
from domain.inputs.batch_line import LineError
from domain.ledger.account import Account
from domain.ledger.key_spend import KeySpend
from domain.log.stored import Attempt
from domain.messages import (
    ChunkFinished,
    ChunkProgress,
    Heartbeat,
    ModelUsage,
    ObjectRef,
    Started,
)
from domain.ports import ObjectMissing
from domain.work.batch import STOP_WITHIN, Batch
from domain.work.scheduling import AssignedWork
from projections.registry import INLINE
from projections.work import open_work as work
from tests.conftest import Database
from tests.fakes import FakeBroker, FakeObjects
from tests.integration.product_rig import BASE, PRICES, ProductRig, batch_quote, chunk_plans


@pytest.fixture
def rig(database: Database) -> Iterator[ProductRig]:
    rig = ProductRig(database)
    yield rig
    rig.close()


def of(rig: ProductRig, cls: type[Any], id: str) -> Any:
    """The aggregate's fields as the writer has them."""
    return rig.run(lambda uow, asked: dict(vars(uow.get(cls, asked))), id)


def account(rig: ProductRig) -> Any:
    return of(rig, Account, rig.account_id)


def to_finalize(rig: ProductRig) -> list[str]:
    return [batch.work_id for batch in work.batches_to_finalize(rig.connection, limit=9)]


def end_window(rig: ProductRig, batch_id: str) -> None:
    rig.clock.advance(timedelta(hours=24))
    rig.run(work_commands.expire_work, work_commands.ExpireWork(batch_id))


def test_a_plan_that_comes_after_the_window_starts_nothing(rig: ProductRig) -> None:
    batch_id = rig.create_batch()
    end_window(rig, batch_id)
    rig.validate(batch_id)
    rig.start(batch_id)
    assert to_finalize(rig) == [batch_id]
    rig.finish_batch(batch_id, completed=0, failed=0)
    assert of(rig, Batch, batch_id)["status"] == "expired"
    assert (account(rig)["holds_nano_usd"], account(rig)["open_batches"]) == ({}, [])


def test_faults_that_are_found_after_the_window_do_not_change_how_a_batch_ends(
    rig: ProductRig,
) -> None:
    batch_id = rig.create_batch()
    end_window(rig, batch_id)
    fault = LineError(code="empty_file", message="Empty.", param=None, line=None)
    rig.run(batches.fail_batch, batches.FailBatch(batch_id, (fault,)))
    assert to_finalize(rig) == [batch_id]


def test_a_start_that_comes_after_the_window_holds_nothing(rig: ProductRig) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id)
    end_window(rig, batch_id)
    rig.start(batch_id)
    assert account(rig)["holds_nano_usd"] == {}
    assert to_finalize(rig) == [batch_id]
    rig.finish_batch(batch_id, completed=0, failed=8)
    assert of(rig, Batch, batch_id)["status"] == "expired"


@pytest.mark.parametrize("why", ["cancelled", "expired"])
def test_a_runner_that_does_not_stop_is_not_waited_for(rig: ProductRig, why: str) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id)
    rig.start(batch_id)
    rig.finish_chunk(rig.assign(batch_id, 0))
    stubborn = rig.assign(batch_id, 1)
    if why == "cancelled":
        rig.run(batches.cancel_batch, batches.CancelBatch(rig.account_id, batch_id))
    else:
        end_window(rig, batch_id)

    def overdue() -> list[str]:
        found = work.batches_not_stopping(rig.connection, now=rig.clock.now(), limit=9)
        for each in found or [batch_id]:
            rig.run(batches.stop_waiting, batches.StopWaiting(each))
        return found

    rig.clock.advance(STOP_WITHIN - timedelta(seconds=1))
    assert overdue() == []
    assert to_finalize(rig) == []
    rig.clock.advance(timedelta(seconds=1))
    assert overdue() == [batch_id]
    assert to_finalize(rig) == [batch_id]
    rig.finish_chunk(stubborn)
    assert of(rig, Batch, batch_id)["chunks"][1].result is None
    rig.finish_batch(batch_id, completed=4, failed=4)
    assert of(rig, Batch, batch_id)["status"] == why
    assert of(rig, Batch, batch_id)["receipt"].charge_nano_usd > 0
    assert account(rig)["holds_nano_usd"] == {}


def test_a_result_of_more_lines_than_the_chunk_has_is_a_failed_try(rig: ProductRig) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id)
    rig.start(batch_id)
    rig.report(rig.assign(batch_id, 0), ChunkFinished(completed=3, failed=2))
    chunk = of(rig, Batch, batch_id)["chunks"][0]
    assert (chunk.state, chunk.failures, chunk.result) == ("pending", 1, None)


def test_work_at_a_price_of_zero_starts_and_ends(rig: ProductRig) -> None:
    free = {name: 0 for name, amount in PRICES.models[BASE] if amount is not None}
    models = {**PRICES.models, BASE: PRICES.models[BASE].model_copy(update=free)}
    prices = PRICES.model_copy(
        update={"version": 2, "models": models, "effective_from": rig.clock.now()}
    )
    rig.run(price_commands.publish_prices, price_commands.PublishPrices(prices=prices))
    rig.job_that_succeeds()
    rig.runner().catch_up()
    assert account(rig)["charged_nano_usd"] == 0
    assert verify(rig.connection).differences == ()


def test_a_batch_of_many_events_loads_from_its_snapshot_as_it_is(
    rig: ProductRig, database: Database
) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id, chunks=3, lines=300)
    rig.start(batch_id)
    rig.finish_chunk(rig.assign(batch_id, 0), answered=300)
    attempt = rig.assign(batch_id, 1)
    for done in range(250):
        rig.report(attempt, ChunkProgress(completed=done + 1, failed=0))
    live = of(rig, Batch, batch_id)
    rows = rig.connection.execute(
        "SELECT originator_version AS version FROM gridline_snapshots WHERE originator_id = %s",
        (batch_id,),
    ).fetchall()
    assert rows[0]["version"] >= 200
    assert live["_version"] > rows[0]["version"]
    store = EventStore(database.application_url, projections=INLINE)
    try:
        loaded = store.load(Batch, batch_id)
    finally:
        store.close()
    assert loaded is not None
    assert vars(loaded) == live
    rig.runner().catch_up()
    assert verify(rig.connection).differences == ()


def test_a_key_of_much_work_loads_from_its_snapshot(rig: ProductRig, database: Database) -> None:
    def spend(uow: Any, number: int) -> None:
        key = uow.get(KeySpend, rig.key_id)
        key.reserve(f"batch_{number}", 7, envelope=uow.envelope)
        key.charge(f"batch_{number}", number % 8, envelope=uow.envelope)

    for number in range(150):
        rig.run(spend, number)
    live = of(rig, KeySpend, rig.key_id)
    row = rig.connection.execute(
        "SELECT originator_version AS version FROM gridline_snapshots WHERE originator_id = %s",
        (rig.key_id,),
    ).fetchone()
    assert row is not None
    assert 200 <= row["version"] < live["_version"]
    store = EventStore(database.application_url, projections=INLINE)
    try:
        loaded = store.load(KeySpend, rig.key_id)
    finally:
        store.close()
    assert vars(loaded) == live


# Adapters -------------------------------------------------------------------------------------


async def sweep(rig: ProductRig, objects: FakeObjects) -> set[str]:
    """What is left of adapters."""

    async def read(function: Callable[..., Any], **arguments: Any) -> Any:
        return function(rig.connection, **arguments)

    sweep = Sweep(writer=rig.writer, read=read, objects=objects, steady_seconds=lambda: 0.0)
    await sweep.sweep(lambda: None)
    return {key async for key in objects.list_keys("adapters/")}


async def test_an_open_batch_keeps_a_deleted_models_files_until_it_ends(rig: ProductRig) -> None:
    job_id = rig.job_that_succeeds()
    name = fine_tuned_model_name(BASE, rig.account_id, job_id)
    batch_id = rig.create_batch()
    plan = batches.RecordBatchPlan(
        batch_id=batch_id,
        chunks=chunk_plans(1),
        first_lines={name: 1},
        quote=batch_quote(requests=4, maximum_nano_usd=50_000_000, models=(BASE, name)),
    )
    rig.run(batches.record_batch_plan, plan)
    rig.start(batch_id)
    adapter = of(rig, Batch, batch_id)["plan"].adapters[0]
    kept = {adapter.config.key, adapter.weights.key}
    objects = FakeObjects()
    for key in kept:
        objects.add(key, b"an adapter")
    objects.add(f"adapters/{job_id}/7/adapter_model.safetensors", b"of an older attempt")
    assert await sweep(rig, objects) == kept
    keys = rig.run(model_commands.delete_model, model_commands.DeleteModel(rig.account_id, name))
    assert keys == ()
    assert await sweep(rig, objects) == kept
    rig.finish_chunk(rig.assign(batch_id, 0))
    rig.finish_batch(batch_id, completed=4, failed=0)
    assert await sweep(rig, objects) == set()


async def test_a_jobs_metrics_outlive_its_model_and_go_with_their_file(rig: ProductRig) -> None:
    job_id = rig.job_that_succeeds()
    objects = FakeObjects()
    metrics = f"adapters/{job_id}/1/step_metrics.csv"
    objects.add(metrics, b"step\n")
    objects.add(f"adapters/{job_id}/1/adapter_model.safetensors", b"an adapter")
    name = fine_tuned_model_name(BASE, rig.account_id, job_id)
    rig.run(model_commands.delete_model, model_commands.DeleteModel(rig.account_id, name))
    assert await sweep(rig, objects) == {metrics}
    file_id = step_metrics_file_id(job_id)
    rig.run(files.delete_file, files.DeleteFile(rig.account_id, file_id))
    assert await sweep(rig, objects) == set()


async def test_a_deleted_model_that_nothing_staged_goes_at_once(rig: ProductRig) -> None:
    name = fine_tuned_model_name(BASE, rig.account_id, rig.job_that_succeeds())
    keys = rig.run(model_commands.delete_model, model_commands.DeleteModel(rig.account_id, name))
    assert len(keys) == 2


def test_a_deleted_model_waits_for_no_batch_that_is_not_planned(rig: ProductRig) -> None:
    """A plan and a deletion that race meet on the model's stream: a plan that is later fails."""
    name = fine_tuned_model_name(BASE, rig.account_id, rig.job_that_succeeds())
    batch_id = rig.create_batch()
    delete = model_commands.DeleteModel(rig.account_id, name)
    assert len(rig.run(model_commands.delete_model, delete)) == 2
    rig.run(batches.record_batch_plan, plan_naming(name, batch_id))
    assert of(rig, Batch, batch_id)["status"] == "failed"


def test_a_model_knows_the_open_batches_that_run_on_it(rig: ProductRig) -> None:
    name = fine_tuned_model_name(BASE, rig.account_id, rig.job_that_succeeds())
    first, second = rig.create_batch(), rig.create_batch()
    for batch_id in (first, second):
        rig.run(batches.record_batch_plan, plan_naming(name, batch_id))
    assert of(rig, FineTunedModel, name)["staged_by"] == [first, second]
    rig.start(first)
    rig.run(batches.cancel_batch, batches.CancelBatch(rig.account_id, first))
    rig.finish_batch(first, completed=0, failed=4)
    assert of(rig, FineTunedModel, name)["staged_by"] == [second]
    rig.run(batches.cancel_batch, batches.CancelBatch(rig.account_id, second))
    rig.finish_batch(second, completed=0, failed=4)
    delete = model_commands.DeleteModel(rig.account_id, name)
    assert len(rig.run(model_commands.delete_model, delete)) == 2


def plan_naming(name: str, batch_id: str) -> batches.RecordBatchPlan:
    return batches.RecordBatchPlan(
        batch_id=batch_id,
        chunks=chunk_plans(1),
        first_lines={name: 1},
        quote=batch_quote(requests=4, maximum_nano_usd=50_000_000, models=(BASE, name)),
    )


async def test_a_running_trainings_files_are_not_swept(rig: ProductRig) -> None:
    job_id = rig.create_job()
    rig.start(job_id)
    rig.report(rig.assign(job_id), Started())
    objects = FakeObjects()
    key = f"adapters/{job_id}/1/adapter_model.safetensors"
    objects.add(key, b"just stored")
    assert await sweep(rig, objects) == {key}


# The minimum -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("succeeded", "applies"), [(11, True), (10, False)])
def test_cancelling_at_the_last_line_does_not_avoid_the_minimum(
    rig: ProductRig, succeeded: int, applies: bool
) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id, chunks=3)
    rig.start(batch_id)
    for chunk in range(2):
        rig.finish_chunk(rig.assign(batch_id, chunk))
    last = rig.assign(batch_id, 2)
    rig.run(batches.cancel_batch, batches.CancelBatch(rig.account_id, batch_id))
    rig.finish_chunk(last, answered=succeeded - 8)
    rig.finish_batch(batch_id, completed=succeeded, failed=12 - succeeded)
    receipt = of(rig, Batch, batch_id)["receipt"]
    assert receipt.minimum_applies is applies
    assert receipt.ended == "cancelled"
    assert receipt.decided_by == ("minimum" if applies else "tokens")


# Lost objects and runners that do not work ------------------------------------------------------


def chunk_object(objects: FakeObjects, attempt: Attempt, ids: range) -> ObjectRef:
    content = b"".join(b'{"custom_id":"%d"}\n' % number for number in ids)
    return ObjectRef.of(
        objects.add(f"chunks/{attempt.work_id}/{attempt.chunk}/1/output.jsonl", content)
    )


def file_lines(objects: FakeObjects, batch_id: str, role: str) -> list[dict[str, Any]]:
    stored = objects.stored[f"files/{derived_file_id(batch_id, role)}"]
    return [json.loads(line) for line in stored.splitlines()]


async def test_a_batch_whose_input_is_lost_ends_with_a_line_for_each_request(
    rig: ProductRig,
) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id)
    rig.start(batch_id)
    attempt, objects = rig.assign(batch_id, 0), FakeObjects()
    output = chunk_object(objects, attempt, range(3))
    rig.run(batches.cancel_batch, batches.CancelBatch(rig.account_id, batch_id))
    rig.report(attempt, ChunkFinished(completed=3, failed=0, output=output, cancelled=True))
    results = BatchResults(writer=rig.writer, objects=objects)
    with pytest.raises(ObjectMissing):
        await results.finalize(batch_id)
    rig.clock.advance(timedelta(hours=25))
    await results.finalize(batch_id)
    assert of(rig, Batch, batch_id)["status"] == "cancelled"
    lines = file_lines(objects, batch_id, "error")
    assert [line["custom_id"] for line in lines] == [None] * 5
    assert {line["error"]["code"] for line in lines} == {"batch_cancelled"}
    assert len({line["id"] for line in lines}) == 5


async def test_a_result_that_the_store_lost_costs_nothing_and_does_not_keep_the_batch_open(
    rig: ProductRig,
) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id)
    rig.start(batch_id)
    objects = FakeObjects()
    usage = (ModelUsage(model=BASE, input_tokens=1_000_000, output_tokens=0),)
    for chunk in (0, 1):
        attempt = rig.assign(batch_id, chunk)
        output = chunk_object(objects, attempt, range(4))
        rig.report(attempt, ChunkFinished(completed=4, failed=0, output=output, usage=usage))
    await objects.delete(f"chunks/{batch_id}/1/1/output.jsonl")
    results = BatchResults(writer=rig.writer, objects=objects)
    with pytest.raises(ObjectMissing):
        await results.finalize(batch_id)
    assert to_finalize(rig) == [batch_id]
    rig.clock.advance(timedelta(hours=25))
    await results.finalize(batch_id)
    batch = of(rig, Batch, batch_id)
    assert batch["status"] == "completed"
    assert len(file_lines(objects, batch_id, "output")) == 4
    assert len(file_lines(objects, batch_id, "error")) == 4
    assert [line.tokens for line in batch["receipt"].lines] == [1_000_000, 0]
    rig.runner().catch_up()
    assert verify(rig.connection).differences == ()


class _Beats:
    """A runner that beats and names nothing, and the dispatcher that sends it work."""

    def __init__(self, rig: ProductRig) -> None:
        self.rig = rig
        self.broker = FakeBroker()
        self.fleet = Fleet(
            lease_seconds=30, heartbeat_seconds=3, slots_max=9, steady_seconds=lambda: 0.0
        )
        self.dispatcher = Dispatcher(
            writer=rig.writer,
            producer=self.broker,
            fleet=self.fleet,
            broker_answers=self._answers,
        )

    async def _answers(self) -> bool:
        return True

    async def until_given_back(self, running: tuple[Attempt, ...] = ()) -> int:
        """Rounds with the assigned work of the log, as many as it takes; the assigns sent."""
        for _ in range(BEATS_BEFORE_REPEAT * (ASSIGNS_MAX + 2)):
            beat = Heartbeat(
                runner_id="runner_a",
                gpu_class="cpu",
                sent_at=self.rig.clock.now(),
                slots={"batch_chunk": 1, "train": 1},
                running=tuple(messages.Attempt.of(attempt) for attempt in running),
            )
            self.fleet.hear(beat)
            assigned: tuple[AssignedWork, ...] = work.assigned(self.rig.connection)
            await self.dispatcher.reconcile(assigned)
        return sum(len(records) for records in self.broker.topics.values())


async def test_work_that_a_runner_does_not_take_is_given_to_another(rig: ProductRig) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id)
    rig.start(batch_id)
    rig.assign(batch_id, 0)
    assert await _Beats(rig).until_given_back() == ASSIGNS_MAX
    assert work.assigned(rig.connection) == ()
    assert rig.assign(batch_id, 0, runner_id="runner_b").attempt == 2


async def test_work_that_a_runner_names_stays_with_it(rig: ProductRig) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id)
    rig.start(batch_id)
    attempt = rig.assign(batch_id, 0)
    assert await _Beats(rig).until_given_back(running=(attempt,)) == 0
    assert [each.attempt for each in work.assigned(rig.connection)] == [attempt]


async def test_a_training_that_began_is_left_to_its_deadline(rig: ProductRig) -> None:
    job_id = rig.create_job()
    rig.start(job_id)
    attempt = rig.assign(job_id)
    rig.report(attempt, Started())
    assert await _Beats(rig).until_given_back() > ASSIGNS_MAX, "it is still asked for its report"
    assert [each.attempt for each in work.assigned(rig.connection)] == [attempt]
