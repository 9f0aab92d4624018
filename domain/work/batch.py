"""A batch and its chunks.

    validating --fail----------------------------------------> failed
       |  start (hold placed)
       v
    in_progress --every chunk ended--> finalizing ----------> completed
       |   +------ the window is over ----------------------> expired
       +---------- cancel --> cancelling -------------------> cancelled
    (validating can be cancelled too)

A chunk is about 200 request lines, run by one attempt at a time:

    pending --assign--> assigned --finished report--> finished
       ^                   | lost or failed
       +-------------------+  (after its last try: abandoned; its lines become error lines)

Reports of an older attempt or another runner change nothing. A finished chunk is never run again.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import ClassVar, Literal

from domain.assets.fine_tuned_model import StoredAdapter
from domain.catalog import Endpoint
from domain.errors import InvalidState
from domain.inputs.batch_file import ChunkPlan
from domain.inputs.batch_line import LineError
from domain.ledger.receipt import Receipt
from domain.limits import MINIMUM_FROM_PERCENT, CompletionWindow
from domain.log.aggregate import Aggregate, Envelope, event
from domain.log.stored import Attempt, StoredModel, StoredObject, TokenUsage
from domain.work.quote import BatchQuote

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
Ending = Literal["completed", "cancelled", "expired"]

TERMINAL = ("failed", "completed", "expired", "cancelled")

CHUNK_FAILURES_MAX = 3
"""Tries of a chunk whose engine fails, before its lines become error lines."""
CHUNK_LOSSES_MAX = 8
"""Tries of a chunk whose runner is lost: losses say little about the chunk."""
STOP_WITHIN = timedelta(minutes=10)
"""How long attempts may take to hand over what they finished once the batch is cancelled or its
window over; then it ends without them, so that no runner can keep a hold open."""


class ChunkResult(StoredModel):
    """What a chunk's attempt answered: counts of lines, tokens, and the objects that hold it, null
    where there would be nothing in it."""

    completed: int
    failed: int
    usage: tuple[TokenUsage, ...]
    output: StoredObject | None
    errors: StoredObject | None


class LineCounts(StoredModel):
    """Lines of the whole batch that are done by now."""

    completed: int
    failed: int


class BatchPlan(StoredModel):
    """What validation resolved, and the run needs."""

    base_revision: str
    chunks: tuple[ChunkPlan, ...]
    adapters: tuple[StoredAdapter, ...]
    quote: BatchQuote


class Chunk(StoredModel):
    """A chunk's state; counts are of its current attempt."""

    plan: ChunkPlan
    state: Literal["pending", "assigned", "finished", "abandoned"] = "pending"
    attempt: int = 0
    runner_id: str | None = None
    failures: int = 0
    losses: int = 0
    completed: int = 0
    failed: int = 0
    result: ChunkResult | None = None


class Batch(Aggregate, topic="gridline.batch"):
    """All that decides about a batch. Metadata is personal and lives outside the log."""

    snapshot_interval: ClassVar[int] = 200

    account_id: str
    key_id: str
    input_file_id: str
    input: StoredObject
    endpoint: Endpoint
    completion_window: CompletionWindow
    output_expires_seconds: int | None
    price_version: int
    expires_at: datetime
    status: BatchStatus
    plan: BatchPlan | None
    chunks: list[Chunk]
    ending: Ending | None
    ending_since: datetime | None
    waiting_for: str | None
    receipt: Receipt | None

    @event("Created", topic="gridline.batch.created")
    def __init__(
        self,
        *,
        id: str,
        envelope: Envelope,
        account_id: str,
        key_id: str,
        input_file_id: str,
        input: StoredObject,
        endpoint: Endpoint,
        completion_window: CompletionWindow,
        output_expires_seconds: int | None,
        price_version: int,
        expires_at: datetime,
    ) -> None:
        self.account_id = account_id
        self.key_id = key_id
        self.input_file_id = input_file_id
        self.input = input
        self.endpoint = endpoint
        self.completion_window = completion_window
        self.output_expires_seconds = output_expires_seconds
        self.price_version = price_version
        self.expires_at = expires_at
        self.status = "validating"
        self.plan = None
        self.chunks = []
        self.ending = None
        self.ending_since = None
        self.waiting_for = None
        self.receipt = None

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def wants_plan(self) -> bool:
        """Whether validation's outcome still counts: not once the window is over."""
        return self.status == "validating" and self.plan is None and self.ending is None

    @property
    def may_start(self) -> bool:
        """Whether it waits for nothing but credit."""
        return self.status == "validating" and self.plan is not None and self.ending is None

    @property
    def may_assign(self) -> bool:
        """Whether new attempts may start."""
        return self.status == "in_progress" and self.ending is None

    @property
    def has_running_attempt(self) -> bool:
        return any(chunk.state == "assigned" for chunk in self.chunks)

    @property
    def may_finalize(self) -> bool:
        """Whether nothing runs and nothing more will."""
        return not self.is_terminal and self.ending is not None and not self.has_running_attempt

    @property
    def stop_is_overdue_at(self) -> datetime | None:
        """When attempts that still run are no longer waited for; None while nothing is to stop."""
        if self.ending_since is None or not self.has_running_attempt:
            return None
        return self.ending_since + STOP_WITHIN

    def is_current(self, attempt: Attempt) -> bool:
        """Whether this attempt is the one whose reports count."""
        if attempt.chunk >= len(self.chunks):
            return False
        chunk = self.chunks[attempt.chunk]
        return (
            chunk.state == "assigned"
            and chunk.attempt == attempt.attempt
            and chunk.runner_id == attempt.runner_id
        )

    def minimum_applies(self, *, succeeded: int) -> bool:
        """Whether at least the minimum is charged, once this many lines succeeded: when it
        completed, and when it was cancelled as good as completed."""
        assert self.plan is not None
        almost_all = 100 * succeeded >= MINIMUM_FROM_PERCENT * self.plan.quote.requests
        return self.ending == "completed" or (self.ending == "cancelled" and almost_all)

    def usage(self) -> tuple[TokenUsage, ...]:
        """Tokens by model name over all finished chunks, in the order of names."""
        totals: dict[str, tuple[int, int]] = {}
        for chunk in self.chunks:
            for used in chunk.result.usage if chunk.result else ():
                before = totals.get(used.model, (0, 0))
                totals[used.model] = (
                    before[0] + used.input_tokens,
                    before[1] + used.output_tokens,
                )
        return tuple(
            TokenUsage(model=model, input_tokens=tokens[0], output_tokens=tokens[1])
            for model, tokens in sorted(totals.items())
        )

    def record_plan(self, plan: BatchPlan, *, envelope: Envelope) -> None:
        """Validation found nothing wrong."""
        assert self.wants_plan
        assert plan.quote.requests == sum(chunk.requests for chunk in plan.chunks)
        self._validated(plan=plan, envelope=envelope)

    def wait(self, waiting_for: str, *, envelope: Envelope) -> None:
        """It cannot start yet; said once for each cause."""
        assert self.may_start
        if waiting_for != self.waiting_for:
            self._waiting(waiting_for=waiting_for, envelope=envelope)

    def start(self, *, envelope: Envelope) -> None:
        """Credit is held; chunks may be assigned."""
        assert self.may_start
        self._started(envelope=envelope)

    def fail(self, errors: tuple[LineError, ...], *, envelope: Envelope) -> None:
        """It cannot run: nothing ran and nothing is charged."""
        assert self.status == "validating"
        assert self.ending is None
        assert errors
        self._failed(errors=errors, envelope=envelope)

    def assign(self, chunk: int, *, runner_id: str, envelope: Envelope) -> Attempt:
        """The next attempt of a pending chunk, by this runner."""
        assert self.may_assign
        assert self.chunks[chunk].state == "pending"
        attempt = self.chunks[chunk].attempt + 1
        self._attempt_assigned(chunk=chunk, attempt=attempt, runner_id=runner_id, envelope=envelope)
        return Attempt(work_id=self.id, chunk=chunk, attempt=attempt, runner_id=runner_id)

    def lose_attempt(self, attempt: Attempt, *, envelope: Envelope) -> None:
        """The runner's lease ended."""
        assert self.is_current(attempt)
        last = self.chunks[attempt.chunk].losses + 1 >= CHUNK_LOSSES_MAX
        self._attempt_lost(
            chunk=attempt.chunk, attempt=attempt.attempt, last=last, envelope=envelope
        )
        self._end_when_every_chunk_ended(envelope=envelope)

    def fail_attempt(self, attempt: Attempt, *, code: str, envelope: Envelope) -> None:
        """The attempt ended without a result."""
        if not self.is_current(attempt):
            return
        last = self.chunks[attempt.chunk].failures + 1 >= CHUNK_FAILURES_MAX
        self._attempt_failed(
            chunk=attempt.chunk, attempt=attempt.attempt, code=code, last=last, envelope=envelope
        )
        self._end_when_every_chunk_ended(envelope=envelope)

    def record_progress(
        self, attempt: Attempt, *, completed: int, failed: int, envelope: Envelope
    ) -> None:
        """Counts of a running attempt; they never fall."""
        if not self.is_current(attempt):
            return
        chunk = self.chunks[attempt.chunk]
        if completed + failed > chunk.completed + chunk.failed:
            self._progressed(
                chunk=attempt.chunk,
                attempt=attempt.attempt,
                completed=completed,
                failed=failed,
                counted=self._counted(attempt.chunk, completed=completed, failed=failed),
                envelope=envelope,
            )

    def finish_chunk(self, attempt: Attempt, result: ChunkResult, *, envelope: Envelope) -> None:
        """A chunk's final result, once; the caller has seen that it can be this chunk's."""
        if not self.is_current(attempt):
            return
        assert result.completed + result.failed <= self.chunks[attempt.chunk].plan.requests
        self._chunk_finished(
            chunk=attempt.chunk,
            attempt=attempt.attempt,
            result=result,
            counted=self._counted(attempt.chunk, completed=result.completed, failed=result.failed),
            envelope=envelope,
        )
        self._end_when_every_chunk_ended(envelope=envelope)

    def lose_result(self, chunk: int, *, envelope: Envelope) -> None:
        """A finished chunk's stored lines are gone: they become error lines and cost nothing."""
        assert self.may_finalize
        assert self.chunks[chunk].state == "finished"
        attempt = self.chunks[chunk].attempt
        self._attempt_failed(
            chunk=chunk, attempt=attempt, code="engine_failed", last=True, envelope=envelope
        )

    def request_cancel(self, *, envelope: Envelope) -> None:
        """Stops what runs and keeps what is finished. Asking again while it is cancelling is asking
        once. Raises InvalidState when the batch has ended or is ending."""
        if self.status == "cancelling":
            return
        if self.is_terminal or self.ending is not None:
            raise InvalidState(
                f"The batch is {self.status} and can no longer be cancelled.", param="batch_id"
            )
        self._cancel_requested(envelope=envelope)

    def stop_waiting(self, *, envelope: Envelope) -> None:
        """Gives up the attempts that did not stop in time; nothing of theirs counts any more."""
        overdue = self.stop_is_overdue_at
        if overdue is None or envelope.at < overdue:
            return
        for index, chunk in enumerate(self.chunks):
            if chunk.state == "assigned":
                self._attempt_lost(
                    chunk=index,
                    attempt=chunk.attempt,
                    last=chunk.losses + 1 >= CHUNK_LOSSES_MAX,
                    envelope=envelope,
                )

    def end_window(self, *, envelope: Envelope) -> None:
        """The completion window is over: stop, and keep what is finished."""
        assert not self.is_terminal
        assert envelope.at >= self.expires_at
        if self.ending is None:
            self._window_ended(envelope=envelope)

    def finish(
        self,
        *,
        output_file_id: str | None,
        error_file_id: str | None,
        completed: int,
        failed: int,
        receipt: Receipt | None,
        envelope: Envelope,
    ) -> None:
        """The result files are stored and the hold is settled: completed, cancelled or expired,
        as `ending` says. `completed` and `failed` count the lines of the two files."""
        assert self.may_finalize
        assert self.ending is not None
        if self.plan is not None:
            assert completed + failed == self.plan.quote.requests
        self._finished(
            ending=self.ending,
            output_file_id=output_file_id,
            error_file_id=error_file_id,
            completed=completed,
            failed=failed,
            usage=self.usage(),
            receipt=receipt,
            envelope=envelope,
        )

    def _counted(self, chunk: int, *, completed: int, failed: int) -> LineCounts:
        """With these counts of one chunk, and what the others have."""
        others = [each for index, each in enumerate(self.chunks) if index != chunk]
        return LineCounts(
            completed=completed + sum(each.completed for each in others),
            failed=failed + sum(each.failed for each in others),
        )

    def _end_when_every_chunk_ended(self, *, envelope: Envelope) -> None:
        if self.ending is None and all(
            chunk.state in ("finished", "abandoned") for chunk in self.chunks
        ):
            self._finalizing(envelope=envelope)

    @event("Validated", topic="gridline.batch.validated")
    def _validated(self, *, plan: BatchPlan, envelope: Envelope) -> None:
        self.plan = plan
        self.chunks = [Chunk(plan=chunk) for chunk in plan.chunks]

    @event("Waiting", topic="gridline.batch.waiting")
    def _waiting(self, *, waiting_for: str, envelope: Envelope) -> None:
        self.waiting_for = waiting_for

    @event("Started", topic="gridline.batch.started")
    def _started(self, *, envelope: Envelope) -> None:
        self.status = "in_progress"
        self.waiting_for = None

    @event("Failed", topic="gridline.batch.failed")
    def _failed(self, *, errors: tuple[LineError, ...], envelope: Envelope) -> None:
        self.status = "failed"
        self.waiting_for = None

    @event("AttemptAssigned", topic="gridline.batch.attempt_assigned")
    def _attempt_assigned(
        self, *, chunk: int, attempt: int, runner_id: str, envelope: Envelope
    ) -> None:
        self._replace(
            chunk, state="assigned", attempt=attempt, runner_id=runner_id, completed=0, failed=0
        )

    @event("AttemptLost", topic="gridline.batch.attempt_lost")
    def _attempt_lost(self, *, chunk: int, attempt: int, last: bool, envelope: Envelope) -> None:
        self._replace(
            chunk,
            state="abandoned" if last else "pending",
            runner_id=None,
            losses=self.chunks[chunk].losses + 1,
        )

    @event("AttemptFailed", topic="gridline.batch.attempt_failed")
    def _attempt_failed(
        self, *, chunk: int, attempt: int, code: str, last: bool, envelope: Envelope
    ) -> None:
        self._replace(
            chunk,
            state="abandoned" if last else "pending",
            runner_id=None,
            failures=self.chunks[chunk].failures + 1,
            result=None,
        )

    @event("Progressed", topic="gridline.batch.progressed")
    def _progressed(
        self,
        *,
        chunk: int,
        attempt: int,
        completed: int,
        failed: int,
        counted: LineCounts,
        envelope: Envelope,
    ) -> None:
        self._replace(chunk, completed=completed, failed=failed)

    @event("ChunkFinished", topic="gridline.batch.chunk_finished")
    def _chunk_finished(
        self,
        *,
        chunk: int,
        attempt: int,
        result: ChunkResult,
        counted: LineCounts,
        envelope: Envelope,
    ) -> None:
        self._replace(
            chunk,
            state="finished",
            completed=result.completed,
            failed=result.failed,
            result=result,
        )

    @event("CancelRequested", topic="gridline.batch.cancel_requested")
    def _cancel_requested(self, *, envelope: Envelope) -> None:
        self.status = "cancelling"
        self.ending = "cancelled"
        self.ending_since = envelope.at
        self.waiting_for = None

    @event("WindowEnded", topic="gridline.batch.window_ended")
    def _window_ended(self, *, envelope: Envelope) -> None:
        self.ending = "expired"
        self.ending_since = envelope.at
        self.waiting_for = None

    @event("Finalizing", topic="gridline.batch.finalizing")
    def _finalizing(self, *, envelope: Envelope) -> None:
        self.status = "finalizing"
        self.ending = "completed"

    @event("Finished", topic="gridline.batch.finished")
    def _finished(
        self,
        *,
        ending: Ending,
        output_file_id: str | None,
        error_file_id: str | None,
        completed: int,
        failed: int,
        usage: tuple[TokenUsage, ...],
        receipt: Receipt | None,
        envelope: Envelope,
    ) -> None:
        self.status = ending
        self.receipt = receipt

    def _replace(self, chunk: int, **changes: object) -> None:
        self.chunks[chunk] = self.chunks[chunk].model_copy(update=changes)
