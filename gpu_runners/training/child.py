"""The process that trains one job, for the runner at the other end of its pipes.

`parent/training_run.py` starts it. In, as JSON lines: one {"op": "train", "task", "training_path",
"validation_path", "output_dir", "weights_dir", "progress_seconds", "threads"?}, then perhaps
{"op": "cancel"}. Out: started, train_progress every so often, and one last line: finished (the
adapter's files lie in the output directory), cancelled or failed. A training has nothing to save
when it is stopped, so a cancel, the time limit and the end of the parent end the process at once,
wherever it is. It must never outlive its parent, nor write anything but this to the real standard
output.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import structlog
import torch
from pydantic import TypeAdapter
from transformers.utils import logging as transformers_logging

from adapters.process.telemetry import configure_logging
from domain.catalog import base_model
from domain.errors import GridlineError
from domain.messages import TrainProgress, TrainTask
from gpu_runners.child_pipes import read_operations, take_standard_output, write_message
from gpu_runners.lifeline import die_with_parent
from gpu_runners.rendering.training_rows import TrainingRefused
from gpu_runners.training.train_lora import TrainingBase, train
from gpu_runners.weights.store import Weights

_TASK = TypeAdapter(TrainTask)
_NO_MEMORY = "Training failed: it ran out of memory. Lower max_seq_length or lora_rank."

logger = structlog.stdlib.get_logger(__name__)


class Voice:
    """Speaks for the process: progress while it lasts, and exactly one last word."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._progress: TrainProgress | None = None

    def note(self, progress: TrainProgress) -> None:
        """What the next report says."""
        self._progress = progress

    def report_progress(self) -> None:
        """Says the newest progress, again if need be: it is also the sign of life."""
        if self._progress is not None:
            self.tell(self._progress.model_dump(mode="json"))

    def tell(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._write(message)

    def cancelled(self) -> NoReturn:
        self._end({"type": "cancelled", "trained_tokens": self._trained_tokens})

    def failed(self, code: str, message: str) -> NoReturn:
        tokens = self._trained_tokens
        self._end({"type": "failed", "code": code, "message": message, "trained_tokens": tokens})

    def finished(self, fields: dict[str, Any]) -> NoReturn:
        self._end({"type": "finished", **fields})

    @property
    def _trained_tokens(self) -> int:
        return 0 if self._progress is None else self._progress.trained_tokens

    def _end(self, message: dict[str, Any]) -> NoReturn:
        with self._lock:  # never given back: whoever comes later has nothing to say
            self._write(message)
            os._exit(0)

    def _write(self, message: dict[str, Any]) -> None:
        write_message(self._out, message)


def main() -> None:
    """Serves one order and ends the process."""
    die_with_parent()
    configure_logging("training", level="INFO")
    voice = Voice(take_standard_output())
    operations = read_operations()
    order = operations.get()
    voice.tell({"type": "started"})
    task = _TASK.validate_python(order["task"])
    _in_background(lambda: (operations.get(), voice.cancelled()))
    timer = threading.Timer(
        task.time_limit_seconds,
        lambda: voice.failed(
            "time_limit_exceeded",
            f"Training did not finish within {task.time_limit_seconds} seconds and was stopped.",
        ),
    )
    timer.daemon = True
    timer.start()
    _report_regularly(voice, float(order["progress_seconds"]))
    _run(task, order, voice)


def _run(task: TrainTask, order: dict[str, Any], voice: Voice) -> NoReturn:
    """Every way that a training can end becomes the last word."""
    try:
        fields = _trained(task, order, voice)
    except GridlineError as refused:
        voice.failed(refused.code, refused.message)
    except (MemoryError, torch.OutOfMemoryError):
        voice.failed("training_failed", _NO_MEMORY)
    except Exception as error:
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            voice.failed("training_failed", _NO_MEMORY)
        logger.exception("training failed")
        voice.failed("training_failed", f"Training failed: {type(error).__name__}.")
    voice.finished(fields)


def _trained(task: TrainTask, order: dict[str, Any], voice: Voice) -> dict[str, Any]:
    if task.method != "supervised" or task.adapter != "lora":
        raise TrainingRefused(
            f"This runner does not train method {task.method} with adapter {task.adapter}.",
            code="job_unavailable",
        )
    transformers_logging.disable_progress_bar()
    if order.get("threads"):
        torch.set_num_threads(order["threads"])
    record = base_model(task.base)
    found = Weights(Path(order["weights_dir"])).find(record.id)
    validation = order["validation_path"]
    result = train(
        task,
        base=TrainingBase(
            id=record.id,
            revision=found.revision,
            source=record.source,
            commit=record.commit,
            directory=found.directory,
            control_tokens=() if record.fine_tuning is None else record.fine_tuning.control_tokens,
            template_arguments=record.template_arguments,
        ),
        training_path=Path(order["training_path"]),
        validation_path=None if validation is None else Path(validation),
        output_dir=Path(order["output_dir"]),
        report=voice.note,
    )
    return asdict(result)


def _report_regularly(voice: Voice, seconds: float) -> None:
    tick = threading.Event()

    def report() -> None:
        while not tick.wait(seconds):
            voice.report_progress()

    _in_background(report)


def _in_background(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


if __name__ == "__main__":
    main()
