"""The worker as a process: what it tells operators, and how it begins without a broker."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.embedded.process import free_port
from adapters.process.settings import Settings
from tests.conftest import Database
from tests.integration.worker_rig import WAIT_SECONDS_MAX, Rig, chat_lines, eventually
from tests.integration.worker_rig import running_worker as running_rig

SAID_SECONDS_MAX = 10.0


@pytest.fixture
async def rig(database: Database, broker_settings: Settings, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(database, broker_settings, tmp_path) as running:
        await running.stop_worker()
        yield running


@asynccontextmanager
async def process_of(settings: Settings, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "adapters.worker",
            env={**os.environ, **settings.to_environment()},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=output,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def get(settings: Settings, path: str) -> tuple[int, str]:
    url = f"http://{settings.metrics_host}:{settings.metrics_port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
    except OSError:
        return 0, ""


async def test_a_worker_tells_of_its_loops_its_queues_and_that_it_is_active(
    rig: Rig, tmp_path: Path
) -> None:
    settings = replace(rig.settings, metrics_port=free_port())
    await rig.create_batch(chat_lines(2))

    async def shown() -> tuple[dict[str, Any], str] | None:
        status, body = await asyncio.to_thread(get, settings, "/readyz")
        _, metrics = await asyncio.to_thread(get, settings, "/metrics")
        is_measured = 'open_work{kind="batch_chunk",stage="running"} 1.0' in metrics
        return (json.loads(body), metrics) if status == 200 and is_measured else None

    async with process_of(settings, tmp_path / "log") as process:
        health, metrics = await eventually(shown, seconds=30.0)
        process.terminate()
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            assert await process.wait() == 0
    assert health.keys() >= {"database", "ingest", "lead", "heartbeats", "work", "validate"}
    assert "gridline_worker_active 1.0" in metrics
    assert 'gridline_worker_loop_rounds_total{loop="ingest"}' in metrics


async def test_a_broker_that_is_away_at_the_start_is_named_within_seconds_and_waited_for(
    rig: Rig, tmp_path: Path
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    settings = replace(rig.settings, kafka_bootstrap=nobody)
    log = tmp_path / "log"
    batch_id = await rig.create_batch([{"not": "a request"}])

    async def said() -> bool:
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        return any(
            "GRIDLINE_KAFKA_BOOTSTRAP" in entry["message"] and entry["bootstrap"] == nobody
            for entry in entries
        )

    async with process_of(settings, log) as process:
        await eventually(said, seconds=SAID_SECONDS_MAX)
        # What needs no broker is done meanwhile.
        await rig.batch_when(batch_id, "failed", seconds=30.0)
        assert process.returncode is None


async def test_topics_with_other_partitions_end_the_worker_with_one_line(
    rig: Rig, tmp_path: Path
) -> None:
    settings = replace(rig.settings, kafka_partitions=rig.settings.kafka_partitions + 1)
    log = tmp_path / "log"
    async with process_of(settings, log) as process, asyncio.timeout(WAIT_SECONDS_MAX):
        assert await process.wait() == 2
    (line,) = [each for each in log.read_text().splitlines() if not each.startswith("{")]
    assert "GRIDLINE_KAFKA_PARTITIONS" in line
