"""`python -m api`: serves the API until it is told to stop.

Reads its settings from the environment, opens a control plane, and closes it after the last request
was answered. Requests that are running when the stop comes have `GRIDLINE_STOP_SECONDS` to end.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from math import ceil
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from adapters.bootstrap import control_plane
from adapters.process.settings import Settings, Unusable
from adapters.process.start import run_process, usable_store
from api.app import create_app
from api.control import Api
from api.http.protocol import BoundedHttp

KEEP_ALIVE_SECONDS = 90
"""Longer than the SDKs keep an idle connection: one that dies under a POST is sent again."""
BACKLOG = 2048


def main() -> None:
    """The process."""
    run_process("api", serve)


def serve(settings: Settings) -> None:
    """Returns when it was told to stop. Raises Unusable."""
    settings.require("database_url", "object_store_url")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    asyncio.run(usable_store(settings))
    with control_plane(settings, clients_wait=True) as plane, _listening(settings) as listener:
        app = create_app(
            Api(control=plane, lease_seconds=settings.lease_seconds, public_url=settings.public_url)
        )
        config = server_config(app, stop_seconds=settings.stop_seconds)
        uvicorn.Server(config).run(sockets=[listener])


def server_config(app: Starlette, *, stop_seconds: float) -> uvicorn.Config:
    """How uvicorn serves the application; tests serve it in the same way."""
    return uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=ceil(stop_seconds),
    )


def _stop(_: int, __: FrameType | None) -> None:
    """Ends the process in order. While uvicorn serves it takes the signal itself, stops serving,
    and raises it again here."""
    sys.exit(0)


def _listening(settings: Settings) -> socket.socket:
    """Bound before the server starts, so that a taken port is an error and not a log line. Raises
    Unusable."""
    try:
        if settings.listen_fd:
            return socket.socket(fileno=settings.listen_fd)
        return socket.create_server((settings.host, settings.port), backlog=BACKLOG)
    except OSError as error:
        raise Unusable(
            f"GRIDLINE_HOST={settings.host!r} and GRIDLINE_PORT={settings.port} "
            f"(GRIDLINE_LISTEN_FD={settings.listen_fd}) cannot be listened at: {error.strerror}"
        ) from error


if __name__ == "__main__":
    main()
