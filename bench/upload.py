"""`upload_over_hash_to_disk` and `upload_memory_growth_mib`: a 200 MB batch file through HTTP to a
running API, over reading the same bytes from a socket to the same disk with hashing and fsync."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil

from adapters.embedded.process import free_port
from adapters.operators.actions import open_operator, shipped_prices
from adapters.process.settings import Settings, process_environment
from bench.database import cluster
from bench.report import Figure
from domain.ledger.account import AccountLimits

BYTES = 200_000_000
"""The most that an upload may have."""
PIECE_BYTES = 1 << 20
ROUNDS = 7
STOP_SECONDS_MAX = 15
READY_SECONDS_MAX = 30
READY_POLL_SECONDS = 0.1
BOUNDARY = "bench-boundary"


class RunningApi:
    """`python -m api`, and one customer's key."""

    def __init__(self, process: subprocess.Popen[bytes], *, port: int, api_key: str) -> None:
        self._process = psutil.Process(process.pid)
        self._port = port
        self._headers = {"Authorization": f"Bearer {api_key}"}

    def upload(self, content: bytes) -> tuple[float, float]:
        """Stores it as a batch file; seconds until the answer, and the most resident MiB."""
        head, tail = _multipart_around_file()
        headers = {
            **self._headers,
            "Content-Type": f"multipart/form-data; boundary={BOUNDARY}",
            "Content-Length": str(len(head) + len(content) + len(tail)),
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        highest = self.resident_mib
        start = time.perf_counter()
        connection.putrequest("POST", "/openai/v1/files")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(head)
        for piece in _pieces(content):
            connection.send(piece)
            highest = max(highest, self.resident_mib)
        connection.send(tail)
        answer = connection.getresponse()
        file = json.loads(answer.read())
        seconds = time.perf_counter() - start
        highest = max(highest, self.resident_mib)
        assert (answer.status, file["bytes"]) == (200, len(content)), file
        connection.request("DELETE", f"/openai/v1/files/{file['id']}", headers=self._headers)
        connection.getresponse().read()
        connection.close()
        return seconds, highest

    @property
    def resident_mib(self) -> float:
        """Resident memory now, in MiB."""
        resident: int = self._process.memory_info().rss
        return resident / (1 << 20)


def measure() -> list[Figure]:
    """Interleaved rounds; the median of their ratios, and the highest memory of any."""
    content = _requests_file()
    with cluster() as server, tempfile.TemporaryDirectory(prefix="gridline-bench-") as name:
        url, directory = server.database("upload"), Path(name)
        with _running_api(url, directory) as api, _running_peer(directory) as peer_port:
            api.upload(content[:PIECE_BYTES])
            before = api.resident_mib
            rounds = [
                (*api.upload(content), _socket_to_disk(content, port=peer_port))
                for _ in range(ROUNDS)
            ]
        ours, peers = (median(each[i] for each in rounds) for i in (0, 2))
        conditions = (
            f"{BYTES // 1_000_000} MB from another process; medians {ours:.2f} and "
            f"{peers:.2f} s; {server.conditions}"
        )
    return [
        Figure(
            name="upload_over_hash_to_disk",
            value=round(median(seconds / peer for seconds, _, peer in rounds), 2),
            unit="times",
            goal="<= 3",
            peer="a bare Python process: the same bytes from a socket, SHA-256, write, fsync",
            conditions=conditions,
        ),
        Figure(
            name="upload_memory_growth_mib",
            value=round(max(highest for _, highest, _ in rounds) - before, 1),
            unit="MiB",
            goal="<= 64",
            peer="the API process after one upload of 1 MiB",
            conditions=conditions,
        ),
    ]


@contextmanager
def _running_api(url: str, directory: Path) -> Iterator[RunningApi]:
    port = free_port()
    settings = Settings(
        database_url=url,
        object_store_url=(directory / "objects").as_uri(),
        port=port,
        log_level="WARNING",
    )
    with open_operator(settings) as operator:
        operator.publish_prices(shipped_prices())
        account = operator.open_account(
            email="bench@localhost",
            credit_usd="1",
            limits=AccountLimits(open_fine_tunes=1, open_batches=1),
        )
    process = subprocess.Popen(
        [sys.executable, "-m", "api"], env=process_environment() | settings.to_environment()
    )
    try:
        _until_it_answers(port)
        yield RunningApi(process, port=port, api_key=account.api_key)
    finally:
        process.terminate()
        process.wait(STOP_SECONDS_MAX)


@contextmanager
def _running_peer(directory: Path) -> Iterator[int]:
    """The port of `socket_to_disk.py`."""
    command = [sys.executable, "-m", "bench.socket_to_disk", str(directory), str(BYTES)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def _socket_to_disk(content: bytes, *, port: int) -> float:
    """Seconds until the peer has the bytes for good."""
    expected = hashlib.sha256(content).digest()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        start = time.perf_counter()
        for piece in _pieces(content):
            connection.sendall(piece)
        digest = connection.recv(len(expected), socket.MSG_WAITALL)
        seconds = time.perf_counter() - start
    assert digest == expected
    return seconds


def _multipart_around_file() -> tuple[bytes, bytes]:
    """What stands before and after the file's bytes in the body."""
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    return head.encode(), f"\r\n--{BOUNDARY}--\r\n".encode()


def _pieces(content: bytes) -> Iterator[memoryview]:
    whole = memoryview(content)
    for start in range(0, len(content), PIECE_BYTES):
        yield whole[start : start + PIECE_BYTES]


def _requests_file() -> bytes:
    """Request lines, cut at the size."""
    line = json.dumps(
        {
            "custom_id": "request",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "What is in the parcel? " * 20}]},
        }
    ).encode()
    return ((line + b"\n") * (BYTES // len(line)))[:BYTES]


def _until_it_answers(port: int) -> None:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(READY_POLL_SECONDS)
        else:
            return
