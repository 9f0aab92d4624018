"""A runner's parent process alone with a chunk that means it harm: `python -m … directory`.

`test_runner_memory.py` starts it, so that what is measured is a process of its own. Prints what it
found as JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from adapters.objects import DiskObjects
from adapters.process.settings import Settings
from domain.limits import MIB
from domain.messages import (
    PROGRESS_TOPIC,
    RUNNERS_TOPIC,
    WORK_TOPIC,
    Assign,
    Attempt,
    BatchChunkTask,
    ChunkFinished,
)
from gpu_runners.parent.runner import Runner
from gpu_runners.weights.store import Weights
from tests.fakes import FakeBroker, FakeClock
from tests.unit.gpu_runners.running_runner import BASE, RUNNER_ID, always, finals

HEARTBEAT_SECONDS = 0.5
SETTINGS = Settings(engine="echo", heartbeat_seconds=HEARTBEAT_SECONDS, progress_seconds=0.5)
HOSTILE_LINES = 12
LINE_BYTES = 15 * MIB
LONG_ANSWERS = 3
ANSWER_BYTES = 48 * MIB
CHOICES = 128


class TimedBroker(FakeBroker):
    """Notes when it was sent a heartbeat."""

    def __init__(self) -> None:
        super().__init__()
        self.beats_at: list[float] = []

    async def send(self, topic: str, *, key: str, value: bytes) -> None:
        if topic == RUNNERS_TOPIC:
            self.beats_at.append(time.monotonic())
        await super().send(topic, key=key, value=value)


def line(number: int, body: dict[str, Any], schema: bytes = b"") -> bytes:
    text = json.dumps({"custom_id": f"c{number}", "body": {"model": BASE, **body}}).encode()
    return text.replace(b'"SCHEMA"', schema) + b"\n"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def write_lines(path: Path) -> int:
    """Lines whose schema is millions of arrays, and lines whose answers are long."""
    schema = b'{"enum":[' + b"[]," * (LINE_BYTES // 3) + b"[]]}"
    json_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": "SCHEMA"}}
    hostile = chat("x", response_format=json_schema)
    long = chat("é" * (ANSWER_BYTES // CHOICES // 2), n=CHOICES)
    with path.open("wb") as file:
        for number in range(HOSTILE_LINES):
            file.write(line(number, hostile, schema))
        for number in range(HOSTILE_LINES, HOSTILE_LINES + LONG_ANSWERS):
            file.write(line(number, long))
        return file.tell()


async def run(directory: Path) -> dict[str, Any]:
    size = write_lines(directory / "lines.jsonl")
    objects = DiskObjects(directory / "objects")
    stored = await objects.put_file("files/1", directory / "lines.jsonl")
    task = BatchChunkTask(
        input_key="files/1",
        start_byte=0,
        end_byte=size,
        first_line=1,
        requests=HOSTILE_LINES + LONG_ANSWERS,
        sha256=stored.sha256,
        endpoint="/v1/chat/completions",
        base=BASE,
        output_prefix="chunks/1/",
    )
    broker = TimedBroker()
    async with Runner(
        runner_id=RUNNER_ID,
        settings=SETTINGS,
        producer=broker,
        consumer=broker.consumer(WORK_TOPIC),
        objects=objects,
        clock=FakeClock(),
        weights=Weights(directory),
        bases=(BASE,),
        broker_answers=always,
    ) as runner:
        serving = asyncio.create_task(runner.run())
        attempt = Attempt(work_id="batch_1", chunk=0, attempt=1, runner_id=RUNNER_ID)
        message = Assign(attempt=attempt, task=task).model_dump_json().encode()
        await broker.send(WORK_TOPIC, key=RUNNER_ID, value=message)
        records = await broker.wait_for(
            PROGRESS_TOPIC, lambda records: bool(finals(records, attempt)), seconds=500.0
        )
        runner.stop()
        await serving
    body = finals(records, attempt)[0].body
    assert isinstance(body, ChunkFinished), body
    gaps = [later - earlier for earlier, later in pairwise(broker.beats_at)]
    return {
        "completed": body.completed,
        "failed": body.failed,
        "output_bytes": body.output.bytes if body.output else 0,
        "beats": len(gaps),
        "longest_gap_seconds": max(gaps),
        "resident_bytes": _most_resident_bytes(),
    }


def _most_resident_bytes() -> int:
    """Of this program alone: `ru_maxrss` starts with what the process had that it was forked of."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(Path(sys.argv[1])))))
