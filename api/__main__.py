"""`python -m api`: serves the API until it is told to stop.

Reads its settings from the environment, opens a control plane, and closes it after the last request
was answered. Requests that are running when the stop comes have a few seconds to end.
"""

from __future__ import annotations

import signal
import socket
import sys
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from adapters.bootstrap import control_plane
from adapters.settings import Settings, process_environment
from adapters.telemetry import configure_logging
from api.app import create_app
from api.control import Api
from api.http.protocol import BoundedHttp

KEEP_ALIVE_SECONDS = 90
"""Longer than the SDKs keep an idle connection: one that dies under a POST is sent again."""
STOP_SECONDS_MAX = 5
BACKLOG = 2048


def main() -> None:
    """Raises ValueError for settings that cannot be used."""
    settings = Settings.from_environment(process_environment())
    configure_logging("api", level=settings.log_level)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    with control_plane(settings) as plane, _listening(settings) as listener:
        app = create_app(Api(control=plane, lease_seconds=settings.lease_seconds))
        uvicorn.Server(server_config(app)).run(sockets=[listener])


def server_config(app: Starlette) -> uvicorn.Config:
    """How uvicorn serves the application; tests serve it in the same way."""
    return uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS_MAX,
    )


def _stop(_: int, __: FrameType | None) -> None:
    """Ends the process in order. While uvicorn serves it takes the signal itself, stops serving,
    and raises it again here."""
    sys.exit(0)


def _listening(settings: Settings) -> socket.socket:
    """Bound before the server starts, so that a taken port is an error and not a log line."""
    return socket.create_server((settings.host, settings.port), backlog=BACKLOG)


if __name__ == "__main__":
    main()
