"""Trainings through the worker, and both kinds of work through a real runner on the echo engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from adapters import kafka
from adapters.process.settings import Settings
from domain.catalog import CATALOG
from domain.messages import Assign, Revoke, Started, TrainProgress
from gpu_runners.parent.runner import Runner
from gpu_runners.weights.store import Weights
from tests.conftest import Database
from tests.integration.worker_rig import (
    WAIT_SECONDS_MAX,
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


async def test_a_training_and_a_batch_on_its_model_run_on_a_real_runner(rig: Rig) -> None:
    runner_id = "runner_real"
    producer = await kafka.producer(rig.settings)
    consumer = await kafka.runner_consumer(rig.settings, runner_id)
    weights_root = Path(rig.settings.weights_dir)
    async with Runner(
        runner_id=runner_id,
        settings=rig.settings,
        producer=producer,
        consumer=consumer,
        objects=rig.plane.objects,
        clock=rig.plane.clock,
        weights=Weights(weights_root),
        bases=tuple(CATALOG),
        broker_answers=lambda: kafka.answers(rig.settings.kafka_bootstrap),
    ) as runner:
        running = asyncio.create_task(runner.run())
        job_id = await rig.create_job()
        job = await rig.job_when(job_id, "succeeded")
        assert (await rig.credit())["charged_nano_usd"] == job["receipt"].charge_nano_usd > 0
        model = (await rig.rows("SELECT id FROM models"))[0]["id"]
        lines = chat_lines(6) + chat_lines(6, model=model)
        for number, line in enumerate(lines):
            line["custom_id"] = f"request-{number}"
        batch_id = await rig.create_batch(lines)
        await rig.batch_when(batch_id, "completed")
        runner.stop()
        await running
    await consumer.stop()
    await producer.stop()
    answers = await rig.result_lines(batch_id, "output")
    assert [line["custom_id"] for line in answers] == [line["custom_id"] for line in lines]
    models = [line["response"]["body"]["model"] for line in answers]
    assert models == [line["body"]["model"] for line in lines]
    assert (await rig.credit())["holds_nano_usd"] == {}


async def test_a_second_training_of_an_account_waits_for_the_first(rig: Rig) -> None:
    first, second = await rig.create_job(), await rig.create_job()
    async with scripted_runner(rig, "runner_a", slots=2) as runner:
        running = await runner.next_assign()
        assert running.attempt.work_id == first

        async def waits() -> bool:
            waiting_for: str | None = (await rig.job(second))["waiting_for"]
            return waiting_for == "account_capacity"

        await eventually(waits)
        await rig.cancel_job(first)
        assert await runner.next_of(Revoke) == running.attempt
        runner.running.remove(running.attempt)
        assert (await runner.next_assign()).attempt.work_id == second


async def test_a_training_that_no_runner_takes_says_that_it_waits_for_one(rig: Rig) -> None:
    job_id = await rig.create_job()

    async def explains() -> bool:
        job = await rig.job(job_id)
        return (job["status"], job["waiting_for"]) == ("queued", "gridline_capacity")

    await eventually(explains)
    async with scripted_runner(rig, "runner_a") as runner:
        attempt = (await runner.next_assign()).attempt
        await runner.send_report(runner.report(attempt, Started(), seq=1))
        assert (await rig.job_when(job_id, "running"))["waiting_for"] is None


async def begun(rig: Rig, runner_id: str) -> tuple[str, Assign]:
    """A job whose training has begun on a runner that is then heard of no more."""
    job_id = await rig.create_job()
    async with scripted_runner(rig, runner_id) as runner:
        assigned = await runner.next_assign()
        await runner.send_report(runner.report(assigned.attempt, Started(), seq=1))
        await rig.job_when(job_id, "running")
        progress = TrainProgress(step=1, steps=9, trained_tokens=50, train_loss=2.0)
        await runner.send_report(runner.report(assigned.attempt, progress, seq=2))

        async def told() -> bool:
            return bool((await rig.job(job_id))["trained_tokens"])

        await eventually(told)
    return job_id, assigned


async def test_a_training_whose_runner_is_lost_fails_and_costs_nothing(rig: Rig) -> None:
    job_id, _ = await begun(rig, "runner_a")
    await rig.job_when(job_id, "failed")
    rows = await rig.rows("SELECT error_code FROM fine_tuning_jobs")
    assert rows == [{"error_code": "platform_interrupted"}]
    account = await rig.credit()
    assert (account["charged_nano_usd"], account["holds_nano_usd"]) == (0, {})
    assert (account["open_fine_tunes"], account["training_job_id"]) == ([], None)


async def test_a_training_that_never_began_is_given_to_another_runner(rig: Rig) -> None:
    job_id = await rig.create_job()
    async with scripted_runner(rig, "runner_a") as runner:
        await runner.next_assign()
    async with scripted_runner(rig, "runner_b") as runner:
        assigned = await runner.next_assign()
    assert (assigned.attempt.work_id, assigned.attempt.attempt) == (job_id, 2)


async def test_a_training_past_its_time_limit_expires(
    database: Database, broker_settings: Settings, tmp_path: Path
) -> None:
    async with running_worker(database, broker_settings, tmp_path, lease_seconds=600.0) as rig:
        job_id, _ = await begun(rig, "runner_a")
        rig.move_clock(timedelta(hours=3))
        await rig.job_when(job_id, "failed")
        rows = await rig.rows("SELECT error_code FROM fine_tuning_jobs")
        assert rows == [{"error_code": "job_expired"}]
        assert (await rig.credit())["holds_nano_usd"] == {}


async def test_a_job_that_no_runner_takes_within_a_day_of_waiting_is_unavailable(rig: Rig) -> None:
    job_id = await rig.create_job()
    await rig.job_when(job_id, "queued")
    rig.move_clock(timedelta(hours=49))
    await rig.job_when(job_id, "failed")
    rows = await rig.rows("SELECT error_code FROM fine_tuning_jobs")
    assert rows == [{"error_code": "job_unavailable"}]


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("qwen2.5-7b-instruct", "qlora"),
        ("gpt-oss-20b", None),
        ("qwen2.5-0.5b-instruct", {"type": "dpo"}),
    ],
)
async def test_a_training_that_needs_48_gb_waits_for_a_runner_that_has_them(
    rig: Rig, model: str, method: dict[str, str] | str | None
) -> None:
    async with scripted_runner(rig, "runner_24", gpu_class="gpu-24gb") as small:
        job_id = await rig.create_job(model=model, method=method)

        async def told() -> bool:
            return (await rig.job(job_id))["waiting_for"] == "gridline_capacity"

        await eventually(told)
        async with scripted_runner(rig, "runner_48", gpu_class="gpu-48gb") as large:
            assert (await large.next_assign()).attempt.work_id == job_id
        assert small.inbox.empty()


async def test_a_worker_process_does_the_work_and_ends_soon_when_asked(rig: Rig) -> None:
    await rig.stop_worker()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "adapters.worker",
        env={**os.environ, **rig.settings.to_environment()},
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        batch_id = await rig.create_batch(chat_lines(2))
        async with scripted_runner(rig, "runner_a") as runner:
            await runner.finish(await runner.next_assign())
            await rig.batch_when(batch_id, "completed")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            assert await process.wait() == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
