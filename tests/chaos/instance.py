"""A whole instance under `gridlined up`, which tests kill in parts, and what its log says.

The processes are the product's own, with times of a second or so; work goes in through the official
SDK. `Instance` reads the log beside the API, so that what is asserted is what happened and not what
is shown. It must leave no process behind, whatever a test did.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import openai
import psutil
import psycopg
from openai import OpenAI

from adapters.audit import verify as audit
from adapters.embedded.postgres import Postgres
from adapters.event_log.aggregates import AGGREGATES
from adapters.event_log.event_store import decode, fold
from adapters.event_log.postgres import connect
from adapters.operators.actions import OpenedAccount, open_operator
from adapters.process.settings import Settings
from domain.ledger.account import Account, AccountLimits
from domain.log.aggregate import Aggregate
from domain.messages import Heartbeat
from projections.direct import heartbeats

BASE = "smollm2-135m-instruct"
BATCH_ENDED = ("failed", "completed", "expired", "cancelled")
JOB_ENDED = ("succeeded", "failed", "cancelled")

READY_SECONDS_MAX = 60.0
RECOVERED_SECONDS_MAX = 15.0
WAIT_SECONDS_MAX = 60.0
STOPPED_SECONDS_MAX = 20.0
ENDED_SECONDS_MAX = 15.0
LOOK_SECONDS = 0.03

QUICK: Mapping[str, str] = {
    "GRIDLINE_ENGINE": "echo",
    "GRIDLINE_ALLOW_ECHO": "1",
    "GRIDLINE_HEARTBEAT_SECONDS": "0.5",
    "GRIDLINE_LEASE_SECONDS": "4",
    "GRIDLINE_SCHEDULER_TICK_SECONDS": "0.5",
    "GRIDLINE_PROGRESS_SECONDS": "0.2",
    "GRIDLINE_PROGRESS_EVENT_SECONDS": "1",
    "GRIDLINE_BATCH_CHUNK_REQUESTS": "10",
}

_EVENTS = """
    SELECT notification_id, originator_id, originator_version, topic, state FROM gridline_events
    WHERE %(stream)s::text IS NULL OR originator_id = %(stream)s::text ORDER BY notification_id
"""

PASSING_TROUBLE = (openai.APIConnectionError, openai.InternalServerError, psycopg.OperationalError)
"""What a client meets while something is being started again."""

T = TypeVar("T")


def until(look: Callable[[], T | None], what: str, *, seconds: float = WAIT_SECONDS_MAX) -> T:
    """The first answer of `look` that is true; trouble that passes is no answer."""
    deadline = time.monotonic() + seconds
    while True:
        trouble: Exception | None = None
        try:
            if found := look():
                return found
        except PASSING_TROUBLE as error:
            trouble = error
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s; {trouble!r}"
        time.sleep(LOOK_SECONDS)


class Instance:
    """One data directory and the `gridlined up` on it, started and ended at will."""

    def __init__(self, directory: Path, settings: Mapping[str, str] = QUICK) -> None:
        self.data = directory / "data"
        self.temporary = directory / "tmp"
        self.output = directory / "up.log"
        self._ready_file = directory / "ready.json"
        self._settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Returns when it is ready, with the seconds that it took."""
        began = time.monotonic()
        command = [sys.executable, "-m", "adapters.operators.cli", "up", "--data", str(self.data)]
        command += ["--port", "0", "--ready-file", str(self._ready_file)]
        self._ready_file.unlink(missing_ok=True)
        self.temporary.mkdir(exist_ok=True)
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **self._settings, "TMPDIR": str(self.temporary)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        until(self._ready_or_dead, "the instance is ready", seconds=READY_SECONDS_MAX)
        return time.monotonic() - began

    def ensure_running(self) -> None:
        """For the next test, whatever the last one left."""
        if self.process is None or self.process.poll() is not None:
            self.end()
            self.start()

    def end(self) -> None:
        """Ends it in order, so that PostgreSQL gives its shared memory back, and then whatever
        still runs of it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=STOPPED_SECONDS_MAX)
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        until(lambda: not self.processes(), "all is ended", seconds=ENDED_SECONDS_MAX)

    def processes(self) -> list[psutil.Process]:
        """All of it that run, found by the data directory and not by who started them."""
        return [each for each in psutil.process_iter() if self._is_ours(each)]

    def pid(self, name: str) -> int:
        """The process that now has this part: postgres, broker, api, worker or runner."""
        return int(self._ready()["processes"][name])

    def children(self, name: str, module: str) -> list[psutil.Process]:
        """The children of a part that run this module."""
        try:
            children = psutil.Process(self.pid(name)).children()
            return [each for each in children if module in each.cmdline()]
        except psutil.Error:
            return []

    def is_alive(self, name: str) -> bool:
        """Whether the part runs, by what the supervisor says."""
        return bool(psutil.pid_exists(self.pid(name)))

    @contextmanager
    def client(self, account: OpenedAccount) -> Iterator[OpenAI]:
        """The official SDK, which here never tries again by itself."""
        url = self._ready()["base_url"]
        with OpenAI(base_url=url, api_key=account.api_key, max_retries=0, timeout=20) as client:
            yield client

    def open_account(
        self, *, credit_usd: str = "5", open_fine_tunes: int = 1, open_batches: int = 1
    ) -> OpenedAccount:
        """A new account with a key."""
        limits = AccountLimits(open_fine_tunes=open_fine_tunes, open_batches=open_batches)
        with open_operator(Settings(database_url=self._database_url)) as operator:
            return operator.open_account(email="a@b.c", credit_usd=credit_usd, limits=limits)

    def grant(self, account: OpenedAccount, credit_usd: str) -> None:
        """More credit."""
        with open_operator(Settings(database_url=self._database_url)) as operator:
            operator.grant(account_id=account.account_id, credit_usd=credit_usd, note="test")

    # The log ---------------------------------------------------------------------------------

    def events(self, stream: str | None = None) -> list[tuple[int, Aggregate.Event]]:
        """Position and event, of one stream or of all."""
        assert AGGREGATES
        with connect(self._database_url, name="test") as connection:
            rows = connection.execute(_EVENTS, {"stream": stream}).fetchall()
        return [
            (
                row["notification_id"],
                decode(
                    topic=row["topic"],
                    originator_id=row["originator_id"],
                    originator_version=row["originator_version"],
                    state=bytes(row["state"]),
                ),
            )
            for row in rows
        ]

    def named(self, stream: str, *names: str) -> list[tuple[int, Any]]:
        """The events of a stream with one of these class names."""
        return [each for each in self.events(stream) if type(each[1]).__name__ in names]

    def account(self, account: OpenedAccount) -> Account:
        """As its events make it."""
        folded: Account | None = fold([event for _, event in self.events(account.account_id)])
        assert folded is not None
        return folded

    def heartbeat(self, runner_id: str) -> Heartbeat | None:
        """The newest one that the worker knows of this runner."""
        with connect(self._database_url, name="test") as connection:
            known = {each.runner_id: each.heartbeat for each in heartbeats.list_all(connection)}
        return known.get(runner_id)

    def audit_differences(self) -> Sequence[audit.Difference]:
        """What `gridlined audit verify` finds."""
        with connect(self._database_url, name="test") as connection:
            return audit.verify(connection).differences

    @property
    def _database_url(self) -> str:
        return Postgres(self.data).application_url

    def _ready(self) -> dict[str, Any]:
        ready: dict[str, Any] = json.loads(self._ready_file.read_text())
        return ready

    def _ready_or_dead(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.output.read_text()
        return self._ready_file.exists()

    def _is_ours(self, process: psutil.Process) -> bool:
        place = str(self.data)
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            known = [*process.cmdline(), process.cwd(), *process.environ().values()]
            known.append(os.readlink(f"/proc/{process.pid}/fd/1"))
        except (psutil.Error, OSError):
            return False
        return any(place in each for each in known)


@contextmanager
def instance_in(directory: Path, settings: Mapping[str, str] = QUICK) -> Iterator[Instance]:
    """A running instance that leaves nothing behind."""
    instance = Instance(directory, settings)
    try:
        instance.start()
        yield instance
    finally:
        instance.end()


def chat_lines(count: int, *, text: str, max_tokens: int = 16) -> bytes:
    """Request lines of a batch, `line-0` and on."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": BASE,
                    "messages": [{"role": "user", "content": f"{text} {number}"}],
                    "max_completion_tokens": max_tokens,
                },
            }
        ).encode()
        + b"\n"
        for number in range(count)
    )


def chat_rows(count: int, *, text: str) -> bytes:
    """Rows of a training file."""
    return b"".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"{text} {number}"},
                    {"role": "assistant", "content": "delivery"},
                ]
            }
        ).encode()
        + b"\n"
        for number in range(count)
    )


def create_batch(client: OpenAI, lines: bytes) -> str:
    """Uploads and creates; the batch's id."""
    file = client.files.create(file=("lines.jsonl", lines), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return batch.id


def create_training(client: OpenAI, rows: bytes) -> str:
    """Uploads and creates, with a step for each row; the job's id."""
    file = client.files.create(file=("rows.jsonl", rows), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=BASE,
        training_file=file.id,
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": 1}},
        },
    )
    return job.id


def kill(pid: int) -> None:
    """What no process can prepare for."""
    os.kill(pid, signal.SIGKILL)
