"""History read for contradictions: streams that break their own rules, and streams that tell of the
same thing differently.

`verify.py` feeds it every event in order, after the book. Like the book it goes by the events alone
and shares nothing with the aggregates, so that it also finds what no command could have written.
Numbers are those of the ledger's invariants (`docs/ledger.md`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar

from eventsourcing.utils import get_topic

from adapters.audit.book import Book, Finding
from domain.log.aggregate import Aggregate

PATHS = "13 a stream takes a path of its state machine"
LIMITS = "12 open work is within the limits"
KEY_LIMITS = "11 no create passes its key's limit"
LINKS = "streams agree on what they share"
USAGE = "6 no line uses more tokens than its quote counts"
OVERDUE = "7 no hold outlives its end"

OVERDUE_MARGIN = timedelta(hours=1)
"""A settlement may be this late: a worker that was stopped overnight is no difference."""

_NEW: frozenset[str] = frozenset({""})


def _path(*stages: str, to: str = "") -> tuple[frozenset[str], str]:
    """The stages in which an event may come, and the one it leads to; none: the same."""
    return frozenset(stages) or _NEW, to


STEPS: Mapping[str, tuple[frozenset[str], str]] = {
    "gridline.batch.created": _path(to="validating"),
    "gridline.batch.validated": _path("validating", to="planned"),
    "gridline.batch.waiting": _path("planned"),
    "gridline.batch.started": _path("planned", to="running"),
    "gridline.batch.failed": _path("validating", "planned", to="ended"),
    "gridline.batch.attempt_assigned": _path("running"),
    "gridline.batch.attempt_lost": _path("running", "ending"),
    "gridline.batch.attempt_failed": _path("running", "ending"),
    "gridline.batch.progressed": _path("running", "ending"),
    "gridline.batch.chunk_finished": _path("running", "ending"),
    "gridline.batch.cancel_requested": _path("validating", "planned", "running", to="ending"),
    "gridline.batch.window_ended": _path("validating", "planned", "running", to="ending"),
    "gridline.batch.finalizing": _path("running", to="ending"),
    "gridline.batch.finished": _path("ending", to="ended"),
    "gridline.fine_tuning_job.created": _path(to="waiting"),
    "gridline.fine_tuning_job.waiting": _path("waiting", "queued"),
    "gridline.fine_tuning_job.queued": _path("waiting", to="queued"),
    "gridline.fine_tuning_job.attempt_assigned": _path("queued"),
    "gridline.fine_tuning_job.attempt_lost": _path("queued"),
    "gridline.fine_tuning_job.started": _path("queued", to="running"),
    "gridline.fine_tuning_job.progressed": _path("running"),
    "gridline.fine_tuning_job.succeeded": _path("running", to="ended"),
    "gridline.fine_tuning_job.failed": _path("waiting", "queued", "running", to="ended"),
    "gridline.fine_tuning_job.cancelled": _path("waiting", "queued", "running", to="ended"),
    "gridline.file.stored": _path(to="stored"),
    "gridline.file.pinned": _path("stored"),
    "gridline.file.unpinned": _path("stored"),
    "gridline.file.deleted": _path("stored", to="deleted"),
    "gridline.fine_tuned_model.registered": _path(to="registered"),
    "gridline.fine_tuned_model.deleted": _path("registered", to="deleted"),
    "gridline.key_spend.registered": _path(to="registered"),
    "gridline.key_spend.limits_set": _path("registered"),
    "gridline.key_spend.revoked": _path("registered", to="revoked"),
    "gridline.account.opened": _path(to="open"),
    "gridline.price_book.opened": _path(to="open"),
    "gridline.price_book.published": _path("open"),
}
"""By topic. Topics that are not here have rules of their own: holds and spend are the book's."""


@dataclass(slots=True)
class _Open:
    """An account's open work, and the limits in force."""

    limits: Any = None
    fine_tunes: set[str] = field(default_factory=set)
    batches: set[str] = field(default_factory=set)
    training: str | None = None


@dataclass(slots=True)
class _Work:
    """What is known of a job or batch from its own stream; amounts and digests as it has them."""

    account_id: str
    key_id: str
    price_version: int
    files: tuple[str, ...]
    sha256: tuple[str, ...]
    base: str | None = None
    base_revision: str | None = None
    maximum: int | None = None
    models: frozenset[str] = frozenset()
    left: dict[str, list[int]] = field(default_factory=dict)
    """By model: input and output tokens that its lines may still use."""
    ended: bool = False


class History:
    """Keeps what it needs to tell a contradiction when it comes, and at the end."""

    def __init__(self, book: Book, find: Finding) -> None:
        self._book = book
        self._find = find
        self._stages: dict[str, str] = {}
        self._open: defaultdict[str, _Open] = defaultdict(_Open)
        self._key_limits: dict[str, Any] = {}
        self._works: dict[str, _Work] = {}
        self._holds: dict[str, Any] = {}
        self._pins: defaultdict[str, set[str]] = defaultdict(set)
        self._files: dict[str, Any] = {}

    def read(self, event: Aggregate.Event, position: int) -> None:
        """One event of the log, in order; the book has read it already."""
        topic = get_topic(type(event))
        self._step(event, topic, position)
        handler = self._HANDLERS.get(topic)
        if handler is not None:
            handler(self, event)

    def check(self, *, now: datetime) -> None:
        """What only the whole log shows."""
        for work_id, hold in self._holds.items():
            self._check_hold(work_id, hold, now)
        for account_id, held in self._open.items():
            for work_id in held.fine_tunes | held.batches:
                work = self._works.get(work_id)
                if work is None or work.ended or work.account_id != account_id:
                    self._find(LINKS, account_id, f"it has a slot for {work_id}, which is not open")
        for work_id, work in self._works.items():
            self._check_work(work_id, work)

    def _step(self, event: Any, topic: str, position: int) -> None:
        step = STEPS.get(topic)
        if step is None:
            return
        allowed, to = step
        stage = self._stages.get(event.originator_id, "")
        if stage not in allowed:
            self._find(
                PATHS, event.originator_id, f"{topic} at position {position}, when it was {stage}"
            )
        self._stages[event.originator_id] = to or stage

    # Accounts and keys ----------------------------------------------------------------------

    def _limits_set(self, event: Any) -> None:
        self._open[event.originator_id].limits = event.limits

    def _fine_tune_slot_taken(self, event: Any) -> None:
        held = self._open[event.originator_id]
        held.fine_tunes.add(event.job_id)
        if held.limits is not None and len(held.fine_tunes) > held.limits.open_fine_tunes:
            self._find(LIMITS, event.originator_id, f"{event.job_id} is a job too many")

    def _fine_tune_slot_freed(self, event: Any) -> None:
        self._open[event.originator_id].fine_tunes.discard(event.job_id)

    def _batch_slot_taken(self, event: Any) -> None:
        held = self._open[event.originator_id]
        held.batches.add(event.batch_id)
        if held.limits is not None and len(held.batches) > held.limits.open_batches:
            self._find(LIMITS, event.originator_id, f"{event.batch_id} is a batch too many")

    def _batch_slot_freed(self, event: Any) -> None:
        self._open[event.originator_id].batches.discard(event.batch_id)

    def _training_slot_taken(self, event: Any) -> None:
        held = self._open[event.originator_id]
        if held.training is not None:
            self._find(LIMITS, event.originator_id, f"{event.job_id} and {held.training} train")
        held.training = event.job_id

    def _training_slot_freed(self, event: Any) -> None:
        self._open[event.originator_id].training = None

    def _key_limits_set(self, event: Any) -> None:
        self._key_limits[event.originator_id] = event.limits

    def _check_key(self, event: Any, maximum: int | None) -> None:
        limits = self._key_limits.get(event.key_id)
        if limits is None:
            return
        today = self._book.key_days.get((event.key_id, event.envelope.at.date()), (0, 0))
        for limit, before in (
            (limits.daily_nano_usd, sum(today)),
            (limits.total_nano_usd, self._book.key_totals[event.key_id]),
        ):
            passes = limit is not None and (
                before >= limit if maximum is None else before + maximum > limit
            )
            if passes:
                self._find(KEY_LIMITS, event.originator_id, f"{before} of {limit} were spent")

    # Work -----------------------------------------------------------------------------------

    def _batch_created(self, event: Any) -> None:
        self._works[event.originator_id] = _Work(
            account_id=event.account_id,
            key_id=event.key_id,
            price_version=event.price_version,
            files=(event.input_file_id,),
            sha256=(event.input.sha256,),
        )
        self._check_key(event, None)

    def _batch_validated(self, event: Any) -> None:
        work, plan = self._works.get(event.originator_id), event.plan
        if work is None:
            return
        work.base, work.base_revision = plan.quote.base, plan.base_revision
        work.maximum = plan.quote.maximum_nano_usd
        work.models = frozenset({plan.quote.base, *(adapter.name for adapter in plan.adapters)})
        work.left = {
            each.model: [each.input_tokens, each.output_tokens] for each in plan.quote.worst_case
        }

    def _chunk_finished(self, event: Any) -> None:
        work = self._works.get(event.originator_id)
        for used in event.result.usage:
            if work is None or used.model not in work.models:
                self._find(LINKS, event.originator_id, f"chunk {event.chunk} used other models")
                continue
            left = work.left.setdefault(used.model, [0, 0])
            left[0] -= used.input_tokens
            left[1] -= used.output_tokens
            if min(left) < 0:
                self._find(USAGE, event.originator_id, f"chunk {event.chunk} used too many tokens")

    def _job_created(self, event: Any) -> None:
        settings = event.settings
        files = [file for file in (settings.training, settings.validation) if file is not None]
        self._works[event.originator_id] = _Work(
            account_id=event.account_id,
            key_id=event.key_id,
            price_version=settings.quote.price_version,
            files=tuple(file.file_id for file in files),
            sha256=tuple(file.object.sha256 for file in files),
            base=settings.base,
            base_revision=settings.base_revision,
            maximum=settings.quote.maximum_nano_usd,
        )
        self._check_key(event, settings.quote.maximum_nano_usd)

    def _ended(self, event: Any) -> None:
        work = self._works.get(event.originator_id)
        if work is None:
            return
        work.ended = True
        receipt = getattr(event, "receipt", None)
        if receipt is None:
            return
        told = (receipt.price_version, receipt.base, receipt.maximum_nano_usd)
        if told != (work.price_version, work.base, work.maximum):
            self._find(LINKS, event.originator_id, "its receipt has other terms than the work")
        if tuple(receipt.input_sha256) != work.sha256:
            self._find(LINKS, event.originator_id, "its receipt has other digests than the work")

    def _check_work(self, work_id: str, work: _Work) -> None:
        for file_id in work.files:
            file = self._files.get(file_id)
            if file is None or file.account_id != work.account_id:
                self._find(LINKS, work_id, f"{file_id} is no file of its account")
            elif file.object.sha256 not in work.sha256:
                self._find(LINKS, work_id, f"{file_id} has another digest")
            if (work_id in self._pins[file_id]) is work.ended:
                self._find(LINKS, work_id, f"{file_id} is pinned by it exactly while it is open")
        held = self._open[work.account_id]
        if not work.ended and work_id not in held.fine_tunes | held.batches:
            self._find(LINKS, work_id, "its account has no slot for it")

    # Files, holds ---------------------------------------------------------------------------

    def _file_stored(self, event: Any) -> None:
        self._files[event.originator_id] = event

    def _file_pinned(self, event: Any) -> None:
        self._pins[event.originator_id].add(event.work_id)

    def _file_unpinned(self, event: Any) -> None:
        self._pins[event.originator_id].discard(event.work_id)

    def _hold_placed(self, event: Any) -> None:
        self._holds[event.work_id] = event

    def _hold_released(self, event: Any) -> None:
        self._check_hold_end(event, early=True)

    def _hold_expired(self, event: Any) -> None:
        self._check_hold_end(event, early=False)

    def _check_hold_end(self, event: Any, *, early: bool) -> None:
        placed = self._holds.get(event.originator_id.removeprefix("hold_"))
        if placed is not None and (event.envelope.at < placed.expires_at) is not early:
            self._find(OVERDUE, event.originator_id, f"it ended so at {event.envelope.at}")

    def _check_hold(self, work_id: str, hold: Any, now: datetime) -> None:
        work = self._works.get(work_id)
        told = (hold.account_id, hold.key_id, hold.price_version, hold.maximum_nano_usd)
        if work is not None and told != (
            work.account_id,
            work.key_id,
            work.price_version,
            work.maximum,
        ):
            self._find(LINKS, work_id, "its hold has another account, key, price or maximum")
        entry = self._book.holds.get(work_id)
        is_open = entry is not None and entry.state == "placed"
        if is_open and now > hold.expires_at + OVERDUE_MARGIN:
            self._find(OVERDUE, work_id, f"its hold was to end by {hold.expires_at}")

    _HANDLERS: ClassVar[Mapping[str, Callable[[History, Any], None]]] = {
        "gridline.account.opened": _limits_set,
        "gridline.account.limits_set": _limits_set,
        "gridline.account.fine_tune_slot_taken": _fine_tune_slot_taken,
        "gridline.account.fine_tune_slot_freed": _fine_tune_slot_freed,
        "gridline.account.batch_slot_taken": _batch_slot_taken,
        "gridline.account.batch_slot_freed": _batch_slot_freed,
        "gridline.account.training_slot_taken": _training_slot_taken,
        "gridline.account.training_slot_freed": _training_slot_freed,
        "gridline.key_spend.limits_set": _key_limits_set,
        "gridline.batch.created": _batch_created,
        "gridline.batch.validated": _batch_validated,
        "gridline.batch.chunk_finished": _chunk_finished,
        "gridline.batch.finished": _ended,
        "gridline.batch.failed": _ended,
        "gridline.fine_tuning_job.created": _job_created,
        "gridline.fine_tuning_job.succeeded": _ended,
        "gridline.fine_tuning_job.failed": _ended,
        "gridline.fine_tuning_job.cancelled": _ended,
        "gridline.file.stored": _file_stored,
        "gridline.file.pinned": _file_pinned,
        "gridline.file.unpinned": _file_unpinned,
        "gridline.credit_hold.placed": _hold_placed,
        "gridline.credit_hold.released": _hold_released,
        "gridline.credit_hold.expired": _hold_expired,
    }
