"""`python -m adapters.worker`: the process of a worker, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack, suppress

import psycopg
import structlog

from adapters.bootstrap import ControlPlane, worker_plane
from adapters.metrics import serve_metrics
from adapters.settings import Settings
from adapters.start import run_process
from adapters.worker.loops import RESTART_SECONDS_MAX
from adapters.worker.worker import Worker

log = structlog.stdlib.get_logger(__name__)

STOP_SECONDS_MAX = 1.5


async def serve(settings: Settings) -> None:
    """Runs a worker until SIGTERM or SIGINT, and waits for a database that is away."""
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
        running = asyncio.create_task(Worker(plane).run())
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait({running, waiting}, timeout=STOP_SECONDS_MAX)


async def _open_plane(
    stack: ExitStack, settings: Settings, stopping: asyncio.Event
) -> ControlPlane | None:
    """None if it is stopped before."""
    while not stopping.is_set():
        try:
            return stack.enter_context(worker_plane(settings))
        except psycopg.OperationalError:
            log.warning("the database is away")
            with suppress(TimeoutError):
                async with asyncio.timeout(RESTART_SECONDS_MAX):
                    await stopping.wait()
    return None


def main() -> None:
    """The process."""
    run_process("worker", lambda settings: asyncio.run(serve(settings)))


if __name__ == "__main__":
    main()
