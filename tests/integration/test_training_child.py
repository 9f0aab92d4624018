"""The training process as its parent sees it: lines out, files left, and ends that are prompt."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from domain.catalog import CATALOG
from domain.messages import TrainTask
from gpu_runners.weights.store import Weights
from tests.unit.gpu_runners.tiny_model import (
    BASE,
    chat,
    note_as_snapshot,
    save_tiny_model,
    task,
    write_rows,
)

COMMIT = CATALOG[BASE].commit
ROWS = [chat(f"Question {i}", f"answer {i}") for i in range(12)]
PROMPTLY_SECONDS = 5.0


@pytest.fixture(scope="module")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory, weights_root: Path) -> Path:
    """A weights directory in which a tiny model stands in for the small base at its commit."""
    root = tmp_path_factory.mktemp("weights")
    save_tiny_model(root / BASE, Weights(weights_root).path(BASE))
    assert COMMIT is not None
    note_as_snapshot(root / BASE, COMMIT)
    return root


class Parent:
    """What the runner does: one order down a pipe, lines back."""

    def __init__(self, directory: Path, weights: Path) -> None:
        self._directory = directory
        self._weights = weights
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpu_runners.training.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def output_dir(self) -> Path:
        return self._directory / "out"

    def order(self, order: TrainTask) -> None:
        self.say(
            {
                "op": "train",
                "task": order.model_dump(mode="json"),
                "training_path": str(write_rows(self._directory / "rows.jsonl", ROWS)),
                "validation_path": None,
                "output_dir": str(self.output_dir),
                "weights_dir": str(self._weights),
                "progress_seconds": 0.05,
                "threads": 1,
            }
        )

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def lines(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def wait_for_a_step(self) -> None:
        for line in self.lines():
            if line["type"] == "train_progress" and line["step"] > 0:
                return
        raise AssertionError("the training ended early")


@pytest.fixture
def parent(tmp_path: Path, tiny_weights: Path) -> Iterator[Parent]:
    parent = Parent(tmp_path, tiny_weights)
    with parent.process:
        yield parent
        parent.process.kill()


def endless() -> TrainTask:
    return task(n_epochs=100_000)


def test_an_order_ends_in_finished_with_the_files_in_place(parent: Parent) -> None:
    parent.order(task(n_epochs=40))
    lines = list(parent.lines())
    assert lines[0] == {"type": "started"}
    assert {line["type"] for line in lines[1:-1]} == {"train_progress"}
    finished = lines[-1]
    assert (finished["type"], finished["steps"], finished["rows_trained"]) == ("finished", 120, 11)
    assert finished["base_revision"] == COMMIT
    assert (parent.output_dir / "adapter_model.safetensors").is_file()
    assert parent.process.wait(PROMPTLY_SECONDS) == 0


def test_a_cancel_ends_the_training_at_once_and_counts_what_was_trained(parent: Parent) -> None:
    parent.order(endless())
    parent.wait_for_a_step()
    parent.say({"op": "cancel"})
    *_, last = parent.lines()
    assert last["type"] == "cancelled"
    assert last["trained_tokens"] > 0
    assert parent.process.wait(PROMPTLY_SECONDS) == 0


def test_a_child_whose_input_ends_is_gone_at_once_and_silent(parent: Parent) -> None:
    parent.order(endless())
    parent.wait_for_a_step()
    assert parent.process.stdin is not None
    parent.process.stdin.close()
    assert {line["type"] for line in parent.lines()} <= {"train_progress"}
    parent.process.wait(PROMPTLY_SECONDS)


def test_the_time_limit_ends_the_training(parent: Parent) -> None:
    parent.order(endless().model_copy(update={"time_limit_seconds": 3}))
    *_, last = parent.lines()
    assert (last["type"], last["code"]) == ("failed", "time_limit_exceeded")
    parent.process.wait(PROMPTLY_SECONDS)


def test_what_this_runner_does_not_train_is_refused(parent: Parent) -> None:
    parent.order(task(adapter="qlora"))
    *_, last = parent.lines()
    assert (last["type"], last["code"], last["trained_tokens"]) == ("failed", "job_unavailable", 0)


def test_a_base_whose_files_are_not_the_pinned_ones_is_not_trained(
    tmp_path: Path, tiny_weights: Path
) -> None:
    root = tmp_path / "weights"
    shutil.copytree(tiny_weights / BASE, root / BASE)
    with (root / BASE / "config.json").open("a") as config:
        config.write("\n")
    parent = Parent(tmp_path, root)
    with parent.process:
        parent.order(task())
        *_, last = parent.lines()
    assert (last["type"], last["code"]) == ("failed", "job_unavailable")


def test_a_refused_row_is_the_last_word(parent: Parent) -> None:
    parent.order(task(max_seq_length=3))
    *_, last = parent.lines()
    assert (last["type"], last["code"]) == ("failed", "context_too_long")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent's life")
def test_a_killed_parent_takes_the_training_with_it(tmp_path: Path, tiny_weights: Path) -> None:
    """The pipe is kept open by this test, so only the parent's death can end the child."""
    reading, writing = os.pipe()
    starter = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-m', 'gpu_runners.training.child'], "
        f"stdin={reading}, stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    middle = subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, pass_fds=(reading,)
    )
    order = {
        "op": "train",
        "task": endless().model_dump(mode="json"),
        "training_path": str(write_rows(tmp_path / "rows.jsonl", ROWS)),
        "validation_path": None,
        "output_dir": str(tmp_path / "out"),
        "weights_dir": str(tiny_weights),
        "progress_seconds": 0.05,
    }
    os.write(writing, json.dumps(order).encode() + b"\n")
    with middle:
        assert middle.stdout is not None
        child = psutil.Process(int(middle.stdout.readline()))
        middle.send_signal(signal.SIGKILL)
    child.wait(PROMPTLY_SECONDS)
    os.close(reading)
    os.close(writing)
