"""What surrounds every answer: its request id, its time, its log line, its count, and the last net
under unexpected failures.

The outermost middleware of `app.py`. It logs the route's template, never the path or the query,
which can hold what a customer wrote.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.errors import error_response, internal_error_response
from api.http.metrics import Metrics
from domain.errors import Overloaded

log = structlog.stdlib.get_logger(__name__)

SCOPE_KEY = "gridline.request"
CLIENT_CLOSED = 499
"""What the log and the counters call a request whose client went away."""


@dataclass(slots=True)
class RequestRecord:
    """What is noted about a request while it runs."""

    request_id: str
    route: str = "unknown"
    status: int = 0
    account_id: str | None = None
    key_id: str | None = None

    def logged(self) -> dict[str, object]:
        """Which request it is, as the log names it: ids and the route's template only."""
        return {
            "request_id": self.request_id,
            "route": self.route,
            "account_id": self.account_id,
            "key_id": self.key_id,
        }


def new_request_id() -> str:
    """What `x-request-id` says."""
    return f"req_{secrets.token_hex(16)}"


def record_of(scope: Scope) -> RequestRecord:
    """The request's record."""
    record = scope[SCOPE_KEY]
    assert isinstance(record, RequestRecord)
    return record


class Envelope:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(request_id=new_request_id())
        scope[SCOPE_KEY] = record
        began = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                milliseconds = round((time.perf_counter() - began) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", record.request_id.encode()),
                    (b"openai-processing-ms", str(milliseconds).encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            record.status = CLIENT_CLOSED
        except asyncio.CancelledError:
            # The server was told to stop, and the time that it gives to what runs is over.
            if not record.status:
                await _answer_stopping(scope, receive, send_with_headers)
        except Exception:  # noqa: BLE001 - the last net: logged, and answered as our mistake
            await self._answer_failure(scope, receive, send_with_headers, record)
        seconds = time.perf_counter() - began
        self._metrics.observe(
            method=scope["method"], route=record.route, status=record.status, seconds=seconds
        )
        log.info("request", **record.logged(), status=record.status, ms=round(seconds * 1000))

    async def _answer_failure(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        started = record.status != 0
        log.exception("request failed", **record.logged())
        # A begun answer is left unfinished: the server then closes the connection, which tells the
        # client that it is not whole.
        if not started:
            await internal_error_response()(scope, receive, send)


async def _answer_stopping(scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(
        Overloaded("The server is being restarted. Send the request again.", retry_after_seconds=2)
    )
    response.headers["connection"] = "close"
    await response(scope, receive, send)
