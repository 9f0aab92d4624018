"""A runner on the echo engine between in-memory fakes, and what tests say to it and hear of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from adapters.process.settings import Settings
from domain.messages import (
    PROGRESS_TOPIC,
    RUNNERS_TOPIC,
    WORK_TOPIC,
    AdapterRef,
    Assign,
    Attempt,
    BatchChunkTask,
    Cancel,
    ChunkFinished,
    Heartbeat,
    ObjectRef,
    Report,
    Revoke,
    Task,
    TrainingHyperparameters,
    TrainTask,
)
from domain.ports import Consumer, Record
from gpu_runners.parent.contact import BrokerAnswers
from gpu_runners.parent.runner import Runner
from gpu_runners.weights.store import Weights
from tests.fakes import FakeBroker, FakeClock, FakeObjects

BASE = "smollm2-135m-instruct"
RUNNER_ID = "runner_1"
SETTINGS = Settings(engine="echo", heartbeat_seconds=0.05, progress_seconds=0.05)


class Bench:
    """What a test holds of a running runner."""

    def __init__(
        self,
        runner: Runner,
        broker: FakeBroker,
        objects: FakeObjects,
        serving: asyncio.Task[None],
    ) -> None:
        self.runner = runner
        self.broker = broker
        self.objects = objects
        self.serving = serving

    async def say(self, message: Assign | Cancel | Revoke) -> None:
        await self.broker.send(WORK_TOPIC, key=RUNNER_ID, value=message.model_dump_json().encode())

    async def assign(self, task: Task, *, work_id: str = "batch_1", attempt: int = 1) -> Attempt:
        made = Attempt(work_id=work_id, chunk=0, attempt=attempt, runner_id=RUNNER_ID)
        await self.say(Assign(attempt=made, task=task))
        return made

    def chunk(
        self,
        bodies: list[dict[str, Any]],
        *,
        endpoint: Any = "/v1/chat/completions",
        adapters: tuple[AdapterRef, ...] = (),
        base: str = BASE,
    ) -> BatchChunkTask:
        """Puts the lines into the store, between two lines of other chunks."""
        lines = [
            json.dumps({"custom_id": f"c{i}", "method": "POST", "url": endpoint, "body": body})
            for i, body in enumerate(bodies)
        ]
        before, mine, after = b"other\n", ("\n".join(lines) + "\n").encode(), b"other\n"
        key = f"files/{len(self.objects.stored)}"
        self.objects.add(key, before + mine + after)
        return BatchChunkTask(
            input_key=key,
            start_byte=len(before),
            end_byte=len(before) + len(mine),
            first_line=2,
            requests=len(bodies),
            sha256=hashlib.sha256(mine).hexdigest(),
            endpoint=endpoint,
            base=base,
            adapters=adapters,
            output_prefix=f"chunks/{key}/",
        )

    async def final(self, attempt: Attempt, *, seconds: float = 20.0) -> Report:
        """The attempt's final report, once there is one."""
        await self.broker.wait_for(
            PROGRESS_TOPIC, lambda records: bool(finals(records, attempt)), seconds=seconds
        )
        return self.finals(attempt)[0]

    def finals(self, attempt: Attempt) -> list[Report]:
        return finals(self.broker.topics[PROGRESS_TOPIC], attempt)

    async def heartbeat(self, wanted: Any, *, seconds: float = 10.0) -> Heartbeat:
        """The first heartbeat from now on that is as wanted."""
        start = len(self.broker.topics[RUNNERS_TOPIC])
        records = await self.broker.wait_for(
            RUNNERS_TOPIC,
            lambda all_: any(wanted(beat) for beat in beats(all_[start:])),
            seconds=seconds,
        )
        return next(beat for beat in beats(records[start:]) if wanted(beat))

    async def engine_pid(self) -> int:
        """The engine child's process id, once one is loaded."""
        await self.heartbeat(lambda beat: beat.warm_base is not None)
        return self.runner.engines.pids[0]

    def lines(self, ref: ObjectRef | None) -> list[dict[str, Any]]:
        """The lines of a result file."""
        if ref is None:
            return []
        return [json.loads(line) for line in self.objects.stored[ref.key].splitlines()]


def finals(records: list[Record], attempt: Attempt) -> list[Report]:
    reports = [Report.model_validate_json(record.value) for record in records]
    return [each for each in reports if each.is_final and each.attempt == attempt]


def beats(records: list[Record]) -> list[Heartbeat]:
    return [Heartbeat.model_validate_json(record.value) for record in records]


def chat(text: str, model: str = BASE, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def finished(report: Report) -> ChunkFinished:
    assert isinstance(report.body, ChunkFinished)
    return report.body


def training(objects: FakeObjects, *, rows: int, text: str = "hello") -> TrainTask:
    row = json.dumps({"messages": [{"role": "user", "content": text}]})
    return TrainTask(
        base=BASE,
        method="supervised",
        adapter="lora",
        hyperparameters=TrainingHyperparameters(
            n_epochs=1,
            batch_size=1,
            learning_rate=1e-3,
            lora_rank=8,
            lora_alpha=16,
            max_seq_length=512,
        ),
        seed=1,
        training=ObjectRef.of(
            objects.add(f"files/train-{rows}-{text}", f"{row}\n".encode() * rows)
        ),
        eval_rows=0,
        time_limit_seconds=60,
        output_prefix="adapters/ftjob-1/1/",
    )


async def always() -> bool:
    return True


@asynccontextmanager
async def running_runner(
    weights_root: Path,
    settings: Settings = SETTINGS,
    *,
    broker: FakeBroker | None = None,
    consumer: Consumer | None = None,
    broker_answers: BrokerAnswers = always,
) -> AsyncIterator[Bench]:
    """Stopped at the end, whatever happened; leaves no child behind."""
    broker, objects = broker or FakeBroker(), FakeObjects()
    async with Runner(
        runner_id=RUNNER_ID,
        settings=settings,
        producer=broker,
        consumer=consumer or broker.consumer(WORK_TOPIC),
        objects=objects,
        clock=FakeClock(),
        weights=Weights(weights_root),
        bases=(BASE,),
        broker_answers=broker_answers,
    ) as runner:
        serving = asyncio.create_task(runner.run())
        try:
            yield Bench(runner, broker, objects, serving)
        finally:
            runner.stop()
            await serving
