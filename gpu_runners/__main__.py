"""Starts one runner: `python -m gpu_runners`, which `gridlined runner` and the supervisor call.

The runner's small composition root: settings from the environment, Kafka, the object store and the
weights. It needs no database and imports no model library. SIGTERM or Ctrl-C drains it, a second
one ends it at once; where it cannot go on it ends with an error, to be started anew.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from adapters.clock import RandomIds, clock_of
from adapters.kafka import answers, ensure_topics, producer, runner_consumer
from adapters.metrics import serve_metrics
from adapters.objects import open_store
from adapters.settings import Settings
from adapters.start import run_process
from domain.catalog import CATALOG
from domain.ids import RUNNER
from gpu_runners.parent.runner import Runner
from gpu_runners.weights.store import Weights


async def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. Raises KafkaUnusable when the broker never answers, and
    RunnerBroken."""
    well = {"broker": False}
    with serve_metrics(settings, health=lambda: well):
        await _serve(settings, well)


async def _serve(settings: Settings, well: dict[str, bool]) -> None:
    runner_id = RandomIds().new(RUNNER)
    await ensure_topics(settings)
    sender = await producer(settings)
    consumer = await runner_consumer(settings, runner_id)
    well["broker"] = True
    weights_root = Path(settings.weights_dir)
    weights = Weights(weights_root)
    try:
        async with Runner(
            runner_id=runner_id,
            settings=settings,
            producer=sender,
            consumer=consumer,
            objects=open_store(settings.object_store_url),
            clock=clock_of(settings),
            weights=weights,
            weights_root=weights_root,
            bases=tuple(CATALOG) if settings.engine == "echo" else weights.available(),
            broker_answers=lambda: answers(settings.kafka_bootstrap),
        ) as runner:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, runner.drain)
            await runner.run()
    finally:
        await consumer.stop()
        await sender.stop()


def main() -> None:
    """The process."""
    run_process("runner", lambda settings: asyncio.run(serve(settings)))


if __name__ == "__main__":
    main()
