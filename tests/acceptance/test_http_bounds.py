"""What costs a stranger nothing must cost the server little: heads, trailers, requests sent ahead,
slow and endless ones."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import signature

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http import protocol as http_protocol
from api.http.protocol import HEAD_BYTES_MAX, SENT_AHEAD_MAX, BoundedHttp
from tests.acceptance.conftest import Served

GET = b"GET /openai/v1/models HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /openai/v1/batches HTTP/1.1\r\nHost: x\r\n"


@contextmanager
def _connection(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(served.address, timeout=5) as connection:
        yield connection


def _key(served: Served) -> bytes:
    return f"Authorization: Bearer {served.tenant.key}\r\n".encode()


def _all_of(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    gathered = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            gathered += piece
    return gathered


def _refusal(answer: bytes) -> str:
    """The message of a refusal in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: req_" in head
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_request"
    return str(error["message"])


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"BREW /openai/v1/models HTTP/1.1\r\n\r\n",
        b"GET /openai/v1/files/\xff HTTP/1.1\r\n\r\n",
        GET + b"X: a\0b\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
def test_what_is_no_http_is_refused_in_openais_shape(served: Served, request_bytes: bytes) -> None:
    with _connection(served) as connection:
        connection.sendall(request_bytes)
        assert _refusal(_all_of(connection))


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (GET + b"X: ", b"a" * 1_000),
        (GET, b"X: " + b"a" * 1_000 + b"\r\n"),
        (b"GET /", b"a" * 1_000),
        (GET, b"a" * 1_000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"X: aaaaaaa\r\n" * 100),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2;", b"a" * 1_000),
    ],
    ids=["header", "headers", "path", "name", "trailers", "extension"],
)
def test_an_endless_head_is_refused_once_it_is_too_long(
    served: Served, begin: bytes, piece: bytes
) -> None:
    key = _key(served) if begin.startswith(POST) else b""
    begin = begin.replace(POST, POST + key)
    with _connection(served) as connection:
        connection.sendall(begin)
        sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 100 * HEAD_BYTES_MAX:
                connection.sendall(piece)
                sent += len(piece)
        answer = _all_of(connection)
    assert sent < 100 * HEAD_BYTES_MAX
    # Where the server closed under what was still being sent, its answer can be lost on the way.
    assert not answer or "64 KiB" in _refusal(answer) or "Invalid" in _refusal(answer)


@pytest.mark.parametrize(("bytes_more", "refused"), [(-100, False), (1, True)])
def test_a_head_of_the_largest_size_is_read_and_a_larger_one_refused(
    served: Served, bytes_more: int, refused: bool
) -> None:
    key = _key(served)
    filler = b"a" * (HEAD_BYTES_MAX - len(GET) - len(key) + bytes_more)
    if refused:
        filler += b"a" * 200
    with _connection(served) as connection:
        connection.sendall(GET + key + b"Connection: close\r\nX: " + filler + b"\r\n\r\n")
        answer = _all_of(connection)
    assert answer.startswith(b"HTTP/1.1 400" if refused else b"HTTP/1.1 200")


def test_garbage_in_the_middle_of_an_answer_cuts_it_and_is_no_part_of_it(served: Served) -> None:
    data = b"x" * 2_900_000
    file = served.openai().files.create(file=data, purpose="batch")
    with _connection(served) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        path = f"GET /openai/v1/files/{file.id}/content HTTP/1.1\r\nHost: x\r\n".encode()
        connection.sendall(path + _key(served) + b"\r\n")
        begun = connection.recv(100)
        connection.sendall(b"\x16\x03garbage\r\n\r\n")
        answer = begun + _all_of(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1
    assert set(answer.partition(b"\r\n\r\n")[2]) <= set(b"x")


def test_requests_sent_ahead_are_answered_in_turn_up_to_a_bound(served: Served) -> None:
    one = b"GET /openai/v1/models/bge-m3 HTTP/1.1\r\nHost: x\r\n" + _key(served)
    with _connection(served) as connection:
        connection.sendall((one + b"\r\n") * 9 + one + b"Connection: close\r\n\r\n")
        assert _all_of(connection).count(b"HTTP/1.1 200 OK") == 10
    with _connection(served) as connection:
        connection.sendall((one + b"\r\n") * (SENT_AHEAD_MAX + 100))
        assert _all_of(connection).count(b"HTTP/1.1 200 OK") <= SENT_AHEAD_MAX


def test_a_connection_that_never_ends_a_head_is_closed_and_an_idle_one_is_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS_MAX", 0.1)
    for begun in (b"", b"GET / HT", GET + b"X: 1\r\n"):
        with _connection(served) as connection:
            connection.sendall(begun)
            assert _all_of(connection) == b""
    with _connection(served) as connection:
        for _ in range(2):
            connection.sendall(GET + _key(served) + b"\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            assert select.select([connection], [], [], 0.3)[0] == []


def test_a_body_that_goes_on_after_its_answer_is_dropped_up_to_a_bound(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "DISCARDED_BYTES_MAX", 1_000_000)
    with _connection(served) as connection:
        connection.sendall(POST + b"Content-Length: 100000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 100_000_000:
                connection.sendall(b"a" * 65536)
                sent += 65536
    assert 1_000_000 <= sent < 100_000_000


OVERRIDDEN = {
    "__init__",
    "connection_made",
    "connection_lost",
    "data_received",
    "on_header",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "send_400_response",
    "_start_asgi_task",
    "_unsupported_upgrade_warning",
}
"""Of uvicorn's protocol, which promises none of them: pyproject.toml pins its minor release."""


def test_uvicorn_has_every_method_that_is_overridden_and_none_that_is_hidden_by_chance() -> None:
    ours, theirs = vars(BoundedHttp), vars(HttpToolsProtocol)
    assert {name for name in ours if callable(ours[name])} & theirs.keys() == OVERRIDDEN
    for name in OVERRIDDEN - {"__init__"}:
        assert [*signature(ours[name]).parameters] == [*signature(theirs[name]).parameters], name
