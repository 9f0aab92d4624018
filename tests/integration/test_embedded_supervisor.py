"""One tree of processes: what dies starts again, and nothing outlives the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.integration.supervised_instance import STUBBORN_RUNNER

SECONDS_MAX = 20.0
NAMES = {"postgres", "broker", "api", "worker", "runner"}


@dataclass
class Instance:
    process: subprocess.Popen[bytes]
    directory: Path
    ready_file: Path

    @property
    def ready(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.ready_file.read_text())
        return facts

    @property
    def pids(self) -> dict[str, int]:
        pids: dict[str, int] = self.ready["processes"]
        return pids

    def tree(self) -> list[psutil.Process]:
        """The supervisor and everything below it."""
        supervisor = psutil.Process(self.process.pid)
        return [supervisor, *supervisor.children(recursive=True)]


def start(directory: Path, *broken: str) -> Instance:
    ready_file = directory / "ready.json"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.integration.supervised_instance",
            directory / "data",
            ready_file,
            *broken,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Instance(process, directory / "data", ready_file)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.03)


def started(directory: Path) -> Instance:
    instance = start(directory)
    wait_until(instance.ready_file.exists)
    return instance


def end(instance: Instance, *, number: signal.Signals) -> tuple[int, str]:
    """Signals the supervisor; its exit status and output, once all of its tree is gone."""
    tree = instance.tree()
    instance.process.send_signal(number)
    output, _ = instance.process.communicate(timeout=SECONDS_MAX)
    _, alive = psutil.wait_procs(tree, timeout=SECONDS_MAX)
    assert alive == []
    return instance.process.returncode, output.decode()


@pytest.fixture
def instance(quick_path: Path) -> Iterator[Instance]:
    instance = started(quick_path)
    yield instance
    if instance.process.poll() is None:
        end(instance, number=signal.SIGTERM)


def test_the_ready_file_says_all_that_a_client_needs(instance: Instance) -> None:
    ready = instance.ready
    assert ready["base_url"].endswith("/openai/v1")
    assert ready["api_key"] == "gl_test"
    assert ready["pid"] == instance.process.pid
    assert ready["data_dir"] == str(instance.directory)
    assert ready["processes"].keys() == NAMES
    assert instance.ready_file.stat().st_mode & 0o077 == 0


def test_a_second_supervisor_on_the_same_directory_is_refused(instance: Instance) -> None:
    second = start(instance.directory.parent)
    output, _ = second.process.communicate(timeout=SECONDS_MAX)
    assert second.process.returncode == 1
    assert f"pid {instance.process.pid}".encode() in output
    assert instance.ready_file.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_in_order(instance: Instance, number: signal.Signals) -> None:
    status, output = end(instance, number=number)
    assert status == 0
    assert "Stopped." in output
    assert not instance.ready_file.exists()


def test_a_killed_supervisor_leaves_nothing_and_the_next_one_recovers(instance: Instance) -> None:
    status, _ = end(instance, number=signal.SIGKILL)
    assert status == -signal.SIGKILL
    instance.ready_file.unlink()
    again = started(instance.directory.parent)
    assert end(again, number=signal.SIGINT)[0] == 0


@pytest.mark.parametrize("name", ["postgres", "broker", "api", "worker", "runner"])
def test_whatever_is_killed_starts_again(instance: Instance, name: str) -> None:
    before = instance.pids
    os.kill(before[name], signal.SIGKILL)
    wait_until(lambda: instance.pids.keys() == NAMES and instance.pids[name] != before[name])
    unconcerned = NAMES - {name} - ({"worker", "runner"} if name == "broker" else set())
    assert {other: instance.pids[other] for other in unconcerned} == {
        other: before[other] for other in unconcerned
    }


def test_clients_of_a_new_broker_are_started_with_its_address(instance: Instance) -> None:
    def life_seen_by(name: str) -> str:
        return (instance.directory / "logs" / f"{name}.log").read_text().splitlines()[-1]

    wait_until(lambda: (instance.directory / "logs" / "worker.log").stat().st_size > 0)
    before = life_seen_by("worker")
    os.kill(instance.pids["broker"], signal.SIGKILL)
    wait_until(lambda: life_seen_by("worker") != before)
    wait_until(lambda: life_seen_by("runner") == life_seen_by("worker"))


def test_an_interrupt_while_starting_ends_in_order_too(quick_path: Path) -> None:
    instance = start(quick_path)
    wait_until(lambda: len(instance.tree()) > 1)
    assert end(instance, number=signal.SIGINT)[0] == 0


def test_a_program_that_cannot_start_is_named_with_its_last_words(quick_path: Path) -> None:
    instance = start(quick_path, "worker", "api")
    output, _ = instance.process.communicate(timeout=SECONDS_MAX)
    assert instance.process.returncode == 1
    assert b"does not start:\nbroken on purpose" in output


def test_requests_wait_while_the_api_is_started_again(instance: Instance) -> None:
    """Sent without a pause while it is killed three times: none is refused a connection."""
    root = instance.ready["base_url"].removesuffix("/openai/v1")
    before, served_by, refused = instance.pids["api"], set[int](), list[Exception]()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                served_by.add(httpx2.get(root, timeout=SECONDS_MAX).json()["pid"])
            except httpx2.ConnectError as error:
                refused.append(error)
            except httpx2.TransportError:
                pass  # it died with this request in its hands

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(3):
            before = instance.pids["api"]
            wait_until(lambda: instance.pids["api"] in served_by)
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: instance.pids["api"] != before)  # noqa: B023
        wait_until(lambda: instance.pids["api"] in served_by)
    finally:
        stop.set()
        asking.join()
    assert refused == []


def test_a_planned_stop_lets_work_end_before_what_takes_it_in_and_a_second_one_hurries(
    quick_path: Path,
) -> None:
    instance = start(quick_path, STUBBORN_RUNNER)
    wait_until(instance.ready_file.exists)
    pids, log = instance.pids, instance.directory / "logs" / "runner.log"
    instance.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "asked to end" in log.read_text() and not psutil.pid_exists(pids["api"]))
    assert all(psutil.pid_exists(pids[name]) for name in NAMES - {"api"})
    assert end(instance, number=signal.SIGTERM)[0] == 0
    assert log.read_text().count("asked to end") == 2
