"""An independent bookkeeper: plain dictionaries fed with the log's events, and the invariants.

It knows nothing of the aggregates' code: it keeps its own sums from the events alone and compares
them with the aggregates that the log folds to. The numbers are those of the ledger's invariants
(`docs/ledger.md`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from domain.aggregate import Aggregate
from domain.ledger.account import Account
from domain.ledger.credit_hold import CreditHold
from domain.ledger.key_spend import KeySpend
from domain.ledger.prices import PriceList
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

    def _price_book_opened(self, event) -> None:  # type: ignore[no-untyped-def]
        self.prices[event.prices.version] = event.prices

    def _price_book_published(self, event) -> None:  # type: ignore[no-untyped-def]
        assert event.prices.version not in self.prices, "a version is published once (20)"
        self.prices[event.prices.version] = event.prices

    def _account_credit_granted(self, event) -> None:  # type: ignore[no-untyped-def]
        self.granted[event.originator_id] += event.amount_nano_usd

    def _account_credit_reserved(self, event) -> None:  # type: ignore[no-untyped-def]
        account = event.originator_id
        self.reserved[account] += event.amount_nano_usd
        free = self.granted[account] - self.captured[account] - self.reserved[account]
        assert free >= 0, "no sum of holds ever passes the balance (2)"

    def _account_credit_captured(self, event) -> None:  # type: ignore[no-untyped-def]
        account = event.originator_id
        self.reserved[account] -= event.charge_nano_usd + event.returned_nano_usd
        self.captured[account] += event.charge_nano_usd

    def _account_credit_released(self, event) -> None:  # type: ignore[no-untyped-def]
        self.reserved[event.originator_id] -= event.returned_nano_usd

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

    # Work ---------------------------------------------------------------------------------

    def _move(self, work: str, status: str, paths: dict[str, set[str]]) -> None:
        before = self.statuses[work]
        assert status in paths.get(before, set()), f"{before} -> {status} is no path (13)"
        self.statuses[work] = status

    def _batch_created(self, event) -> None:  # type: ignore[no-untyped-def]
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
        if event.receipt and event.ending == "completed":
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
        self.charges[work] = wanted

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
        self._created(event, event.settings.quote.price_version, "validating_files")

    def _fine_tuning_job_queued(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "queued", JOB_PATHS)

    def _fine_tuning_job_started(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "running", JOB_PATHS)

    def _fine_tuning_job_succeeded(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "succeeded", JOB_PATHS)
        self._trained(event, event.result.trained_tokens, minimum=True)

    def _fine_tuning_job_failed(self, event) -> None:  # type: ignore[no-untyped-def]
        self._move(event.originator_id, "failed", JOB_PATHS)
        charge = event.receipt.charge_nano_usd if event.receipt else 0
        assert event.side == "customer" or charge == 0, "platform failures are free (6)"
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
