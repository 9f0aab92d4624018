"""A worker, its database and its broker, all real, and runners that a test scripts or lets run.

Times are a fraction of the product's, and the product's clock is a file that the test moves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiokafka.errors import KafkaError

from adapters import kafka
from adapters.bootstrap import ControlPlane, worker_plane
from adapters.operators.actions import OpenedAccount, Operator, shipped_prices
from adapters.process.settings import Settings
from adapters.worker.loops import Loops
from adapters.worker.worker import Worker
from domain.assets.file import File, Purpose
from domain.catalog import CATALOG, CPU
from domain.commands.batches import CancelBatch, cancel_batch
from domain.commands.create_batch import CreateBatch, create_batch
from domain.commands.create_fine_tuning_job import CreateFineTuningJob, create_fine_tuning_job
from domain.commands.files import StoreFile, store_file
from domain.commands.fine_tuning import CancelFineTuningJob, cancel_fine_tuning_job
from domain.commands.idempotency import Origin
from domain.ids import FILE, derived_file_id
from domain.inputs.batch_create import parse_batch_create
from domain.inputs.job_create import parse_fine_tuning_create
from domain.inputs.training_file import TrainingFacts, TrainingFileCheck
from domain.ledger.account import Account, AccountLimits
from domain.log.unit_of_work import CommandContext, UnitOfWork
from domain.messages import (
    PROGRESS_TOPIC,
    RUNNERS_TOPIC,
    WORK_MESSAGE,
    Assign,
    Attempt,
    AttemptFailed,
    BatchChunkTask,
    Cancel,
    ChunkFinished,
    Heartbeat,
    ModelUsage,
    ObjectRef,
    Report,
    Revoke,
)
from domain.ports import Consumer, ObjectMissing, Producer, Record
from domain.work.batch import Batch
from domain.work.fine_tuning_job import FineTuningJob
from tests.conftest import Database

BASE = "smollm2-135m-instruct"
WAIT_SECONDS_MAX = 15.0
BEAT_SECONDS = 0.15
LEASE_SECONDS = 1.5
START = datetime(2026, 1, 1, tzinfo=UTC)
TEST = CommandContext(actor="system:test", correlation_id="t", causation="test", command_id="t")

CHAT_ROW = {
    "messages": [
        {"role": "user", "content": "two and two"},
        {"role": "assistant", "content": "four"},
    ]
}
PREFERENCE_ROW = {
    "input": {"messages": [{"role": "user", "content": "two and two"}]},
    "preferred_output": [{"role": "assistant", "content": "four"}],
    "non_preferred_output": [{"role": "assistant", "content": "five"}],
}

Work = Batch | FineTuningJob


def chat_lines(count: int, *, text: str = "hello", model: str = BASE) -> list[dict[str, Any]]:
    """Request lines of a batch."""
    return [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"{text} {number}"}],
                "max_completion_tokens": 16,
            },
        }
        for number in range(count)
    ]


@dataclass
class Rig:
    """What tests do to a running worker."""

    settings: Settings
    plane: ControlPlane
    account: OpenedAccount
    clock_file: Path
    worker: asyncio.Task[None] | None = None
    loops: Loops = field(default_factory=Loops)

    def start_worker(self) -> None:
        """A worker like a new process's, on the same planes."""
        worker = Worker(self.plane)
        self.loops = worker.loops
        self.worker = asyncio.create_task(worker.run())

    async def stop_worker(self) -> None:
        """Ends it wherever it is."""
        if self.worker is not None:
            await _end([self.worker])

    def move_clock(self, by: timedelta) -> None:
        """The product's time jumps."""
        moved = datetime.fromisoformat(self.clock_file.read_text()) + by
        unfinished = self.clock_file.with_suffix(".new")
        unfinished.write_text(moved.isoformat())
        unfinished.replace(self.clock_file)

    async def store(
        self, content: bytes, *, purpose: Purpose, training: TrainingFacts | None = None
    ) -> str:
        """Stores an upload; returns the file's id."""
        file_id = self.plane.ids.new(FILE)

        async def pieces() -> AsyncIterator[bytes]:
            yield content

        stored = await self.plane.objects.put(f"files/{file_id}", pieces())
        return await self.plane.writer.execute(
            store_file,
            StoreFile(
                origin=self._origin("POST /files", {"file": file_id}),
                file_id=file_id,
                purpose=purpose,
                object=stored,
                filename="rows.jsonl",
                expires_at=None,
                training=training,
            ),
            TEST,
        )

    async def create_batch(self, lines: Sequence[dict[str, Any]], *, window: str = "24h") -> str:
        """Uploads the lines and creates a batch of them; returns its id."""
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        body = {
            "input_file_id": await self.store(content, purpose="batch"),
            "endpoint": "/v1/chat/completions",
            "completion_window": window,
        }
        create = CreateBatch(self._origin("POST /batches", body), parse_batch_create(body))
        return await self.plane.writer.execute(create_batch, create, TEST)

    async def create_job(
        self, rows: int = 12, *, model: str = BASE, method: dict[str, Any] | str | None = None
    ) -> str:
        """Uploads rows and creates a training on them; returns its id."""
        row = PREFERENCE_ROW if method == {"type": "dpo"} else CHAT_ROW
        content = json.dumps(row).encode() + b"\n"
        check = TrainingFileCheck()
        check.feed(content * rows)
        facts = check.finish()
        file_id = await self.store(content * rows, purpose="fine-tune", training=facts)
        body = {"model": model, "training_file": file_id}
        body |= {"method": method} if method is not None else {}
        create = CreateFineTuningJob(
            self._origin("POST /fine_tuning/jobs", body), parse_fine_tuning_create(body)
        )
        return await self.plane.writer.execute(create_fine_tuning_job, create, TEST)

    async def cancel_batch(self, batch_id: str) -> None:
        """As its owner."""
        command = CancelBatch(account_id=self.account.account_id, batch_id=batch_id)
        await self.plane.writer.execute(cancel_batch, command, TEST)

    async def cancel_job(self, job_id: str) -> None:
        """As its owner."""
        command = CancelFineTuningJob(account_id=self.account.account_id, job_id=job_id)
        await self.plane.writer.execute(cancel_fine_tuning_job, command, TEST)

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """The fields of the batch as they are now."""
        return await self._fields(Batch, batch_id)

    async def job(self, job_id: str) -> dict[str, Any]:
        """The fields of the job as they are now."""
        return await self._fields(FineTuningJob, job_id)

    async def credit(self) -> dict[str, Any]:
        """The fields of the account as they are now."""
        return await self._fields(Account, self.account.account_id)

    async def batch_when(
        self,
        batch_id: str,
        status: str,
        *,
        among: Callable[[dict[str, Any]], bool] | None = None,
        seconds: float = WAIT_SECONDS_MAX,
    ) -> dict[str, Any]:
        """The batch once it has that status."""

        async def look() -> dict[str, Any] | None:
            fields = await self.batch(batch_id)
            wanted = fields["status"] == status and (among is None or among(fields))
            return fields if wanted else None

        found: dict[str, Any] = await eventually(look, seconds=seconds)
        return found

    async def job_when(self, job_id: str, status: str) -> dict[str, Any]:
        """The job once it has that status."""

        async def look() -> dict[str, Any] | None:
            fields = await self.job(job_id)
            return fields if fields["status"] == status else None

        found: dict[str, Any] = await eventually(look)
        return found

    async def result_lines(self, batch_id: str, role: str) -> list[dict[str, Any]]:
        """The lines of the batch's output or error file; none where there is none."""
        content = b""
        try:
            async for piece in self.plane.objects.get(f"files/{derived_file_id(batch_id, role)}"):
                content += piece
        except ObjectMissing:
            return []
        return [json.loads(line) for line in content.splitlines()]

    async def file_is_recorded(self, file_id: str) -> bool:
        """Whether the log knows the file."""
        return await self.plane.writer.execute(
            lambda uow, asked: uow.find(File, asked) is not None, file_id, TEST
        )

    async def events(self, work_id: str) -> list[str]:
        """The topics of the stream's events, in order."""

        def read(connection: Any) -> list[str]:
            rows = connection.execute(
                "SELECT topic FROM gridline_events WHERE originator_id = %s "
                "ORDER BY originator_version",
                (work_id,),
            )
            return [row["topic"] for row in rows]

        return await self.plane.read(read)

    async def rows(self, statement: str) -> list[dict[str, Any]]:
        """What a constant statement selects."""
        return await self.plane.read(lambda connection: connection.execute(statement).fetchall())

    def _origin(self, route: str, body: dict[str, Any]) -> Origin:
        return Origin(
            account_id=self.account.account_id,
            key_id=self.account.key_id,
            route=route,
            body_sha256=json.dumps(body),
        )

    async def _fields(self, cls: Any, id: str) -> dict[str, Any]:
        def read(uow: UnitOfWork, id: str) -> dict[str, Any]:
            return dict(vars(uow.get(cls, id)))

        return await self.plane.writer.execute(read, id, TEST)


async def eventually(
    look: Callable[[], Awaitable[Any]], *, seconds: float = WAIT_SECONDS_MAX
) -> Any:
    """What `look` answers once that is something; fails after a while."""
    async with asyncio.timeout(seconds):
        while not (found := await look()):  # noqa: ASYNC110 - the log tells nobody in a test
            await asyncio.sleep(0.03)
    return found


@dataclass
class ScriptedRunner:
    """A runner that beats by itself and otherwise does what the test says."""

    rig: Rig
    producer: Producer
    consumer: Consumer
    runner_id: str
    running: list[Attempt] = field(default_factory=list)
    inbox: asyncio.Queue[Assign | Cancel | Revoke] = field(default_factory=asyncio.Queue)
    silent: bool = False
    draining: bool = False
    slots: int = 1
    gpu_class: str = CPU
    ended: dict[Attempt, Report] = field(default_factory=dict)

    async def beat(self, *, stopping: bool = False) -> None:
        """One heartbeat."""
        heartbeat = Heartbeat(
            runner_id=self.runner_id,
            gpu_class=self.gpu_class,
            sent_at=self.rig.plane.clock.now(),
            slots={"batch_chunk": self.slots, "train": self.slots},
            running=tuple(self.running),
            bases=tuple(CATALOG),
            draining=self.draining,
            stopping=stopping,
        )
        await self.producer.send(
            RUNNERS_TOPIC, key=self.runner_id, value=heartbeat.model_dump_json().encode()
        )

    async def next_assign(self) -> Assign:
        """The next assignment that is not a repeat of one that runs."""
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while True:
                message = await self.inbox.get()
                if not isinstance(message, Assign) or message.attempt in self.running:
                    continue
                if message.attempt in self.ended:
                    await self.send_report(self.ended[message.attempt])
                    continue
                self.running.append(message.attempt)
                return message

    async def next_of(self, kind: type[Cancel] | type[Revoke]) -> Attempt:
        """The attempt of the next message of that kind."""
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while True:
                message = await self.inbox.get()
                if isinstance(message, kind):
                    return message.attempt

    async def fail(self, message: Assign) -> None:
        """The engine broke."""
        body = AttemptFailed(code="engine_failed", message="It broke.")
        self.ended[message.attempt] = self.report(message.attempt, body)
        self.running.remove(message.attempt)
        await self.send_report(self.ended[message.attempt])

    def report(self, attempt: Attempt, body: Any, *, seq: int = 9) -> Report:
        """What this runner says of an attempt."""
        return Report(attempt=attempt, seq=seq, at=self.rig.plane.clock.now(), body=body)

    async def send_report(self, report: Report) -> None:
        """Publishes it."""
        await self.producer.send(
            PROGRESS_TOPIC, key=report.attempt.work_id, value=report.model_dump_json().encode()
        )

    async def finish(self, message: Assign, *, answered: int | None = None) -> Report:
        """Answers the chunk's first lines and reports it: all of them, or as far as a cancel came.
        Returns the report."""
        report = await self.finished(message, answered=answered)
        self.ended[message.attempt] = report
        self.running.remove(message.attempt)
        await self.send_report(report)
        return report

    async def tried(self, message: Assign) -> bool:
        """Whether the broker took the report of a finished chunk."""
        try:
            await self.finish(message)
        except KafkaError:
            self.running.append(message.attempt)
            return False
        return True

    async def finished(self, message: Assign, *, answered: int | None = None) -> Report:
        """The report that `finish` sends, its objects stored."""
        task = message.task
        assert isinstance(task, BatchChunkTask)
        content = b"".join(
            [
                piece
                async for piece in self.rig.plane.objects.get(
                    task.input_key, start_byte=task.start_byte, end_byte=task.end_byte
                )
            ]
        )
        ids = [json.loads(line)["custom_id"] for line in content.splitlines()][:answered]

        async def lines() -> AsyncIterator[bytes]:
            for custom_id in ids:
                answer = {"status_code": 200, "body": {"by": self.runner_id}}
                record = {"custom_id": custom_id, "response": answer, "error": None}
                yield json.dumps(record).encode() + b"\n"

        key = f"{task.output_prefix}output.jsonl"
        usage = (ModelUsage(model=BASE, input_tokens=5 * len(ids), output_tokens=len(ids)),)
        output = ObjectRef.of(await self.rig.plane.objects.put(key, lines())) if ids else None
        return self.report(
            message.attempt,
            ChunkFinished(
                completed=len(ids),
                failed=0,
                usage=usage if ids else (),
                output=output,
                cancelled=len(ids) < task.requests,
            ),
        )

    async def _beat_on(self) -> None:
        while True:
            if not self.silent:
                with suppress(KafkaError):
                    await self.beat()
            await asyncio.sleep(BEAT_SECONDS)

    async def _read_on(self) -> None:
        while True:
            records: Sequence[Record] = ()
            with suppress(KafkaError):
                records = await self.consumer.poll(timeout_seconds=1.0)
            for record in records:
                message = WORK_MESSAGE.validate_json(record.value)
                if message.attempt.runner_id == self.runner_id:
                    self.inbox.put_nowait(message)


@asynccontextmanager
async def scripted_runner(
    rig: Rig, runner_id: str, *, slots: int = 1, gpu_class: str = CPU
) -> AsyncIterator[ScriptedRunner]:
    """A runner that is there until the end of the block, without a goodbye."""
    settings = replace(rig.settings, gpu_class=gpu_class)
    producer = await kafka.producer(settings)
    consumer = await kafka.runner_consumer(settings, runner_id)
    runner = ScriptedRunner(rig, producer, consumer, runner_id, slots=slots, gpu_class=gpu_class)
    tasks = [asyncio.create_task(runner._beat_on()), asyncio.create_task(runner._read_on())]
    try:
        yield runner
    finally:
        await _end(tasks)
        await consumer.stop()
        await producer.stop()


@asynccontextmanager
async def running_worker(
    database: Database,
    broker_settings: Settings,
    directory: Path,
    *,
    credit_usd: str = "25",
    **changed: Any,
) -> AsyncIterator[Rig]:
    """A worker at work, with prices and one account."""
    clock_file = directory / "clock"
    clock_file.write_text(START.isoformat())
    settings = replace(
        broker_settings,
        **{
            "database_url": database.application_url,
            "object_store_url": (directory / "objects").as_uri(),
            "weights_dir": str(directory / "weights"),
            "clock_file": str(clock_file),
            "engine": "echo",
            "heartbeat_seconds": BEAT_SECONDS,
            "lease_seconds": LEASE_SECONDS,
            "scheduler_tick_seconds": 0.1,
            "progress_seconds": 0.05,
            "progress_event_seconds": 0.05,
            "batch_chunk_requests": 4,
            **changed,
        },
    )
    await kafka.ensure_topics(settings)
    with worker_plane(settings) as plane:
        operator = Operator(plane.writer)
        operator.publish_prices(shipped_prices())
        limits = AccountLimits(open_fine_tunes=3, open_batches=10)
        account = operator.open_account(email="a@b.c", credit_usd=credit_usd, limits=limits)
        rig = Rig(settings, plane, account, clock_file)
        rig.start_worker()
        try:
            yield rig
        finally:
            await rig.stop_worker()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
