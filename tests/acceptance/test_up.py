"""`gridlined up` as its user sees it: one command, ready with a key, back after any end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from openai import OpenAI

READY_SECONDS_MAX = 60.0
RECOVERED_SECONDS_MAX = 15.0
ENVIRONMENT = {
    **os.environ,
    "GRIDLINE_ENGINE": "echo",
    "GRIDLINE_ALLOW_ECHO": "1",
    "GRIDLINE_HEARTBEAT_SECONDS": "0.5",
    "GRIDLINE_LEASE_SECONDS": "5",
}


@contextmanager
def running(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A ready instance and its ready file; whatever still runs of it is ended at the end."""
    ready_file = directory / "ready.json"
    command = [
        sys.executable,
        "-m",
        "adapters.operators.cli",
        "up",
        "--data",
        str(directory / "data"),
    ]
    command += ["--port", "0", "--ready-file", str(ready_file)]
    with (directory / "up.log").open("ab") as output:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not ready_file.exists():
            assert process.poll() is None, (directory / "up.log").read_text()
            assert time.monotonic() < deadline, (directory / "up.log").read_text()
            time.sleep(0.05)
        yield process, json.loads(ready_file.read_text())
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=20)
        ready_file.unlink(missing_ok=True)


def tree_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    supervisor = psutil.Process(process.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def models_seen_with(ready: dict[str, Any], api_key: str) -> list[str]:
    with OpenAI(base_url=ready["base_url"], api_key=api_key, max_retries=0) as client:
        return [model.id for model in client.models.list()]


def operator(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "adapters.operators.cli", *arguments, "--json"],
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout)


def test_one_command_gives_a_url_and_a_key_that_work(quick_path: Path) -> None:
    with running(quick_path) as (process, ready):
        assert "smollm2-135m-instruct" in models_seen_with(ready, ready["api_key"])
        printed = (quick_path / "up.log").read_text()
        assert ready["base_url"] in printed
        assert ready["api_key"] in printed
        assert (quick_path / "data" / "api-key").stat().st_mode & 0o077 == 0
        opened = operator(
            "accounts", "create", "--data", ready["data_dir"],
            "--email", "b@example.com", "--credit-usd", "5",
        )  # fmt: skip
        assert "smollm2-135m-instruct" in models_seen_with(ready, opened["api_key"])
        tree = tree_of(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert psutil.wait_procs(tree, timeout=5)[1] == []


def test_after_a_kill_nothing_is_left_and_the_next_start_has_everything(quick_path: Path) -> None:
    with running(quick_path) as (process, before):
        tree = tree_of(process)
        process.kill()
        assert psutil.wait_procs(tree, timeout=5)[1] == []
    began = time.monotonic()
    with running(quick_path) as (_, after):
        assert time.monotonic() - began < RECOVERED_SECONDS_MAX
        assert after["api_key"] == before["api_key"]
        assert "smollm2-135m-instruct" in models_seen_with(after, after["api_key"])
