"""A running product for the SDKs: `gridlined up` as a customer meets it, and customers.

The echo engine stands in for the models, so that what is tested is the way there and back. One
instance serves the whole session; nothing of ours sits between an SDK and the port.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import _memory_directory

OPERATOR = (sys.executable, "-m", "adapters.operators.cli")
READY_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 30.0
QUICK = {
    "GRIDLINE_ENGINE": "echo",
    "GRIDLINE_ALLOW_ECHO": "1",
    "GRIDLINE_HEARTBEAT_SECONDS": "0.5",
    "GRIDLINE_PROGRESS_SECONDS": "0.5",
    "GRIDLINE_SCHEDULER_TICK_SECONDS": "0.2",
}


@dataclass(frozen=True, slots=True)
class Customer:
    """What someone gets who signs up: a URL and a key."""

    account_id: str
    base_url: str
    api_key: str

    def environment(self) -> dict[str, str]:
        """The two variables that every SDK reads by itself."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}


@dataclass(frozen=True, slots=True)
class Product:
    """A ready `gridlined up`."""

    base_url: str
    data_directory: str

    @property
    def metrics_url(self) -> str:
        return self.base_url.removesuffix("/openai/v1") + "/metrics"

    def new_customer(self, *, credit_usd: int = 20) -> Customer:
        """An account with three open fine-tunes and one open batch."""
        opened = self.operator(
            "accounts", "create",
            "--email", f"{uuid.uuid4().hex}@example.com", "--credit-usd", str(credit_usd),
            "--open-fine-tunes", "3", "--open-batches", "1",
        )  # fmt: skip
        return Customer(
            account_id=opened["account_id"], base_url=self.base_url, api_key=opened["api_key"]
        )

    @contextmanager
    def refused(
        self, refusal: type[openai.APIStatusError], method: str, route: str, *, tries: int = 1
    ) -> Iterator[pytest.ExceptionInfo[openai.APIStatusError]]:
        """Inside, the SDK asks the route so many times, and each time it refuses."""
        before = self._requests(method, route)
        with pytest.raises(refusal) as refused:
            yield refused
        after = self._requests(method, route)
        asked = {each: count - before.get(each, 0) for each, count in after.items()}
        expected = {str(refused.value.status_code): tries}
        assert {each: count for each, count in asked.items() if count} == expected

    def _requests(self, method: str, route: str) -> dict[str, int]:
        with urllib.request.urlopen(self.metrics_url, timeout=30) as answer:
            text = answer.read().decode()
        pattern = re.compile(
            rf'gridline_http_requests_total{{method="{method}",'
            rf'route="{re.escape(f"{method} /openai/v1{route}")}",status="(\d+)"}} (\d+)'
        )
        return {status: int(count) for status, count in pattern.findall(text)}

    def operator(self, *arguments: str) -> Any:
        """What an operator's command answers."""
        done = subprocess.run(
            [*OPERATOR, *arguments, "--data", self.data_directory, "--json"],
            check=True,
            stdout=subprocess.PIPE,
        )
        return json.loads(done.stdout)

    def audit(self) -> None:
        """Raises CalledProcessError if log, holds, keys, journal and balances disagree."""
        command = [*OPERATOR, "audit", "verify", "--data", self.data_directory]
        subprocess.run(command, check=True)


@contextmanager
def running_product(**settings: str) -> Iterator[Product]:
    """An instance with these settings in a directory of its own; both are gone afterwards."""
    with tempfile.TemporaryDirectory(dir=_memory_directory()) as directory:
        ready, log = Path(directory) / "ready.json", Path(directory) / "up.log"
        command = [*OPERATOR, "up", "--port", "0"]
        command += ["--data", f"{directory}/data", "--ready-file", str(ready)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=os.environ | settings, stdout=output, stderr=output
            )
        try:
            deadline = time.monotonic() + READY_SECONDS_MAX
            while not ready.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            facts = json.loads(ready.read_text())
            yield Product(base_url=facts["base_url"], data_directory=facts["data_dir"])
        finally:
            process.terminate()
            process.wait(timeout=STOP_SECONDS_MAX)


@pytest.fixture(scope="session")
def product() -> Iterator[Product]:
    """The echo engine's instance. After the last test its books are audited."""
    with running_product(**QUICK) as running:
        yield running
        running.audit()


@pytest.fixture
def customer(product: Product) -> Customer:
    """An account of the test's own."""
    return product.new_customer()
