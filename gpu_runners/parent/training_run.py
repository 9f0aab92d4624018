"""Runs one training: downloads its files, drives a child of its own, uploads the adapter.

`runner.py` starts it for a `train` task and publishes what it returns. The child knows neither
Kafka nor the object store. A child that ends without a word is the platform's fault, never the
customer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import structlog

from domain.messages import (
    STEP_METRICS,
    AttemptFailed,
    ObjectRef,
    TrainCancelled,
    TrainFinished,
    TrainProgress,
    TrainTask,
)
from domain.ports import ObjectMissing
from gpu_runners.parent import measures
from gpu_runners.parent.adapter_cache import FILES, DigestMismatch, download
from gpu_runners.parent.attempts import RunningAttempt, with_store_retries
from gpu_runners.parent.child import Child, ChildGone
from gpu_runners.parent.slots import THREADS_ENVIRONMENT

CANCEL_SECONDS_MAX = 30.0
"""A training that was asked to stop and does not is killed after this long."""
SILENCE_SECONDS_MAX = 1800.0
"""Loading a large base, or one long step, says nothing meanwhile."""
OVERTIME_SECONDS = 120.0
"""The child keeps the time limit itself; after this much more it is killed."""

TrainResult = TrainFinished | TrainCancelled | AttemptFailed

logger = structlog.stdlib.get_logger(__name__)


async def run_training(running: RunningAttempt, task: TrainTask) -> TrainResult:
    """The whole attempt."""
    directory = Path(tempfile.mkdtemp(dir=running.tools.work_dir, prefix="train-"))
    try:
        return await _Training(running, task, directory).run()
    except (ObjectMissing, DigestMismatch):
        return AttemptFailed(
            code="platform_interrupted", message="The training's files are not in the store."
        )
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


class _Training:
    def __init__(self, running: RunningAttempt, task: TrainTask, directory: Path) -> None:
        self._running = running
        self._task = task
        self._directory = directory
        self._output_dir = directory / "adapter"
        self._trained_tokens = 0

    async def run(self) -> TrainResult:
        self._output_dir.mkdir()
        order = await self._order()
        if self._running.cancelled.is_set():
            return TrainCancelled()
        child = await Child.start(["env", *THREADS_ENVIRONMENT, sys.executable, "-m", self._module])
        cancelling = asyncio.create_task(self._cancel_when_asked(child))
        try:
            async with asyncio.timeout(self._task.time_limit_seconds + OVERTIME_SECONDS):
                await child.send(order)
                return await self._follow(child)
        except TimeoutError:
            return self._failed("time_limit_exceeded", "Training passed its time limit.")
        except ChildGone as gone:
            return self._ended_without_a_word(gone)
        finally:
            cancelling.cancel()
            await child.stop()

    @property
    def _module(self) -> str:
        echo = self._running.tools.settings.engine == "echo"
        return "gpu_runners.training.echo_child" if echo else "gpu_runners.training.child"

    async def _order(self) -> dict[str, Any]:
        objects = self._running.tools.objects
        task = self._task
        training = self._directory / "training.jsonl"
        await with_store_retries(lambda: download(objects, task.training, training))
        validation: Path | None = None
        if (given := task.validation) is not None:
            path = validation = self._directory / "validation.jsonl"
            await with_store_retries(lambda: download(objects, given, path))
        return {
            "op": "train",
            "task": task.model_dump(mode="json"),
            "training_path": str(training),
            "validation_path": None if validation is None else str(validation),
            "output_dir": str(self._output_dir),
            "weights_dir": str(self._running.tools.weights_root),
            "progress_seconds": self._running.tools.settings.progress_seconds,
        }

    async def _cancel_when_asked(self, child: Child) -> None:
        await self._running.cancelled.wait()
        with contextlib.suppress(ChildGone):
            await child.send({"op": "cancel"})
        await asyncio.sleep(CANCEL_SECONDS_MAX)
        await child.stop(grace_seconds=0)

    async def _follow(self, child: Child) -> TrainResult:
        while True:
            message = await child.receive(silence_seconds_max=SILENCE_SECONDS_MAX)
            match message.get("type"):
                case "started":
                    self._running.started()
                case "train_progress":
                    progress = TrainProgress.model_validate(message)
                    self._trained_tokens = progress.trained_tokens
                    self._running.progress(progress)
                case "finished":
                    return await self._finished(message)
                case "cancelled":
                    return TrainCancelled(trained_tokens=message["trained_tokens"])
                case "failed":
                    self._trained_tokens = message["trained_tokens"]
                    return self._failed(message["code"], message["message"])
                case other:
                    raise AssertionError(f"unknown message {other!r}")

    async def _finished(self, message: dict[str, Any]) -> TrainFinished:
        measures.TOKENS.labels(kind="trained").inc(message["trained_tokens"])
        config, weights = FILES
        fields = {key: value for key, value in message.items() if key != "type"}
        return TrainFinished(
            **fields,
            adapter_config=await self._stored(config),
            adapter_weights=await self._stored(weights),
            step_metrics=await self._stored(STEP_METRICS),
        )

    async def _stored(self, name: str) -> ObjectRef:
        objects, key = self._running.tools.objects, self._task.output_prefix + name
        return ObjectRef.of(
            await with_store_retries(lambda: objects.put_file(key, self._output_dir / name))
        )

    def _ended_without_a_word(self, gone: ChildGone) -> TrainResult:
        if self._running.cancelled.is_set():
            return TrainCancelled(trained_tokens=self._trained_tokens)
        why = "; the machine may be out of memory" if gone.killed else ""
        return self._failed("platform_interrupted", f"The training process ended early{why}.")

    def _failed(self, code: str, message: str) -> AttemptFailed:
        return AttemptFailed(code=code, message=message, trained_tokens=self._trained_tokens)
