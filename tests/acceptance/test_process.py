"""`python -m api` as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2

from adapters.embedded.process import free_port
from adapters.settings import Settings, process_environment
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
                503,
                {"ready": False, "database": True, "runners": 0},
            )
            # This client's idle connection must not keep the server.
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()


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
