"""Batches through the worker: from create to the end, and through what can go wrong on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from adapters.operators.actions import Operator, shipped_prices
from adapters.process.settings import Settings
from adapters.worker import watchdogs
from adapters.worker.watchdogs import UNKNOWN_OBJECT_SECONDS, Sweep
from domain.ids import derived_file_id
from domain.ledger.account import AccountLimits
from domain.messages import PROGRESS_TOPIC, Cancel, ChunkProgress, Revoke
from domain.work.batch import CHUNK_FAILURES_MAX
from tests.conftest import Database
from tests.integration.worker_rig import (
    BASE,
    Rig,
    chat_lines,
    eventually,
    running_worker,
    scripted_runner,
)


@pytest.fixture
async def rig(database: Database, broker_settings: Settings, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_worker(database, broker_settings, tmp_path) as running:
        yield running


async def ids_of(rig: Rig, batch_id: str) -> tuple[list[str], list[str]]:
    """The custom ids of both result files."""
    output = await rig.result_lines(batch_id, "output")
    errors = await rig.result_lines(batch_id, "error")
    return [line["custom_id"] for line in output], [line["custom_id"] for line in errors]


async def keys_of(rig: Rig) -> set[str]:
    """The keys of all objects of batches and files."""
    objects = rig.plane.objects
    return {key for prefix in ("chunks/", "files/") async for key in objects.list_keys(prefix)}


async def test_a_batch_runs_chunk_by_chunk_and_is_charged_once(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(10))
    async with scripted_runner(rig, "runner_a") as runner:
        for _ in range(3):
            await runner.finish(await runner.next_assign())
        batch = await rig.batch_when(batch_id, "completed")
    output, errors = await ids_of(rig, batch_id)
    assert output == [f"request-{n}" for n in range(10)]
    assert errors == []
    account = await rig.credit()
    assert account["charged_nano_usd"] == batch["receipt"].charge_nano_usd > 0
    assert account["holds_nano_usd"] == {}
    assert account["open_batches"] == []

    async def chunks_are_gone() -> bool:
        return [key async for key in rig.plane.objects.list_keys("chunks/")] == []

    await eventually(chunks_are_gone)


async def test_a_lost_runner_costs_only_what_it_had_not_finished(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(8))
    async with scripted_runner(rig, "runner_a") as lost, scripted_runner(rig, "runner_b") as other:
        other.slots = 0
        await lost.finish(await lost.next_assign())
        left = await lost.next_assign()
        lost.silent = True
        other.slots = 1
        again = await other.next_assign()
        assert again.attempt.chunk == left.attempt.chunk
        assert again.attempt.attempt == 2
        # The lost one comes back, still at it: it is told to stop, and its answers do not count.
        lost.silent = False
        assert await lost.next_of(Revoke) == left.attempt
        await lost.send_report(await lost.finished(left))
        await other.finish(again)
        await rig.batch_when(batch_id, "completed")
    lines = await rig.result_lines(batch_id, "output")
    by = [line["response"]["body"]["by"] for line in lines]
    assert by == ["runner_a"] * 4 + ["runner_b"] * 4


async def test_a_runner_that_leaves_gives_its_work_back_at_once(
    database: Database, broker_settings: Settings, tmp_path: Path
) -> None:
    async with running_worker(database, broker_settings, tmp_path, lease_seconds=600.0) as rig:
        batch_id = await rig.create_batch(chat_lines(2))
        async with scripted_runner(rig, "runner_a") as leaving:
            await leaving.next_assign()
            leaving.silent = True
            await leaving.beat(stopping=True)

            async def forgotten() -> bool:
                return not await rig.rows("SELECT runner_id FROM runners")

            await eventually(forgotten)
            async with scripted_runner(rig, "runner_b") as other:
                await other.finish(await other.next_assign())
                await rig.batch_when(batch_id, "completed")


async def test_a_report_that_comes_after_its_runners_goodbye_still_counts(
    database: Database, broker_settings: Settings, tmp_path: Path
) -> None:
    async with running_worker(database, broker_settings, tmp_path, lease_seconds=600.0) as rig:
        batch_id = await rig.create_batch(chat_lines(2))
        async with scripted_runner(rig, "runner_a") as leaving:
            message = await leaving.next_assign()
            report = await leaving.finished(message)
            leaving.silent = True
            leaving.running.clear()
            await leaving.beat(stopping=True)

            async def forgotten() -> bool:
                return not await rig.rows("SELECT runner_id FROM runners")

            await eventually(forgotten)
            await leaving.send_report(report)
            await rig.batch_when(batch_id, "completed")


async def test_what_a_draining_runner_has_not_begun_goes_to_another(
    database: Database, broker_settings: Settings, tmp_path: Path
) -> None:
    async with running_worker(database, broker_settings, tmp_path, lease_seconds=600.0) as rig:
        batch_id = await rig.create_batch(chat_lines(2))
        async with scripted_runner(rig, "runner_a") as draining:
            await draining.next_assign()
            draining.draining = True
            draining.running.clear()
            async with scripted_runner(rig, "runner_b") as other:
                message = await other.next_assign()
                assert message.attempt.attempt == 2
                await other.finish(message)
                await rig.batch_when(batch_id, "completed")


async def test_a_draining_runner_finishes_what_it_runs_and_gets_nothing_more(rig: Rig) -> None:
    first = await rig.create_batch(chat_lines(2))
    async with scripted_runner(rig, "runner_a") as draining:
        running = await draining.next_assign()
        draining.draining = True
        async with scripted_runner(rig, "runner_b") as other:
            second = await rig.create_batch(chat_lines(2))
            await other.finish(await other.next_assign())
            await rig.batch_when(second, "completed")
            await draining.finish(running)
            await rig.batch_when(first, "completed")
            await rig.create_batch(chat_lines(2))
            assert (await other.next_assign()).attempt.runner_id == "runner_b"


async def test_an_assignment_that_got_lost_is_sent_again(rig: Rig) -> None:
    await rig.create_batch(chat_lines(2))
    async with scripted_runner(rig, "runner_a") as runner:
        first = await runner.next_assign()
        runner.running.clear()
        again = await runner.next_assign()
        assert again == first


async def test_cancelling_keeps_what_is_finished_and_says_so_of_the_rest(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(10))
    async with scripted_runner(rig, "runner_a") as runner:
        running = await runner.next_assign()
        await rig.cancel_batch(batch_id)
        assert await runner.next_of(Cancel) == running.attempt
        await runner.finish(running, answered=3)
        batch = await rig.batch_when(batch_id, "cancelled")
    output, errors = await ids_of(rig, batch_id)
    assert output == ["request-0", "request-1", "request-2"]
    assert errors == [f"request-{n}" for n in range(3, 10)]
    lines = await rig.result_lines(batch_id, "error")
    assert {line["error"]["code"] for line in lines} == {"batch_cancelled"}
    assert {line["response"] for line in lines} == {None}
    assert not batch["receipt"].minimum_applies
    account = await rig.credit()
    assert account["charged_nano_usd"] == batch["receipt"].charge_nano_usd
    assert account["holds_nano_usd"] == {}


async def test_a_batch_cancelled_before_it_runs_ends_without_files(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(3))
    await rig.cancel_batch(batch_id)
    await rig.batch_when(batch_id, "cancelled")
    assert (await rig.credit())["charged_nano_usd"] == 0
    assert (await rig.credit())["open_batches"] == []


async def test_the_end_of_the_window_stops_a_batch(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(6))
    async with scripted_runner(rig, "runner_a") as runner:
        await runner.finish(await runner.next_assign())
        running = await runner.next_assign()
        rig.move_clock(timedelta(hours=24))
        assert await runner.next_of(Cancel) == running.attempt
        await runner.finish(running, answered=0)
        await rig.batch_when(batch_id, "expired")
    output, errors = await ids_of(rig, batch_id)
    assert output == [f"request-{n}" for n in range(4)]
    assert errors == ["request-4", "request-5"]
    lines = await rig.result_lines(batch_id, "error")
    assert {line["error"]["code"] for line in lines} == {"batch_expired"}


async def test_a_chunk_that_always_fails_becomes_error_lines(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(6))
    async with scripted_runner(rig, "runner_a") as runner:
        for _ in range(CHUNK_FAILURES_MAX + 1):
            assigned = await runner.next_assign()
            if assigned.attempt.chunk == 0:
                await runner.fail(assigned)
            else:
                await runner.finish(assigned)
        batch = await rig.batch_when(batch_id, "completed")
    output, errors = await ids_of(rig, batch_id)
    assert output == ["request-4", "request-5"]
    assert errors == [f"request-{n}" for n in range(4)]
    bodies = [line["response"] for line in await rig.result_lines(batch_id, "error")]
    assert {body["status_code"] for body in bodies} == {500}
    assert batch["receipt"].minimum_applies
    assigned = await rig.rows(
        "SELECT convert_from(state, 'UTF8')::jsonb #>> '{envelope,command_id}' AS command_id "
        "FROM gridline_events WHERE topic = 'gridline.batch.attempt_assigned'"
    )
    assert len(assigned) == len({row["command_id"] for row in assigned}) == CHUNK_FAILURES_MAX + 1


async def test_reports_delivered_three_times_in_any_order_change_nothing(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(12))
    async with scripted_runner(rig, "runner_a", slots=3) as runner:
        reports = []
        for _ in range(3):
            assigned = await runner.next_assign()
            progress = ChunkProgress(completed=2, failed=0)
            reports.append(runner.report(assigned.attempt, progress, seq=1))
            reports.append(await runner.finished(assigned))
            runner.ended[assigned.attempt] = reports[-1]
        deliveries = reports * 3
        random.Random(3).shuffle(deliveries)
        for report in deliveries:
            await runner.send_report(report)
        runner.running.clear()
        batch = await rig.batch_when(batch_id, "completed")
        # Everything sent before this one has been taken in once it was.
        for report in reports * 2:
            await runner.send_report(report)
        marker = await rig.create_batch(chat_lines(1))
        await runner.finish(await runner.next_assign())
        await rig.batch_when(marker, "completed")
    output, _ = await ids_of(rig, batch_id)
    assert output == [f"request-{n}" for n in range(12)]
    events = await rig.events(batch_id)
    assert events.count("gridline.batch.chunk_finished") == 3
    assert events.count("gridline.batch.finished") == 1
    assert (await rig.batch(batch_id))["receipt"] == batch["receipt"]


async def test_a_message_that_cannot_be_read_is_set_aside_and_the_rest_goes_on(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(1))
    async with scripted_runner(rig, "runner_a") as runner:
        assigned = await runner.next_assign()
        await runner.producer.send(PROGRESS_TOPIC, key=batch_id, value=b'{"secret": "row"')
        await runner.finish(assigned)
        await rig.batch_when(batch_id, "completed")
    letters = await rig.rows("SELECT reason, topic, sha256 FROM dead_letters")
    assert [(row["reason"], row["topic"]) for row in letters] == [("unreadable", PROGRESS_TOPIC)]


async def test_a_worker_that_starts_again_goes_on_where_the_last_one_stopped(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(8))
    async with scripted_runner(rig, "runner_a") as runner:
        await runner.finish(await runner.next_assign())
        running = await runner.next_assign()
        await rig.stop_worker()
        await runner.finish(running)
        rig.start_worker()
        await rig.batch_when(batch_id, "completed")
    output, _ = await ids_of(rig, batch_id)
    assert output == [f"request-{n}" for n in range(8)]
    assert (await rig.events(batch_id)).count("gridline.batch.attempt_assigned") == 2


async def test_a_standby_takes_over_and_the_two_never_do_the_same_twice(rig: Rig) -> None:
    first = rig.worker
    rig.start_worker()
    second = rig.worker
    batch_id = await rig.create_batch(chat_lines(8))
    async with scripted_runner(rig, "runner_a") as runner:
        await runner.finish(await runner.next_assign())
        rig.worker = first
        await rig.stop_worker()
        rig.worker = second
        await runner.finish(await runner.next_assign())
        await rig.batch_when(batch_id, "completed")
    assert (await rig.events(batch_id)).count("gridline.batch.chunk_finished") == 2


async def test_finalising_again_after_a_crash_gives_the_same_files(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(4))
    key = f"files/{derived_file_id(batch_id, 'output')}"

    async def left_by_a_crash() -> AsyncIterator[bytes]:
        yield b'{"half": "a file"'

    await rig.plane.objects.put(key, left_by_a_crash())
    async with scripted_runner(rig, "runner_a") as runner:
        await runner.finish(await runner.next_assign())
        await rig.batch_when(batch_id, "completed")
    output, _ = await ids_of(rig, batch_id)
    assert output == [f"request-{n}" for n in range(4)]


async def test_a_batch_with_faulty_lines_fails_with_all_of_them_and_costs_nothing(
    rig: Rig,
) -> None:
    lines = chat_lines(5)
    lines[1]["custom_id"] = "request-0"
    lines[3]["body"]["model"] = "gpt-4"
    batch_id = await rig.create_batch(lines)
    await rig.batch_when(batch_id, "failed")
    rows = await rig.rows("SELECT errors FROM batches")
    found = [(error["code"], error["line"]) for error in rows[0]["errors"]]
    assert found == [("duplicate_custom_id", 2), ("model_not_found", 4)]
    account = await rig.credit()
    assert (account["charged_nano_usd"], account["open_batches"]) == (0, [])


async def test_a_batch_on_a_base_without_a_published_price_fails_and_says_so(rig: Rig) -> None:
    shipped = shipped_prices()
    without = {name: prices for name, prices in shipped.models.items() if name != BASE}
    newer = {"version": 2, "models": without, "effective_from": rig.plane.clock.now()}
    operator = Operator(rig.plane.writer)
    await asyncio.to_thread(operator.publish_prices, shipped.model_copy(update=newer))
    batch_id = await rig.create_batch(chat_lines(1))
    await rig.batch_when(batch_id, "failed")
    rows = await rig.rows("SELECT errors FROM batches")
    (error,) = rows[0]["errors"]
    assert (error["code"], error["param"]) == ("model_not_priced", "body.model")
    assert f"{BASE} has no published price" in error["message"]


async def test_a_batch_whose_input_is_gone_fails(rig: Rig) -> None:
    await rig.stop_worker()
    batch_id = await rig.create_batch(chat_lines(1))
    batch = await rig.batch(batch_id)
    await rig.plane.objects.delete(batch["input"].key)
    rig.start_worker()
    await rig.batch_when(batch_id, "failed")


async def test_a_batch_beyond_the_credit_fails_and_nothing_runs(
    database: Database, broker_settings: Settings, tmp_path: Path
) -> None:
    async with running_worker(database, broker_settings, tmp_path, credit_usd="0.001") as rig:
        batch_id = await rig.create_batch(chat_lines(2))
        await rig.batch_when(batch_id, "failed")
        rows = await rig.rows("SELECT errors FROM batches")
        assert [(e["code"], e["line"]) for e in rows[0]["errors"]] == [("insufficient_quota", None)]


async def test_a_batch_waits_for_what_another_one_may_give_back(
    database: Database, broker_settings: Settings, tmp_path: Path
) -> None:
    async with (
        running_worker(database, broker_settings, tmp_path, credit_usd="0.015") as rig,
        scripted_runner(rig, "runner_a") as runner,
    ):
        first = await rig.create_batch(chat_lines(2))
        running = await runner.next_assign()
        second = await rig.create_batch(chat_lines(2))
        await rig.batch_when(
            second, "validating", among=lambda batch: batch["waiting_for"] == "customer_credit"
        )
        await rig.cancel_batch(first)
        await runner.finish(running, answered=0)
        await rig.batch_when(first, "cancelled")
        await rig.batch_when(second, "in_progress")


async def test_files_past_their_time_are_forgotten_with_their_bytes(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(1))
    async with scripted_runner(rig, "runner_a") as runner:
        await runner.finish(await runner.next_assign())
        await rig.batch_when(batch_id, "completed")
    rig.move_clock(timedelta(days=31))

    async def gone() -> bool:
        return not await rig.result_lines(batch_id, "output")

    await eventually(gone)
    deleted = await rig.rows("SELECT id FROM files WHERE deleted_at IS NOT NULL")
    assert derived_file_id(batch_id, "output") in [row["id"] for row in deleted]


async def test_of_much_progress_few_events_are_made_and_no_result_is_dropped(
    database: Database, broker_settings: Settings, tmp_path: Path
) -> None:
    async with (
        running_worker(database, broker_settings, tmp_path, progress_event_seconds=600.0) as rig,
        scripted_runner(rig, "runner_a") as runner,
    ):
        batch_id = await rig.create_batch(chat_lines(8))
        for _ in range(2):
            assigned = await runner.next_assign()
            for done in range(1, 4):
                progress = ChunkProgress(completed=done, failed=0)
                await runner.send_report(runner.report(assigned.attempt, progress, seq=done))
            await runner.finish(assigned)
        await rig.batch_when(batch_id, "completed")
        events = await rig.events(batch_id)
        assert events.count("gridline.batch.progressed") <= 1
        assert events.count("gridline.batch.chunk_finished") == 2


async def test_the_sweep_removes_what_nothing_refers_to_and_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdogs, "PAGE_KEYS", 2)
    batch_id = await rig.create_batch(chat_lines(1))
    async with scripted_runner(rig, "runner_a") as runner:
        await runner.finish(await runner.next_assign())
        await rig.batch_when(batch_id, "completed")
        open_batch = await rig.create_batch(chat_lines(1))
        await runner.next_assign()

        async def content() -> AsyncIterator[bytes]:
            yield b"left behind"

        for key in (f"chunks/{batch_id}/0/9/output.jsonl", f"chunks/{open_batch}/0/9/output.jsonl"):
            await rig.plane.objects.put(key, content())
        await rig.plane.objects.put("files/file-unknown", content())
        seconds = 0.0
        pages: list[None] = []
        sweep = Sweep(
            writer=rig.plane.writer,
            read=rig.plane.read,
            objects=rig.plane.objects,
            steady_seconds=lambda: seconds,
        )
        before = await keys_of(rig)
        await sweep.sweep(lambda: pages.append(None))
        once = await keys_of(rig)
        assert before - once == {f"chunks/{batch_id}/0/9/output.jsonl"}
        seconds = UNKNOWN_OBJECT_SECONDS + 1
        await sweep.sweep(lambda: pages.append(None))
        assert once - await keys_of(rig) == {"files/file-unknown"}
        assert pages


async def test_large_batches_of_one_account_delay_nobodys_single_line(rig: Rig) -> None:
    await rig.stop_worker()
    text = "hello " * 20_000
    large = [await rig.create_batch(chat_lines(80, text=text)) for _ in range(4)]
    another = Operator(rig.plane.writer).open_account(
        email="b@c.d", credit_usd="5", limits=AccountLimits(open_fine_tunes=1, open_batches=1)
    )
    single = await replace(rig, account=another).create_batch(chat_lines(1))
    rig.start_worker()
    await rig.batch_when(single, "in_progress")
    planned = await rig.rows(
        "SELECT originator_id AS id FROM gridline_events "
        "WHERE topic = 'gridline.batch.validated' ORDER BY notification_id"
    )
    assert planned[0]["id"] == single
    assert {row["id"] for row in planned} <= {single, *large}
