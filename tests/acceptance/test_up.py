"""`gridlined up` as its user sees it: one command, ready with a key, back after any end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from adapters.embedded.process import free_port

READY_FACTS = {"base_url", "api_key", "pid", "data_dir", "processes"}
READY_SECONDS_MAX = 60.0
RECOVERED_SECONDS_MAX = 15.0
ENVIRONMENT = {
    **os.environ,
    "GRIDLINE_ENGINE": "echo",
    "GRIDLINE_ALLOW_ECHO": "1",
    "GRIDLINE_HEARTBEAT_SECONDS": "0.5",
    "GRIDLINE_LEASE_SECONDS": "5",
}


GRIDLINED = (sys.executable, "-m", "adapters.operators.cli")


@contextmanager
def running(
    directory: Path, *, port: int = 0
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A ready instance and its ready file; whatever still runs of it is ended at the end."""
    ready_file = directory / "ready.json"
    command = [*GRIDLINED, "up", "--data", str(directory / "data")]
    command += ["--port", str(port), "--ready-file", str(ready_file)]
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
        [*GRIDLINED, *arguments, "--json"],
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


def test_a_second_start_goes_on_where_the_first_ended_at_another_port_too(
    quick_path: Path,
) -> None:
    with running(quick_path) as (_, first):
        with OpenAI(base_url=first["base_url"], api_key=first["api_key"]) as client:
            kept = client.files.create(file=("l.jsonl", b"{}"), purpose="batch")
        account = operator("accounts", "create", "--data", first["data_dir"], "--email=b@x.org")
    port = free_port()
    with running(quick_path, port=port) as (_, second):
        assert second["base_url"] == f"http://127.0.0.1:{port}/openai/v1"
        assert second["api_key"] == first["api_key"]
        assert second.keys() == first.keys() == READY_FACTS
        with OpenAI(base_url=second["base_url"], api_key=second["api_key"]) as client:
            assert client.files.content(kept.id).content == b"{}"
        assert models_seen_with(second, account["api_key"])


def spoilt_file(path: Path) -> list[str]:
    (path / "data").write_text("")
    return []


def spoilt_version(path: Path) -> list[str]:
    (path / "data" / "postgres").mkdir(parents=True)
    (path / "data" / "postgres" / "PG_VERSION").write_text("12")
    return []


def spoilt_passwords(path: Path) -> list[str]:
    (path / "data").mkdir()
    (path / "data" / "postgres-passwords.json").write_text('{"postgres": "x"}')
    return []


def spoilt_ready_file(path: Path) -> list[str]:
    return ["--ready-file", str(path / "nowhere" / "ready.json")]


def spoilt_port(_: Path) -> list[str]:
    return ["--port", "99999"]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (spoilt_file, "data"),
        (spoilt_version, "written by PostgreSQL 12"),
        (spoilt_passwords, "does not hold the passwords"),
        (spoilt_ready_file, "nowhere"),
        (spoilt_port, "'--port': must be an integer from 0 to 65535"),
    ],
)
def test_a_start_that_cannot_be_says_why_in_a_line(
    quick_path: Path, spoil: Callable[[Path], list[str]], expected: str
) -> None:
    also = spoil(quick_path)
    status, told = end_of([*GRIDLINED, "up", "--data", str(quick_path / "data"), *also])
    assert status == 2
    assert expected in told[-1]


def test_a_port_that_is_taken_is_told_before_anything_is_started(quick_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, told = end_of(
            [*GRIDLINED, "up", "--data", str(quick_path / "data"), "--port", str(port)]
        )
    assert status == 2
    assert f"Port {port} of 127.0.0.1 cannot be had" in told[-1]
    assert not (quick_path / "data" / "postgres").exists()


def test_passwords_of_another_cluster_are_told_at_once(quick_path: Path) -> None:
    with running(quick_path):
        pass
    (quick_path / "data" / "postgres-passwords.json").unlink()
    status, told = end_of([*GRIDLINED, "up", "--data", str(quick_path / "data"), "--port", "0"])
    assert status == 2
    assert "does not know the passwords" in "".join(told)


def test_a_process_whose_settings_cannot_be_used_ends_the_start_at_once(quick_path: Path) -> None:
    command = [*GRIDLINED, "up", "--data", str(quick_path / "data"), "--port", "0"]
    status, told = end_of(command, GRIDLINE_ENGINES_PYTHON=str(quick_path / "nowhere"))
    assert status == 2
    assert told[-1].startswith("gridlined: runner cannot start: gridlined runner: GRIDLINE_ENGINES")


def end_of(command: list[str], **settings: str) -> tuple[int, list[str]]:
    """The status and the lines on stderr of a command that ends by itself."""
    done = subprocess.run(
        command,
        env={**ENVIRONMENT, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=READY_SECONDS_MAX,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()
