"""A training without a model: the same protocol as the real one, files made from the data alone.

`parent/training_run.py` starts it when the engine setting says echo, for tests and load trials. It
takes some milliseconds a step, so that a kill can hit the middle, or what a row says in the text
`echo-step-ms=N`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from domain.catalog import CATALOG
from gpu_runners.child_pipes import read_operations, take_standard_output, write_message
from gpu_runners.lifeline import die_with_parent
from gpu_runners.training.step_metrics import Tally, write_step_metrics

STEP_SECONDS = 0.02
STEP_MARK = re.compile(rb"echo-step-ms=(\d{1,6})")
FIRST_LOSS = 4.0


def main() -> None:
    die_with_parent()
    out = take_standard_output()
    operations = read_operations()
    order = operations.get()
    _train(order, operations, out)
    # The thread that reads standard input still waits there: an ordinary end would abort.
    os._exit(0)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the data and the order come to."""

    data: bytes
    rows: int
    steps: int
    tokens_a_step: int
    pause_seconds: float


def _train(
    order: dict[str, Any], operations: queue.SimpleQueue[dict[str, Any]], out: BinaryIO
) -> None:
    began = time.monotonic()
    plan = _plan(order)
    write_message(out, {"type": "started"})
    told_at = began
    for step in range(1, plan.steps + 1):
        trained_tokens = step * plan.tokens_a_step
        if _cancel_asked(operations, plan.pause_seconds):
            write_message(out, {"type": "cancelled", "trained_tokens": trained_tokens})
            return
        if time.monotonic() - told_at >= order["progress_seconds"]:
            told_at = time.monotonic()
            write_message(out, _progress(step, plan.steps, trained_tokens))
    directory = Path(order["output_dir"])
    _write_adapter(directory, order["task"], plan.data)
    steps = [_tally(step) for step in range(1, plan.steps + 1)]
    write_step_metrics(directory, steps, _tally(plan.steps))
    seconds = time.monotonic() - began
    write_message(out, _finished(plan, eval_rows=order["task"]["eval_rows"], seconds=seconds))


def _plan(order: dict[str, Any]) -> _Plan:
    data = Path(order["training_path"]).read_bytes()
    rows = len([row for row in data.split(b"\n") if row.strip()])
    held_out = 0 if order["validation_path"] else order["task"]["eval_rows"]
    rows_trained = max(1, rows - held_out)
    parameters = order["task"]["hyperparameters"]
    steps = math.ceil(rows_trained / parameters["batch_size"]) * parameters["n_epochs"]
    mark = STEP_MARK.search(data)
    return _Plan(
        data=data,
        rows=rows_trained,
        steps=steps,
        tokens_a_step=max(1, len(data.split()) * parameters["n_epochs"] // steps),
        pause_seconds=int(mark[1]) / 1000 if mark else STEP_SECONDS,
    )


def _finished(plan: _Plan, *, eval_rows: int, seconds: float) -> dict[str, Any]:
    return {
        "type": "finished",
        "trained_tokens": plan.steps * plan.tokens_a_step,
        "loss_tokens": plan.steps * plan.tokens_a_step // 2,
        "steps": plan.steps,
        "train_loss": _loss(plan.steps),
        "train_accuracy": 0.9,
        "eval_loss_before": FIRST_LOSS,
        "eval_loss": _loss(plan.steps),
        "eval_accuracy": 0.9,
        "eval_rows": eval_rows,
        "rows_trained": plan.rows,
        "rows_dropped": 0,
        "seconds": seconds,
        "base_revision": "echo",
        "versions": {"echo": "1"},
    }


def _cancel_asked(operations: queue.SimpleQueue[dict[str, Any]], seconds: float) -> bool:
    try:
        return bool(operations.get(timeout=seconds)["op"] == "cancel")
    except queue.Empty:
        return False


def _progress(step: int, steps: int, trained_tokens: int) -> dict[str, Any]:
    return {
        "type": "train_progress",
        "step": step,
        "steps": steps,
        "trained_tokens": trained_tokens,
        "train_loss": _loss(step),
        "eval_loss_before": FIRST_LOSS,
    }


def _loss(step: int) -> float:
    return FIRST_LOSS / (1 + step)


def _tally(step: int) -> Tally:
    return Tally(loss=10 * _loss(step), correct=9, tokens=10)


def _write_adapter(directory: Path, task: dict[str, Any], data: bytes) -> None:
    """A well-formed adapter of one tensor, which any reader of the format can open."""
    values = hashlib.sha256(data).digest()
    header = json.dumps(
        {"echo.lora_A.weight": {"dtype": "U8", "shape": [32], "data_offsets": [0, len(values)]}}
    ).encode()
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": CATALOG[task["base"]].source,
        "r": task["hyperparameters"]["lora_rank"],
        "lora_alpha": task["hyperparameters"]["lora_alpha"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + values
    )


if __name__ == "__main__":
    main()
