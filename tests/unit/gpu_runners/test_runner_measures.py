"""What a runner counts is what happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from prometheus_client import REGISTRY

from domain.messages import Revoke
from tests.unit.gpu_runners.running_runner import BASE, chat, finished, running_runner, training


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"gridline_runner_{name}", labels) or 0.0


class Growth:
    """How much a figure has grown since this was made."""

    def __init__(self, name: str, **labels: str) -> None:
        self._name, self._labels = name, labels
        self._before = counted(name, **labels)

    def __eq__(self, other: object) -> bool:
        return counted(self._name, **self._labels) - self._before == other

    def __repr__(self) -> str:
        return f"{self._name}{self._labels}: {counted(self._name, **self._labels)}"

    __hash__ = None  # type: ignore[assignment]


async def test_finished_lines_and_tokens_are_counted_as_they_are_billed(tmp_path: Path) -> None:
    answered, refused = Growth("lines_total", end="answered"), Growth("lines_total", end="refused")
    tokens = {kind: Growth("tokens_total", kind=kind) for kind in ("input", "output", "trained")}
    chunks = Growth("attempts_total", kind="batch_chunk", end="chunk_finished")
    trainings = Growth("attempts_total", kind="train", end="train_finished")
    async with running_runner(tmp_path) as bench:
        attempt = await bench.assign(bench.chunk([chat("one two"), chat("x", n=0)]))
        (used,) = finished(await bench.final(attempt)).usage
        task = training(bench.objects, rows=2)
        report = await bench.final(await bench.assign(task, work_id="ftjob-1"))
    assert (answered, refused) == (1, 1)
    assert tokens == {
        "input": used.input_tokens,
        "output": used.output_tokens,
        "trained": report.body.trained_tokens,  # type: ignore[union-attr]
    }
    assert (chunks, trainings) == (1, 1)
    assert counted("attempts_running", kind="batch_chunk") == 0


async def test_an_engines_death_and_loads_are_counted(tmp_path: Path) -> None:
    deaths = Growth("engine_deaths_total", base=BASE)
    loads = Growth("engine_load_seconds_count", base=BASE)
    async with running_runner(tmp_path) as bench:
        attempt = await bench.assign(bench.chunk([chat("echo-delay-ms=300") for _ in range(3)]))
        os.kill(await bench.engine_pid(), signal.SIGKILL)
        await bench.final(attempt)
    assert (deaths, loads) == (1, 2)


async def test_a_revoked_attempt_is_counted_as_that(tmp_path: Path) -> None:
    revoked = Growth("attempts_total", kind="batch_chunk", end="revoked")
    async with running_runner(tmp_path) as bench:
        attempt = await bench.assign(bench.chunk([chat("echo-delay-ms=30000")]))
        await bench.heartbeat(lambda beat: attempt in beat.running)
        assert counted("attempts_running", kind="batch_chunk") == 1
        await bench.say(Revoke(attempt=attempt))
        await bench.heartbeat(lambda beat: not beat.running)
    assert revoked == 1


async def test_heartbeats_that_nobody_took_are_counted(tmp_path: Path) -> None:
    failed = Growth("heartbeats_failed_total")
    async with running_runner(tmp_path) as bench:
        await bench.heartbeat(lambda beat: True)
        before = counted("heartbeat_timestamp_seconds")
        bench.broker.refuse_next = 3
        await bench.heartbeat(lambda beat: True)
    assert failed == 3
    assert counted("heartbeat_timestamp_seconds") > before
