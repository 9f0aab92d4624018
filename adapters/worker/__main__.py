"""`python -m adapters.worker`: the process of a worker, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import structlog

from adapters.bootstrap import ControlPlane, worker_plane
from adapters.event_log.postgres import DatabaseAway
from adapters.kafka import KafkaAway, ensure_topics
from adapters.process.metrics import serve_metrics
from adapters.process.settings import Settings
from adapters.process.start import run_process, usable_store
from adapters.worker.loops import RESTART_SECONDS_MAX, Loops
from adapters.worker.worker import Worker

log = structlog.stdlib.get_logger(__name__)

BROKER_PATIENCE_SECONDS = 5.0
STOP_SECONDS = 1.5
"""For closing all that is open, besides what `stop_seconds` gives to what runs."""
THREADS_MAX = 32
"""More than the event loop's default: slow disks must not keep reads of the database waiting."""
SWITCH_SECONDS = 0.001
"""A fifth of Python's own: each step of the event loop waits for the thread that reads a file."""


async def serve(settings: Settings) -> None:
    """Runs a worker until SIGTERM or SIGINT, and waits for a database that is away. Raises
    Unusable."""
    settings.require("database_url", "kafka_bootstrap", "object_store_url")
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    sys.setswitchinterval(SWITCH_SECONDS)
    with ExitStack() as stack:
        threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="gridline-worker")
        asyncio.get_running_loop().set_default_executor(threads)
        health = _Health()
        stack.enter_context(serve_metrics(settings, health=health))
        await usable_store(settings)
        await _check_topics(settings)
        plane = await _open_plane(stack, settings, stopping)
        if plane is None:
            return
        worker = Worker(plane)
        health.loops = worker.loops
        running = asyncio.create_task(worker.run())
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        worker.stopping.set()
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait({running, waiting}, timeout=settings.stop_seconds + STOP_SECONDS)
        if running.done() and not running.cancelled():
            running.result()


@dataclass(slots=True)
class _Health:
    """What `/readyz` shows. `loops` is set once the database is there."""

    loops: Loops | None = None

    def __call__(self) -> Mapping[str, bool]:
        if self.loops is None:
            return {"database": False}
        return {"database": True} | {name: s.is_well for name, s in self.loops.states.items()}


async def _check_topics(settings: Settings) -> None:
    """Raises KafkaUnusable for topics that are not as the settings say; a broker that is away is
    waited for by the loops that need it, and said."""
    try:
        await ensure_topics(settings, patience_seconds=BROKER_PATIENCE_SECONDS)
    except KafkaAway as away:
        log.warning("the worker starts without a broker", reason=str(away))


async def _open_plane(
    stack: ExitStack, settings: Settings, stopping: asyncio.Event
) -> ControlPlane | None:
    """None if it is stopped before."""
    while not stopping.is_set():
        try:
            return stack.enter_context(worker_plane(settings))
        except DatabaseAway as away:
            log.warning("the database is away", exc_info=away)
            with suppress(TimeoutError):
                async with asyncio.timeout(RESTART_SECONDS_MAX):
                    await stopping.wait()
    return None


def main() -> None:
    """The process."""
    run_process("worker", lambda settings: asyncio.run(serve(settings)))


if __name__ == "__main__":
    main()
