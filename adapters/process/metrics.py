"""Metrics and health of a process without a public port: the worker and the runner.

A thread answers `/metrics` (Prometheus), `/healthz` (the process lives) and `/readyz` (200 or 503,
and what of it is ready) on the settings' metrics port, which only operators should reach. Metrics
are declared as constants of the modules that know them; their labels never name an account, a key
or a piece of work.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, make_wsgi_app

from adapters.process.settings import Settings, Unusable

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

Health = Callable[[], Mapping[str, bool]]
"""The parts of a process by name, and whether each is well; called in a thread of its own."""


@contextmanager
def serve_metrics(settings: Settings, *, health: Health) -> Iterator[str]:
    """Serves while the block runs and gives it the address, "" where the settings name no port.
    Raises Unusable if the port cannot be had."""
    if settings.metrics_port == 0:
        yield ""
        return
    with _server(settings, health) as server:
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        try:
            yield f"http://{settings.metrics_host}:{settings.metrics_port}"
        finally:
            server.shutdown()
            thread.join()


def _server(settings: Settings, health: Health) -> WSGIServer:
    try:
        return make_server(
            settings.metrics_host,
            settings.metrics_port,
            _application(health),
            server_class=_Server,
            handler_class=_Quiet,
        )
    except OSError as error:
        raise Unusable(
            f"GRIDLINE_METRICS_HOST={settings.metrics_host!r} and GRIDLINE_METRICS_PORT="
            f"{settings.metrics_port} cannot be listened at: {error.strerror}"
        ) from None


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, format: str, *arguments: object) -> None:
        """A scraper comes every few seconds; nobody wants to read of it."""


def _application(health: Health) -> WSGIApplication:
    metrics = make_wsgi_app(REGISTRY)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                answer: Iterable[bytes] = metrics(environ, start_response)
                return answer
            case "/healthz":
                status, body = HTTPStatus.OK, b'{"alive": true}'
            case "/readyz":
                parts = health()
                ready = all(parts.values())
                status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
                body = json.dumps({"ready": ready, **parts}).encode()
            case _:
                status, body = HTTPStatus.NOT_FOUND, b"{}"
        start_response(
            f"{status.value} {status.phrase}",
            [("Content-Type", "application/json"), ("Content-Length", str(len(body)))],
        )
        return [body]

    return application
