"""`python -m adapters.worker`: the process of a worker, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack, suppress

import structlog

from adapters.bootstrap import ControlPlane, worker_plane
from adapters.event_log.postgres import DatabaseAway
from adapters.kafka import ensure_topics
from adapters.metrics import serve_metrics
from adapters.settings import Settings
from adapters.start import run_process, usable_store
from adapters.worker.loops import RESTART_SECONDS_MAX
from adapters.worker.worker import Worker

log = structlog.stdlib.get_logger(__name__)

STOP_SECONDS_MAX = 1.5


async def serve(settings: Settings) -> None:
    """Runs a worker until SIGTERM or SIGINT, and waits for a database that is away. Raises
    Unusable."""
    settings.require("database_url", "kafka_bootstrap", "object_store_url")
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    well = {"database": False}
    with ExitStack() as stack:
        stack.enter_context(serve_metrics(settings, health=lambda: well))
        plane = await _open_plane(stack, settings, stopping)
        if plane is None:
            return
        well["database"] = True
        running = asyncio.create_task(_run(plane))
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait({running, waiting}, timeout=STOP_SECONDS_MAX)


async def _run(plane: ControlPlane) -> None:
    """Tries first what the settings name, so that what never works ends the process."""
    await usable_store(plane.settings)
    await ensure_topics(plane.settings)
    await Worker(plane).run()


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
