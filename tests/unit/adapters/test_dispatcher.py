"""Sending to one runner, whatever becomes of what is sent to another."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from adapters.worker.dispatcher import Dispatcher
from adapters.worker.fleet import Fleet
from domain import messages
from domain.catalog import CPU
from domain.log.stored import Attempt
from domain.work.scheduling import AssignedWork
from tests.fakes import FakeBroker

LEAST_ROUNDS = 4


class StuckTopic(FakeBroker):
    """A broker that never acknowledges what is sent to one class."""

    async def send(self, topic: str, *, key: str, value: bytes) -> None:
        if topic == "work.gpu-24gb":
            await asyncio.Event().wait()
        await super().send(topic, key=key, value=value)


class KnowsNoWork:
    """A log in which no attempt is current."""

    async def execute(self, handler: Any, command: Any, context: Any, **_: Any) -> None:
        return None

    def submit(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


async def answers() -> bool:
    return True


async def test_a_topic_that_takes_nothing_delays_no_other_runner() -> None:
    fleet = Fleet(lease_seconds=30, heartbeat_seconds=3, slots_max=8, steady_seconds=lambda: 1.0)
    broker = StuckTopic()
    dispatcher = Dispatcher(
        writer=KnowsNoWork(), producer=broker, fleet=fleet, broker_answers=answers
    )

    def beat(runner_id: str, gpu_class: str, number: int) -> None:
        named = Attempt(work_id=f"batch_{number}", chunk=0, attempt=1, runner_id=runner_id)
        fleet.hear(
            messages.Heartbeat(
                runner_id=runner_id,
                gpu_class=gpu_class,
                sent_at=datetime(2026, 1, 1, tzinfo=UTC),
                slots={},
                running=(messages.Attempt.of(named),),
            )
        )

    nobody: list[AssignedWork] = []
    async with asyncio.timeout(LEAST_ROUNDS):  # each of the rounds would wait for ever
        for number in range(LEAST_ROUNDS):
            beat("stuck", "gpu-24gb", number)
            beat("well", CPU, number)
            await dispatcher.reconcile(nobody)
    sent = [record.key for record in broker.topics["work.cpu"]]
    assert sent == ["well"] * LEAST_ROUNDS
    await dispatcher.close()
