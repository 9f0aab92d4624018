"""uvicorn's HTTP parser with bounds, and an answer in OpenAI's shape to what is no request.

`__main__.py` gives it to uvicorn. What a client sends before its key was judged must cost little:
heads, trailers and requests sent ahead are bounded in bytes and number, an unfinished head in time.
It knows nothing of routes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from api.http.envelope import new_request_id
from api.http.errors import error_response
from domain.errors import InvalidRequest
from domain.limits import UPLOAD_BYTES_MAX

HEAD_BYTES_MAX = 64 * 1024
"""Of the request line with all headers; and of whatever else comes without a byte of a body."""
HEAD_SECONDS_MAX = 90.0
"""From the connection, or the first byte of a further request, to the end of the headers."""
SENT_AHEAD_MAX = 32
"""Requests that may wait on one connection for the answers before theirs."""
DISCARDED_BYTES_MAX = 2 * UPLOAD_BYTES_MAX
"""Of a body that comes after its answer: many clients read no answer before they sent all."""


class _Refused(Exception):
    """Stops the parser; uvicorn then calls `send_400_response`."""


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awaits_head = True
        self._moved_on = False
        self._bytes_without_progress = 0
        self._discarded_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._fault = ""
        self._answered: RequestResponseCycle | None = None
        """The request whose turn it is; `cycle` is the last that came."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._forget_answer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._moved_on = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        # The parser keeps an unfinished URL or header by itself: only what it was fed can be seen.
        self._bytes_without_progress += len(data)
        if self._moved_on:
            self._bytes_without_progress = 0
        if self._bytes_without_progress > HEAD_BYTES_MAX:
            self._refuse_long_head()
        elif self._awaits_head and not self._answering():
            self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._awaits_head:  # else it is a trailer, which nothing here reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._awaits_head, self._moved_on = False, True
        self._discarded_bytes = 0
        self._stop_head_timer()
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if head_bytes > HEAD_BYTES_MAX:
            self._fault = _LONG_HEAD
            raise _Refused
        super().on_headers_complete()
        if len(self.pipeline) > SENT_AHEAD_MAX:
            self._fault = f"More than {SENT_AHEAD_MAX} requests were sent ahead of their answers."
            raise _Refused

    def on_body(self, body: bytes) -> None:
        self._moved_on = True
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > DISCARDED_BYTES_MAX:
                self.transport.abort()
                return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._awaits_head, self._moved_on = True, True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses and closes. In the middle of an answer only closes, which tells the client that
        it is not whole. `msg` is uvicorn's, for what the parser itself refused."""
        if self._answered is None or not self._answering() or not self._answered.response_started:
            response = error_response(InvalidRequest(self._fault or msg))
            response.headers["x-request-id"] = new_request_id()
            response.headers["connection"] = "close"
            lines = [b"%s: %s\r\n" % header for header in response.raw_headers]
            self.transport.write(
                b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])
            )
        self._forget_answer()
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _forget_answer(self) -> None:
        """What is still written to the connection is dropped."""
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: uvicorn's advice to install a library is none for what any client may send."""

    def _refuse_long_head(self) -> None:
        self._fault = _LONG_HEAD
        self.send_400_response(_LONG_HEAD)

    def _answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS_MAX, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


_LONG_HEAD = f"The request line and headers are larger than {HEAD_BYTES_MAX // 1024} KiB."
