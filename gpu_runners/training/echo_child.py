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
from pathlib import Path
from typing import Any, BinaryIO

from domain.catalog import CATALOG
from gpu_runners.child_pipes import read_operations, take_standard_output, write_message
from gpu_runners.lifeline import die_with_parent

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


def _train(
    order: dict[str, Any], operations: queue.SimpleQueue[dict[str, Any]], out: BinaryIO
) -> None:
    started_at = time.monotonic()
    task = order["task"]
    data = Path(order["training_path"]).read_bytes()
    rows = [row for row in data.split(b"\n") if row.strip()]
    rows_trained = max(1, len(rows) - (0 if order["validation_path"] else task["eval_rows"]))
    parameters = task["hyperparameters"]
    steps = math.ceil(rows_trained / parameters["batch_size"]) * parameters["n_epochs"]
    tokens_a_step = max(1, len(data.split()) * parameters["n_epochs"] // steps)
    mark = STEP_MARK.search(data)
    pause_seconds = int(mark[1]) / 1000 if mark else STEP_SECONDS
    write_message(out, {"type": "started"})
    told_at = time.monotonic()
    for step in range(1, steps + 1):
        if _cancel_asked(operations, pause_seconds):
            write_message(out, {"type": "cancelled", "trained_tokens": step * tokens_a_step})
            return
        if time.monotonic() - told_at >= order["progress_seconds"]:
            told_at = time.monotonic()
            write_message(out, _progress(step, steps, step * tokens_a_step))
    _write_adapter(Path(order["output_dir"]), task, data)
    write_message(
        out,
        {
            "type": "finished",
            "trained_tokens": steps * tokens_a_step,
            "loss_tokens": steps * tokens_a_step // 2,
            "steps": steps,
            "train_loss": _loss(steps),
            "train_accuracy": 0.9,
            "eval_loss_before": FIRST_LOSS,
            "eval_loss": _loss(steps),
            "eval_accuracy": 0.9,
            "eval_rows": task["eval_rows"],
            "rows_trained": rows_trained,
            "rows_dropped": 0,
            "seconds": time.monotonic() - started_at,
            "base_revision": "echo",
            "versions": {"echo": "1"},
        },
    )


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
