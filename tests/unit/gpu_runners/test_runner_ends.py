"""How a runner ends: drained when that is planned, and by itself when it could only look alive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from domain.messages import TrainFinished
from domain.ports import Record
from gpu_runners.parent.contact import RunnerBroken
from tests.fakes import BrokerDown, FakeBroker
from tests.unit.gpu_runners.running_runner import (
    SETTINGS,
    always,
    beats,
    chat,
    finished,
    running_runner,
    training,
)

IMPATIENT = replace(SETTINGS, lease_seconds=0.2)
SLOW = [chat("echo-delay-ms=30") for _ in range(20)]


class DeafBroker(FakeBroker):
    """Takes nothing from its producer while `deaf`, as from one whose sender has died."""

    def __init__(self) -> None:
        super().__init__()
        self.deaf = True

    async def send(self, topic: str, *, key: str, value: bytes) -> None:
        if self.deaf:
            raise BrokerDown
        await super().send(topic, key=key, value=value)


class BrokenConsumer:
    """Ends its reader's task, as aiokafka does when it is cancelled within."""

    async def poll(self, *, timeout_seconds: float) -> Sequence[Record]:
        raise asyncio.CancelledError

    async def stop(self) -> None:
        """Nothing to close."""


class HangingConsumer(BrokenConsumer):
    """Never answers."""

    async def poll(self, *, timeout_seconds: float) -> Sequence[Record]:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_drained_runner_finishes_and_reports_what_runs_and_begins_nothing(
    tmp_path: Path,
) -> None:
    async with running_runner(tmp_path) as bench:
        chunk = await bench.assign(bench.chunk(SLOW))
        trained = await bench.assign(
            training(bench.objects, rows=10, text="echo-step-ms=50"), work_id="ftjob-1"
        )
        await bench.heartbeat(lambda beat: set(beat.running) == {chunk, trained})
        bench.runner.drain()
        draining = await bench.heartbeat(lambda beat: beat.draining)
        late = await bench.assign(bench.chunk([chat("late")]), work_id="batch_2")
        await bench.serving
    assert set(draining.running) == {chunk, trained}
    assert finished(bench.finals(chunk)[0]).completed == len(SLOW)
    assert isinstance(bench.finals(trained)[0].body, TrainFinished)
    assert bench.finals(late) == []
    last = beats(bench.broker.topics["runners"])[-1]
    assert (last.stopping, last.running) == (True, ())


async def test_a_drained_runner_repeats_the_report_of_what_ended(tmp_path: Path) -> None:
    async with running_runner(tmp_path) as bench:
        task = bench.chunk([chat("one")])
        ended = await bench.assign(task)
        await bench.final(ended)
        await bench.assign(bench.chunk([chat("echo-delay-ms=1500")]), work_id="batch_2")
        await bench.heartbeat(lambda beat: bool(beat.running))
        bench.runner.drain()
        await bench.assign(task)
        await bench.broker.wait_for("progress", lambda _: len(bench.finals(ended)) == 2)
        await bench.serving


async def test_an_idle_runner_that_is_drained_ends_at_once(tmp_path: Path) -> None:
    async with running_runner(tmp_path) as bench, asyncio.timeout(5):
        await bench.heartbeat(lambda beat: not beat.draining)
        bench.runner.drain()
        await bench.serving


async def test_what_is_not_done_when_the_grace_ends_is_handed_over(tmp_path: Path) -> None:
    settings = replace(SETTINGS, drain_seconds=0.3)
    async with running_runner(tmp_path, settings) as bench:
        attempt = await bench.assign(bench.chunk([chat("echo-delay-ms=60000")]))
        await bench.heartbeat(lambda beat: attempt in beat.running)
        bench.runner.drain()
        await bench.serving
    last = beats(bench.broker.topics["runners"])[-1]
    assert (last.stopping, last.running) == (True, (attempt,))


async def test_a_second_stop_does_not_wait_for_the_work(tmp_path: Path) -> None:
    async with running_runner(tmp_path) as bench, asyncio.timeout(20):
        attempt = await bench.assign(bench.chunk([chat("echo-delay-ms=60000")]))
        await bench.heartbeat(lambda beat: attempt in beat.running)
        bench.runner.drain()
        bench.runner.drain()
        await bench.serving
    assert beats(bench.broker.topics["runners"])[-1].running == (attempt,)


async def broken(tmp_path: Path, **options: object) -> str:
    """Why a runner with these options ended by itself."""
    with pytest.raises(RunnerBroken) as end:
        async with asyncio.timeout(20), running_runner(tmp_path, IMPATIENT, **options) as bench:  # type: ignore[arg-type]
            await asyncio.wait({bench.serving})
    return str(end.value)


async def test_a_loop_that_ends_unasked_ends_the_runner(tmp_path: Path) -> None:
    assert "'work'" in await broken(tmp_path, consumer=BrokenConsumer())


async def test_a_runner_whose_heartbeats_nobody_takes_ends_though_the_broker_is_well(
    tmp_path: Path,
) -> None:
    assert "heartbeats" in await broken(tmp_path, broker=DeafBroker(), broker_answers=always)


async def test_a_runner_that_no_longer_hears_of_work_ends_though_the_broker_is_well(
    tmp_path: Path,
) -> None:
    assert "work messages" in await broken(tmp_path, consumer=HangingConsumer())


async def test_a_runner_outlives_a_broker_that_is_away(tmp_path: Path) -> None:
    broker = DeafBroker()
    asked = 0

    async def away() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            broker.deaf = False
        return False

    async with running_runner(tmp_path, IMPATIENT, broker=broker, broker_answers=away) as bench:
        await bench.heartbeat(lambda beat: True)
        attempt = await bench.assign(bench.chunk([chat("one")]))
        assert finished(await bench.final(attempt)).completed == 1
