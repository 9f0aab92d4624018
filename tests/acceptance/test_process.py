"""`python -m api` as a process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from adapters.bootstrap import control_plane
from adapters.embedded.process import free_port
from adapters.process.settings import Settings, process_environment
from tests.acceptance.conftest import RunningApi
from tests.conftest import Database

SECONDS_MAX = 15


def test_the_api_says_what_is_ready_and_stops_within_seconds(
    database: Database, tmp_path: Path
) -> None:
    port = free_port()
    settings = Settings(
        database_url=database.application_url, object_store_url=tmp_path.as_uri(), port=port
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "api"],
        env=process_environment() | settings.to_environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}") as http:
            _until_it_answers(http)
            ready = http.get("/readyz")
            assert (ready.status_code, ready.json()) == (
                200,
                {"ready": True, "database": True, "store": True, "runners": 0},
            )
            # This client's idle connection must not keep the server.
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()


UPLOAD = (
    b"--B\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n"
    b"--B\r\nContent-Disposition: form-data; name=file\r\n\r\n{}\r\n--B--\r\n"
)


@contextmanager
def _stopped_while_it_uploads(
    database: Database, directory: Path, *, stop_seconds: float
) -> Iterator[socket.socket]:
    """The connection of an upload of which half was sent when the API was told to stop."""
    port = free_port()
    settings = Settings(
        database_url=database.application_url,
        object_store_url=directory.as_uri(),
        port=port,
        stop_seconds=stop_seconds,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "api"],
        env=process_environment() | settings.to_environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        with (
            httpx2.Client(base_url=f"http://127.0.0.1:{port}") as http,
            control_plane(settings) as plane,
        ):
            _until_it_answers(http)
            tenant = RunningApi(plane=plane, root="", objects_directory=directory).new_tenant()
            with socket.create_connection(("127.0.0.1", port), timeout=SECONDS_MAX) as upload:
                upload.sendall(
                    b"POST /openai/v1/files HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                    b"Content-Type: multipart/form-data; boundary=B\r\n"
                    + f"Content-Length: {len(UPLOAD)}\r\n".encode()
                    + f"Authorization: Bearer {tenant.key}\r\n\r\n".encode()
                )
                assert upload.recv(1000).startswith(b"HTTP/1.1 100")
                upload.sendall(UPLOAD[:40])
                process.send_signal(signal.SIGTERM)
                yield upload
            assert process.wait(SECONDS_MAX) == 0
    finally:
        process.kill()
        process.wait()


def _answer(upload: socket.socket) -> tuple[bytes, dict[str, Any]]:
    """The head and the body's value, once the server has closed."""
    head, _, body = b"".join(iter(lambda: upload.recv(65_536), b"")).partition(b"\r\n\r\n")
    return head, json.loads(body)


def test_an_upload_may_end_after_the_api_was_told_to_stop(
    database: Database, tmp_path: Path
) -> None:
    with _stopped_while_it_uploads(database, tmp_path, stop_seconds=SECONDS_MAX) as upload:
        while _takes_connections(upload.getpeername()):
            time.sleep(0.01)
        upload.sendall(UPLOAD[40:])
        head, file = _answer(upload)
    assert head.startswith(b"HTTP/1.1 200")
    assert file["bytes"] == 2


def test_an_upload_that_outlasts_a_stop_is_told_to_come_again(
    database: Database, tmp_path: Path
) -> None:
    with _stopped_while_it_uploads(database, tmp_path, stop_seconds=1) as upload:
        head, refusal = _answer(upload)
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 2" in head
    assert b"x-request-id: req_" in head
    assert refusal["error"]["code"] == "overloaded"
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def _takes_connections(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=1).close()
    except ConnectionError:
        return False
    return True


def _until_it_answers(http: httpx2.Client) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            http.get("/healthz")
        except httpx2.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the API does not answer")
