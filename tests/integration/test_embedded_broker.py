"""The embedded broker comes up under a new identity each time and dies with its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from adapters.embedded.broker import Broker
from adapters.kafka import answers


def test_a_killed_broker_comes_back_as_another_cluster(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    broker.start()
    first = broker.cluster_id
    os.kill(broker.child.pid, signal.SIGKILL)
    broker.child.process.wait()
    broker.start()
    assert broker.cluster_id != first
    assert asyncio.run(answers(broker.bootstrap))
    broker.stop()
    assert not asyncio.run(answers(broker.bootstrap))


def test_a_broker_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from adapters.embedded.broker import Broker;"
        "b = Broker(Path(sys.argv[1])); b.start(); print(b.child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout is not None
        broker = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
    gone, alive = psutil.wait_procs([broker], timeout=5)
    assert (gone, alive) == ([broker], [])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:9"])
async def test_no_broker_does_not_answer(address: str) -> None:
    assert not await answers(address)
