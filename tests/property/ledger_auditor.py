"""An independent bookkeeper: plain dictionaries fed with the log's events, and the invariants.

It knows nothing of the aggregates' code: it keeps its own sums from the events alone and compares
them with the aggregates that the log folds to. The numbers are those of the ledger's invariants
(`docs/ledger.md`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from math import ceil

from domain.ledger.account import Account
from domain.ledger.credit_hold import CreditHold
from domain.ledger.key_spend import KeySpend
from domain.ledger.prices import PriceList
from domain.log.aggregate import Aggregate
from domain.work.batch import Batch
from domain.work.fine_tuning_job import FineTuningJob

BATCH_PATHS = {
    "validating": {"in_progress", "failed", "cancelling", "expired"},
    "in_progress": {"finalizing", "cancelling", "expired"},
    "cancelling": {"cancelled"},
    "finalizing": {"completed"},
}
JOB_PATHS = {
    "validating_files": {"queued", "failed", "cancelled"},
    "queued": {"running", "failed", "cancelled"},
    "running": {"succeeded", "failed", "cancelled"},
}


CUSTOMER_CODES = {
    "insufficient_quota",
    "invalid_row",
    "template_mismatch",
    "context_too_long",
    "adapter_too_large",
    "adapter_quota_exceeded",
}
"""The causes on the customer's side, as the fine-tuning page ("Errors") has them."""


@dataclass
class StatementLine:
    """What a customer's statement must say of one movement of credit."""

    kind: str
    work_id: str | None
    grant_id: str | None
    at: datetime
    available: int
    held: int
    charged: int


@dataclass
class Hold:
    account_id: str
    key_id: str
    maximum: int
    day: str
    ended: str | None = None
    captured: int = 0


@dataclass
class Auditor:
    """Sums by account, hold, key and work, from events alone."""

    granted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    captured: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    reserved: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    holds: dict[str, Hold] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    charges: dict[str, int] = field(default_factory=dict)
    training: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    open_work: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    prices: dict[int, PriceList] = field(default_factory=dict)
    pinned: dict[str, int] = field(default_factory=dict)
    used: dict[str, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    revoked: set[str] = field(default_factory=set)
    key_limits: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    plans: dict[str, int] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    waiting_until: dict[str, datetime] = field(default_factory=dict)
    waiting_for: dict[str, str] = field(default_factory=dict)
    ending: set[str] = field(default_factory=set)
    statements: dict[str, list[StatementLine]] = field(default_factory=lambda: defaultdict(list))
    seen: set[str] = field(default_factory=set)
    """Cases that a history reached, of those that decide a charge."""

    def read(self, event: Aggregate.Event) -> None:
        """One event, in log order; every prefix of the log is looked at."""
        stream = event.originator_id
        assert event.originator_version == self.versions.get(stream, 0) + 1, "gapless streams"
        self.versions[stream] = event.originator_version
        name = type(event).TOPIC.removeprefix("gridline.")
        handler = getattr(self, "_" + name.replace(".", "_"), None)
        if handler is not None:
            handler(event)

    # Accounts -----------------------------------------------------------------------------

    def _account_opened(self, event: Account.Opened) -> None:  # type: ignore[name-defined]
        self.limits[event.originator_id] = (
            event.limits.open_fine_tunes,
            event.limits.open_batches,
        )

    def _account_limits_set(self, event) -> None:  # type: ignore[no-untyped-def]
        limits = event.limits
        self.limits[event.originator_id] = (limits.open_fine_tunes, limits.open_batches)

    def _key_spend_revoked(self, event) -> None:  # type: ignore[no-untyped-def]
        self.revoked.add(event.originator_id)

    def _key_spend_limits_set(self, event) -> None:  # type: ignore[no-untyped-def]
        limits = event.limits
        self.key_limits[event.originator_id] = (limits.daily_nano_usd, limits.total_nano_usd)

    def _price_book_opened(self, event) -> None:  # type: ignore[no-untyped-def]
        self.prices[event.prices.version] = event.prices

    def _price_book_published(self, event) -> None:  # type: ignore[no-untyped-def]
        assert event.prices.version not in self.prices, "a version is published once (20)"
        self.prices[event.prices.version] = event.prices

    def _account_credit_granted(self, event) -> None:  # type: ignore[no-untyped-def]
        self.granted[event.originator_id] += event.amount_nano_usd
        self._state(event, "grant", grant_id=event.grant_id)

    def _account_credit_reserved(self, event) -> None:  # type: ignore[no-untyped-def]
        account = event.originator_id
        self.reserved[account] += event.amount_nano_usd
        free = self.granted[account] - self.captured[account] - self.reserved[account]
        assert free >= 0, "no sum of holds ever passes the balance (2)"
        if free == 0:
            self.seen.add("credit that suffices exactly")
        self._state(event, "hold")

    def _account_credit_captured(self, event) -> None:  # type: ignore[no-untyped-def]
        account = event.originator_id
        self.reserved[account] -= event.charge_nano_usd + event.returned_nano_usd
        self.captured[account] += event.charge_nano_usd
        self._state(event, "charge", charged=event.charge_nano_usd)

    def _account_credit_released(self, event) -> None:  # type: ignore[no-untyped-def]
        self.reserved[event.originator_id] -= event.returned_nano_usd
        self._state(event, "release")

    def _state(  # type: ignore[no-untyped-def]
        self, event, kind: str, *, grant_id: str | None = None, charged: int = 0
    ) -> None:
        account = event.originator_id
        self.statements[account].append(
            StatementLine(
                kind=kind,
                work_id=None if kind == "grant" else event.work_id,
                grant_id=grant_id,
                at=event.envelope.at,
                available=self.available(account),
                held=self.reserved[account],
                charged=charged,
            )
        )

    def _account_training_slot_taken(self, event) -> None:  # type: ignore[no-untyped-def]
        running = self.training[event.originator_id]
        running.add(event.job_id)
        assert len(running) <= 1, "one training at a time (12)"

    def _account_training_slot_freed(self, event) -> None:  # type: ignore[no-untyped-def]
        self.training[event.originator_id].remove(event.job_id)

    def _account_fine_tune_slot_taken(self, event) -> None:  # type: ignore[no-untyped-def]
        self._take_slot(event.originator_id, event.job_id, kind=0)

    def _account_batch_slot_taken(self, event) -> None:  # type: ignore[no-untyped-def]
        self._take_slot(event.originator_id, event.batch_id, kind=1)

    def _take_slot(self, account: str, work: str, *, kind: int) -> None:
        prefix = ("ftjob-", "batch_")[kind]
        self.open_work[account].add(work)
        open_now = sum(each.startswith(prefix) for each in self.open_work[account])
        assert open_now <= self.limits[account][kind], "open jobs within the limit (12)"

    def _account_fine_tune_slot_freed(self, event) -> None:  # type: ignore[no-untyped-def]
        self.open_work[event.originator_id].remove(event.job_id)

    def _account_batch_slot_freed(self, event) -> None:  # type: ignore[no-untyped-def]
        self.open_work[event.originator_id].remove(event.batch_id)

    # Holds --------------------------------------------------------------------------------

    def _credit_hold_placed(self, event) -> None:  # type: ignore[no-untyped-def]
        assert event.work_id not in self.holds, "one hold for each job (7)"
        assert event.price_version == self.pinned[event.work_id], "at the prices of its create (20)"
        self.holds[event.work_id] = Hold(
            account_id=event.account_id,
            key_id=event.key_id,
            maximum=event.maximum_nano_usd,
            day=event.spend_day.isoformat(),
        )

    def _credit_hold_captured(self, event) -> None:  # type: ignore[no-untyped-def]
        hold = self._end_hold(event, "captured")
        assert 0 <= event.charge_nano_usd <= hold.maximum, "charge within the hold (5)"
        assert event.charge_nano_usd + event.returned_nano_usd == hold.maximum, "nothing lost (5)"
        hold.captured = event.charge_nano_usd

    def _credit_hold_released(self, event) -> None:  # type: ignore[no-untyped-def]
        assert event.returned_nano_usd == self._end_hold(event, "released").maximum

    def _credit_hold_expired(self, event) -> None:  # type: ignore[no-untyped-def]
        assert event.returned_nano_usd == self._end_hold(event, "expired").maximum

    def _end_hold(self, event, how: str) -> Hold:  # type: ignore[no-untyped-def]
        hold = self.holds[event.originator_id.removeprefix("hold_")]
        assert hold.ended is None, "a hold ends once (4)"
        hold.ended = how
        return hold

    # What a command must answer -------------------------------------------------------------

    def available(self, account: str) -> int:
        return self.granted[account] - self.captured[account] - self.reserved[account]

    def refusal_of_create(
        self, kind: str, account: str, key: str, *, maximum: int | None, now: datetime
    ) -> str | None:
        """What a create must be refused for; None: it must be accepted (11, 12)."""
        if key in self.revoked:
            return "a revoked key"
        today, total = self._spend(key, now.date().isoformat())
        for name, limit, spent in zip(
            ("api_key_daily_spend_usd", "api_key_total_spend_usd"),
            self.key_limits.get(key, (None, None)),
            (today, total),
            strict=True,
        ):
            if limit is not None and (
                spent >= limit if maximum is None else spent + maximum > limit
            ):
                return name
        name, prefix, place = {
            "batch": ("open_batches", "batch_", 1),
            "fine-tune": ("open_fine_tunes", "ftjob-", 0),
        }[kind]
        in_use = sum(each.startswith(prefix) for each in self.open_work[account])
        return name if in_use >= self.limits[account][place] else None

    def _spend(self, key: str, day: str) -> tuple[int, int]:
        """Of the day, and in all: what holds of the key captured, or hold."""
        of_key = [hold for hold in self.holds.values() if hold.key_id == key]
        spends = [(h.day, h.captured if h.ended else h.maximum) for h in of_key]
        return sum(a for d, a in spends if d == day), sum(a for _, a in spends)

    def maximum_of_a_job(self, base: str, tokens: int) -> int:
        """The most that a create of now can be charged for so many tokens."""
        of_base = self.prices[max(self.prices)].of(base)
        assert of_base.training_nano_usd_per_mtok is not None
        exact = Fraction(tokens * of_base.training_nano_usd_per_mtok, 10**6)
        return max(ceil(exact), of_base.minimum_per_job_nano_usd)

    def start_of(self, work: str, *, now: datetime) -> tuple[str, str | None]:
        """The status that trying to start the work must leave it in, and what it waits for."""
        status, account = self.statuses[work], self.owners[work]
        if status not in ("validating", "validating_files") or work in self.ending:
            return status, self.waiting_for.get(work)
        if work.startswith("ftjob-"):
            if now >= self.waiting_until[work]:
                return "failed", None
            if self.training[account]:
                return status, "account_capacity"
        elif work not in self.plans:
            return status, None
        maximum = self.plans[work]
        if self.available(account) >= maximum:
            return ("queued" if work.startswith("ftjob-") else "in_progress"), None
        if self.available(account) + self.reserved[account] >= maximum:
            return status, "customer_credit"
        return "failed", None

    # Work ---------------------------------------------------------------------------------

    def _move(self, work: str, status: str, paths: dict[str, set[str]]) -> None:
        before = self.statuses[work]
        assert status in paths.get(before, set()), f"{before} -> {status} is no path (13)"
        self.statuses[work] = status
        self.waiting_for.pop(work, None)

    def _file_stored(self, event) -> None:  # type: ignore[no-untyped-def]
        self.digests[event.originator_id] = event.object.sha256

    def _batch_validated(self, event) -> None:  # type: ignore[no-untyped-def]
        self.plans[event.originator_id] = event.plan.quote.maximum_nano_usd

    def _batch_waiting(self, event) -> None:  # type: ignore[no-untyped-def]
        self.waiting_for[event.originator_id] = event.waiting_for

    def _fine_tuning_job_waiting(self, event) -> None:  # type: ignore[no-untyped-def]
        self.waiting_for[event.originator_id] = event.waiting_for

    def _batch_window_ended(self, event) -> None:  # type: ignore[no-untyped-def]
        self.ending.add(event.originator_id)
        self.waiting_for.pop(event.originator_id, None)

    def _batch_created(self, event) -> None:  # type: ignore[no-untyped-def]
        self.inputs[event.originator_id] = (self.digests[event.input_file_id],)
        self._created(event, event.price_version, "validating")

    def _batch_started(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "in_progress", BATCH_PATHS)

    def _batch_failed(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "failed", BATCH_PATHS)

    def _batch_finalizing(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "finalizing", BATCH_PATHS)

    def _batch_cancel_requested(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "cancelling", BATCH_PATHS)

    def _batch_finished(self, event) -> None:  # type: ignore[no-untyped-def]
        work = event.originator_id
        self._move(work, event.ending, BATCH_PATHS)
        prices = self.prices[self.pinned[work]]
        tokens = [
            (count, rate)
            for model, counts in self.used[work].items()
            for count, rate in zip(
                counts,
                (
                    prices.of(model).input_nano_usd_per_mtok,
                    prices.of(model).output_nano_usd_per_mtok,
                ),
                strict=True,
            )
        ]
        minimum = 0
        as_good_as_completed = event.ending == "cancelled" and (
            10 * event.completed >= 9 * (event.completed + event.failed)
        )
        if event.receipt and (event.ending == "completed" or as_good_as_completed):
            minimum = prices.of(event.receipt.base).minimum_per_batch_nano_usd
        self._charge(work, event.receipt, tokens, minimum=minimum)
        assert (event.receipt is not None) == (event.completed > 0), "only success costs"

    def _batch_chunk_finished(self, event) -> None:  # type: ignore[no-untyped-def]
        for each in event.result.usage:
            counts = self.used[event.originator_id].setdefault(each.model, [0, 0])
            counts[0] += each.input_tokens
            counts[1] += each.output_tokens

    def _created(self, event, price_version: int, status: str) -> None:  # type: ignore[no-untyped-def]
        assert event.key_id not in self.revoked, "a revoked key opens nothing"
        assert price_version == max(self.prices), "a create pins the prices of its moment"
        self.statuses[event.originator_id] = status
        self.pinned[event.originator_id] = price_version
        self.owners[event.originator_id] = event.account_id

    def _charge(  # type: ignore[no-untyped-def]
        self, work: str, receipt, tokens: list[tuple[int, int]], *, minimum: int
    ) -> None:
        """Invariant 6: the charge, computed again from what was measured and published."""
        if receipt is None:
            self.charges[work] = 0
            return
        maximum = self.holds[work].maximum
        exact = sum(Fraction(count * rate, 10**6) for count, rate in tokens)
        wanted = min(maximum, max(minimum, ceil(exact)))
        assert receipt.charge_nano_usd == wanted, "a charge follows from its receipt (6)"
        assert receipt.returned_nano_usd == maximum - wanted
        assert receipt.maximum_nano_usd == maximum
        assert receipt.price_version == self.pinned[work], "at the prices of its create (20)"
        assert receipt.input_sha256 == self.inputs[work], "a receipt names its own input"
        stated = [(line.tokens, line.rate_nano_usd_per_mtok) for line in receipt.lines]
        assert sorted(stated) == sorted(tokens), "a receipt has the tokens and rates (6)"
        self.charges[work] = wanted
        self._note_the_case(work, exact, minimum=minimum, maximum=maximum)

    def _note_the_case(self, work: str, exact: Fraction, *, minimum: int, maximum: int) -> None:
        if exact.denominator != 1 and minimum < exact < maximum:
            self.seen.add("a fraction that is rounded up")
        if exact > maximum:
            self.seen.add("a charge at its cap")
        if 0 < exact < minimum:
            self.seen.add("a charge at its minimum")
        if self.pinned[work] != max(self.prices):
            self.seen.add("a charge at an older price list")

    def _trained(self, event, tokens: int, *, minimum: bool) -> None:  # type: ignore[no-untyped-def]
        if event.receipt is None:
            self.charges[event.originator_id] = 0
            return
        of_base = self.prices[self.pinned[event.originator_id]].of(event.receipt.base)
        rate = of_base.training_nano_usd_per_mtok
        assert rate is not None
        floor = of_base.minimum_per_job_nano_usd if minimum else 0
        self._charge(event.originator_id, event.receipt, [(tokens, rate)], minimum=floor)

    def _fine_tuning_job_created(self, event) -> None:  # type: ignore[no-untyped-def]
        work, job = event.originator_id, event.settings
        self.inputs[work] = (self.digests[job.training.file_id],)
        self.plans[work] = job.quote.maximum_nano_usd
        self.waiting_until[work] = event.waiting_until
        self._created(event, event.settings.quote.price_version, "validating_files")

    def _fine_tuning_job_queued(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "queued", JOB_PATHS)

    def _fine_tuning_job_started(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "running", JOB_PATHS)

    def _fine_tuning_job_succeeded(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "succeeded", JOB_PATHS)
        self._trained(event, event.result.trained_tokens, minimum=True)

    def _fine_tuning_job_failed(self, event) -> None:  # type: ignore[no-untyped-def]
        had_begun = self.statuses[event.originator_id] == "running"
        self._move(event.originator_id, "failed", JOB_PATHS)
        by_customer = event.code in CUSTOMER_CODES
        assert (event.side == "customer") is by_customer
        pays = by_customer and had_begun and event.trained_tokens > 0
        assert (event.receipt is not None) is pays, "who pays for a failure (6)"
        if had_begun:
            self.seen.add(f"a failure on the {event.side}'s side")
        self._trained(event, event.trained_tokens, minimum=False)

    def _fine_tuning_job_cancelled(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "cancelled", JOB_PATHS)
        self.charges[event.originator_id] = 0

    # What must hold after every commit ------------------------------------------------------

    def check_account(self, account: Account) -> None:
        """Invariants 1 to 3: this bookkeeper's sums are the aggregate's."""
        granted, captured = self.granted[account.id], self.captured[account.id]
        assert account.available_nano_usd + account.held_nano_usd == granted - captured
        assert account.available_nano_usd >= 0
        open_holds = {
            work: hold.maximum
            for work, hold in self.holds.items()
            if hold.account_id == account.id and hold.ended is None
        }
        assert account.holds_nano_usd == open_holds

    def check_hold(self, hold: CreditHold) -> None:
        known = self.holds[hold.work_id]
        assert hold.state == (known.ended or "placed")
        assert hold.captured_nano_usd == known.captured

    def check_key(self, key: KeySpend) -> None:
        """Invariant 9: each day's bucket is the sum over the holds of that day."""
        charged: dict[str, int] = defaultdict(int)
        held: dict[str, int] = defaultdict(int)
        for hold in self.holds.values():
            if hold.key_id == key.id:
                charged[hold.day] += hold.captured
                held[hold.day] += hold.maximum if hold.ended is None else 0
        for day in charged.keys() | key.days.keys():
            assert key.days[day].charged_nano_usd == charged[day]
            assert key.days[day].held_nano_usd == held[day]
        assert key.total_nano_usd == sum(charged.values()) + sum(held.values())

    def check_work(self, work: Batch | FineTuningJob) -> None:
        """Invariants 6 and 7: open work that started has one open hold, ended work has none, and
        the charge is the hold's capture."""
        assert work.status == self.statuses[work.id]
        hold = self.holds.get(work.id)
        if work.is_terminal:
            assert hold is None or hold.ended is not None
            assert self.charges.get(work.id, 0) == (hold.captured if hold else 0)
            if work.receipt is not None:
                assert hold is not None
                assert work.receipt.charge_nano_usd <= hold.maximum
        elif work.status in ("in_progress", "finalizing", "queued", "running"):
            assert hold is not None
            assert hold.ended is None
