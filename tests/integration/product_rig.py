"""The product's log with its read models on PostgreSQL, driven by commands as API and worker do.

Tests of projections and of the audit share it: each step is one command, and a whole job or batch
is a few lines.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib import resources
from typing import Any

from adapters.event_log.event_store import EventStore, decode
from adapters.event_log.memory_store import MemoryWriter
from adapters.event_log.postgres import Connection, connect
from adapters.event_log.writer import Writer
from domain import messages
from domain.commands import accounts, batches, files, work
from domain.commands import keys as key_commands
from domain.commands import prices as price_commands
from domain.commands.create_batch import CreateBatch, create_batch
from domain.commands.create_fine_tuning_job import CreateFineTuningJob, create_fine_tuning_job
from domain.commands.idempotency import Origin
from domain.inputs.batch_create import parse_batch_create
from domain.inputs.batch_file import ChunkPlan
from domain.inputs.job_create import parse_fine_tuning_create
from domain.inputs.training_file import TrainingFacts
from domain.ledger.account import AccountLimits
from domain.ledger.money import nano_usd
from domain.ledger.prices import PriceList
from domain.log.stored import Attempt, StoredObject, TokenUsage
from domain.log.unit_of_work import A, CommandContext
from domain.messages import (
    ChunkFinished,
    ModelUsage,
    ObjectRef,
    Report,
    ReportBody,
    Started,
    TrainFinished,
    TrainProgress,
)
from domain.work.quote import BatchQuote
from projections.follower import Follower
from projections.registry import FOLLOWING, INLINE
from tests.conftest import Database
from tests.fakes import FakeClock

BASE = "smollm2-135m-instruct"
PRICES = PriceList.from_json(resources.files("domain.ledger").joinpath("prices.json").read_bytes())
LINES_PER_CHUNK = 4


def batch_quote(
    *,
    requests: int,
    maximum_nano_usd: int,
    models: Iterable[str] = (BASE,),
    prices: PriceList = PRICES,
) -> BatchQuote:
    """A quote with that maximum, and room for all tokens that a test reports."""
    return BatchQuote(
        base=BASE,
        requests=requests,
        worst_case=tuple(
            TokenUsage(model=model, input_tokens=10**9, output_tokens=10**9) for model in models
        ),
        minimum_nano_usd=prices.of(BASE).minimum_per_batch_nano_usd,
        maximum_nano_usd=maximum_nano_usd,
        price_version=prices.version,
    )


def chunk_plans(count: int, *, lines: int = LINES_PER_CHUNK) -> tuple[ChunkPlan, ...]:
    """Chunks of so many lines, one after another."""
    return tuple(
        ChunkPlan(
            start_byte=number * 100,
            end_byte=number * 100 + 100,
            first_line=1 + number * lines,
            requests=lines,
            sha256="0" * 64,
        )
        for number in range(count)
    )


PATIENCE_SECONDS = 30


class CountingIds:
    """Ids in order; the digits that differ come first, since they name a model."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def new(self, prefix: str) -> str:
        return prefix + f"{next(self._next):012x}".ljust(32, "0")


def stored_object(key: str) -> StoredObject:
    """Its digest is of its key, so that no two are alike."""
    return StoredObject(key=key, bytes=100, sha256=hashlib.sha256(key.encode()).hexdigest())


def object_ref(key: str) -> ObjectRef:
    return ObjectRef.of(stored_object(key))


class Story:
    """What customers, the worker and runners do, each step one command, for one account with a key
    and published prices. Whoever inherits it says where commands run."""

    clock: FakeClock
    ids: CountingIds

    def run(self, handler: Callable[..., Any], command: Any, **options: Any) -> Any:
        """Runs a command at once; returns what its handler does, or raises."""
        raise NotImplementedError

    def open(self) -> None:
        """Before anything else."""
        self._offsets = itertools.count(1)
        self.run(price_commands.publish_prices, price_commands.PublishPrices(prices=PRICES))
        self.account_id, self.key_id = self.open_account("someone@example.com")

    # Customers ------------------------------------------------------------------------------

    def open_account(self, email: str, *, credit_usd: str = "25") -> tuple[str, str]:
        return self.open_account_with(nano_usd(credit_usd), email=email)

    def open_account_with(
        self, credit_nano_usd: int, *, email: str = "new@example.com"
    ) -> tuple[str, str]:
        opened = self.run(
            accounts.open_account,
            accounts.OpenAccount(
                email=email,
                limits=AccountLimits(open_fine_tunes=3, open_batches=10),
                credit_nano_usd=credit_nano_usd,
                secret=key_commands.KeySecret(
                    sha256=f"sha of {email}", prefix="gl_abc", name="first"
                ),
            ),
        )
        return opened.account_id, opened.key_id

    def origin(self, body: str, *, key: str | None = None) -> Origin:
        return Origin(
            account_id=self.account_id,
            key_id=self.key_id,
            route="POST /test",
            body_sha256=body,
            idempotency_key=key,
        )

    def store_file(self, purpose: str, *, name: str = "rows.jsonl") -> str:
        file_id = self.ids.new("file-")
        facts = TrainingFacts(
            kind="chat",
            rows=40,
            messages=80,
            token_bounds={BASE: 900_000},
            token_estimates={BASE: 10_000},
            first_row_that_does_not_alternate=None,
        )
        self.run(
            files.store_file,
            files.StoreFile(
                origin=self.origin(file_id),
                file_id=file_id,
                purpose=purpose,  # type: ignore[arg-type]
                object=stored_object(f"files/{file_id}"),
                filename=name,
                expires_at=self.clock.now() + timedelta(days=30),
                training=facts if purpose == "fine-tune" else None,
            ),
        )
        return file_id

    def create_batch(self, *, metadata: dict[str, str] | None = None, window: str = "24h") -> str:
        body = {
            "input_file_id": self.store_file("batch"),
            "endpoint": "/v1/chat/completions",
            "completion_window": window,
            "metadata": metadata,
        }
        origin = self.origin(str(body["input_file_id"]))
        return str(self.run(create_batch, CreateBatch(origin, parse_batch_create(body))))

    def create_job(self, **fields: Any) -> str:
        body = {"model": BASE, "training_file": self.store_file("fine-tune"), **fields}
        create = parse_fine_tuning_create(body)
        origin = self.origin(str(body["training_file"]))
        return str(self.run(create_fine_tuning_job, CreateFineTuningJob(origin, create)))

    # Worker and runners ---------------------------------------------------------------------

    def validate(
        self,
        batch_id: str,
        *,
        chunks: int = 2,
        lines: int = LINES_PER_CHUNK,
        maximum_usd: str = "0.10",
    ) -> None:
        self.run(
            batches.record_batch_plan,
            batches.RecordBatchPlan(
                batch_id=batch_id,
                chunks=chunk_plans(chunks, lines=lines),
                first_lines={},
                quote=batch_quote(requests=chunks * lines, maximum_nano_usd=nano_usd(maximum_usd)),
            ),
        )

    def start(self, work_id: str) -> None:
        self.run(work.start_work, work.StartWork(work_id))

    def assign(self, work_id: str, chunk: int = 0, *, runner_id: str = "runner_a") -> Attempt:
        attempt = self.run(work.assign_work, work.AssignWork(work_id, chunk, runner_id))
        assert isinstance(attempt, Attempt)
        return attempt

    def report(self, attempt: Attempt, body: ReportBody) -> None:
        report = Report(attempt=messages.Attempt.of(attempt), seq=1, at=self.clock.now(), body=body)
        tracking = ("cluster/progress/0", next(self._offsets))
        stored = self.run(work.claimed_objects, report)
        self.run(work.record_report, work.RecordReport(report, stored), tracking=tracking)

    def lose(self, attempt: Attempt) -> None:
        self.run(work.lose_attempt, work.LoseAttempt(attempt))

    def finish_chunk(
        self, attempt: Attempt, *, failed: int = 0, answered: int = LINES_PER_CHUNK
    ) -> None:
        """All lines of the chunk, or those that were answered before it was stopped."""
        completed = answered - failed
        usage = ModelUsage(model=BASE, input_tokens=1000, output_tokens=100)
        prefix = f"chunks/{attempt.work_id}/{attempt.chunk}/{attempt.attempt}"
        self.report(
            attempt,
            ChunkFinished(
                completed=completed,
                failed=failed,
                usage=(usage,) if completed else (),
                output=object_ref(f"{prefix}/output.jsonl") if completed else None,
                errors=object_ref(f"{prefix}/errors.jsonl") if failed else None,
                cancelled=answered < LINES_PER_CHUNK,
            ),
        )

    def finish_batch(self, batch_id: str, *, completed: int, failed: int) -> None:
        def result(name: str, lines: int) -> batches.ResultFile | None:
            if not lines:
                return None
            return batches.ResultFile(object=stored_object(f"files/{batch_id}-{name}"), lines=lines)

        self.run(
            batches.finish_batch,
            batches.FinishBatch(
                batch_id=batch_id,
                output=result("output", completed),
                errors=result("errors", failed),
            ),
        )

    # Whole stories --------------------------------------------------------------------------

    def batch_that_completes(self, *, metadata: dict[str, str] | None = None) -> str:
        batch_id = self.create_batch(metadata=metadata)
        self.validate(batch_id)
        self.start(batch_id)
        self.finish_chunk(self.assign(batch_id, 0))
        self.finish_chunk(self.assign(batch_id, 1), failed=1)
        self.finish_batch(batch_id, completed=7, failed=1)
        return batch_id

    def job_that_succeeds(self, **fields: Any) -> str:
        job_id = self.create_job(**fields)
        self.start(job_id)
        attempt = self.assign(job_id)
        self.report(attempt, Started())
        self.clock.advance(timedelta(seconds=20))
        self.report(attempt, TrainProgress(step=3, steps=9, trained_tokens=300, train_loss=1.5))
        self.clock.advance(timedelta(seconds=20))
        self.report(attempt, train_finished(job_id))
        return job_id

    def every_story(self) -> None:
        """Jobs and batches that end in every way, and some that are open."""
        self.batch_that_completes(metadata={"for": "everyone"})
        self.job_that_succeeds(suffix="mine", metadata={"team": "a"})
        cancelled = self.create_batch()
        self.validate(cancelled)
        self.start(cancelled)
        running = self.assign(cancelled, 0)
        self.run(batches.cancel_batch, batches.CancelBatch(self.account_id, cancelled))
        self.lose(running)
        self.finish_batch(cancelled, completed=0, failed=8)
        refused = self.create_batch()
        self.validate(refused, maximum_usd="1000")
        self.start(refused)
        job_id = self.create_job()
        self.start(job_id)
        self.lose(self.assign(job_id))
        attempt = self.assign(job_id)
        self.report(attempt, Started())
        waiting = self.create_job()
        self.start(waiting)
        self.lose(attempt)
        open_batch = self.create_batch(window="72h")
        self.validate(open_batch)
        self.start(open_batch)
        self.assign(open_batch, 1)
        self.run(files.delete_file, files.DeleteFile(self.account_id, self.store_file("batch")))


def context(number: int) -> CommandContext:
    """Of a test's command."""
    return CommandContext(
        actor="system:test",
        correlation_id="test",
        causation="test",
        command_id=f"command-{number}",
    )


class ProductRig(Story):
    """On PostgreSQL; `connection` reads."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = FakeClock()
        self.ids = CountingIds()
        self.writer = Writer(
            EventStore(database.application_url, projections=INLINE),
            clock=self.clock,
            ids=self.ids,
        )
        self.connection = self.connect()
        self._commands = itertools.count(1)
        self.open()

    def close(self) -> None:
        self.connection.close()
        self.writer.close()

    def connect(self) -> Connection:
        return connect(self.database.application_url, name="test")

    def runner(self, *, batch_size: int = 200) -> Follower:
        return Follower(self.connect, decode, FOLLOWING, batch_size=batch_size)

    def run(self, handler: Callable[..., Any], command: Any, **options: Any) -> Any:
        future = self.writer.submit(handler, command, context(next(self._commands)), **options)
        return future.result(PATIENCE_SECONDS)


class MemoryStory(Story):
    """On a log in memory."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.ids = CountingIds()
        self.writer = MemoryWriter(clock=self.clock, ids=self.ids)
        self._commands = itertools.count(1)
        self.open()

    def run(self, handler: Callable[..., Any], command: Any, **options: Any) -> Any:
        future = self.writer.submit(handler, command, context(next(self._commands)), **options)
        return future.result()

    def of(self, cls: type[A], id: str) -> A:
        """The aggregate, folded afresh from the log."""
        found = self.writer.load(cls, id)
        assert found is not None
        return found

    def last(self, event: type[Any]) -> Any:
        """The newest event of that type."""
        return [each for _, each in self.writer.events() if isinstance(each, event)][-1]

    @property
    def position(self) -> int:
        """Of the log's end: what does not change it changed nothing."""
        return len(self.writer.events())


def train_finished(job_id: str, *, trained_tokens: int = 900) -> TrainFinished:
    return TrainFinished(
        trained_tokens=trained_tokens,
        loss_tokens=min(400, trained_tokens),
        steps=9,
        train_loss=0.5,
        train_accuracy=0.9,
        eval_loss_before=2.0,
        eval_loss=0.75,
        eval_rows=2,
        rows_trained=38,
        rows_dropped=1,
        seconds=40.0,
        adapter_config=object_ref(f"adapters/{job_id}/1/adapter_config.json"),
        adapter_weights=object_ref(f"adapters/{job_id}/1/adapter_model.safetensors"),
        step_metrics=object_ref(f"adapters/{job_id}/1/step_metrics.csv"),
        base_revision="pinned",
    )
