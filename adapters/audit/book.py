"""An independent bookkeeper: its own sums of the ledger, from the log's events alone.

`adapters/audit/verify.py` feeds it every event in order and then compares: it shares no code with
the aggregates, the projections or the journal, so that a fault in one of them shows. It decides and
writes nothing. Numbers in brackets are those of the ledger's invariants (`docs/ledger.md`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, ClassVar

from eventsourcing.utils import get_topic

from adapters.audit.work_kinds import audited_kind
from domain.log.aggregate import Aggregate

Finding = Callable[[str, str, str], None]
"""(rule, subject, message)."""


@dataclass(slots=True)
class CreditSums:
    """An account's credit in nano-USD."""

    available: int = 0
    held: int = 0
    granted: int = 0
    charged: int = 0


@dataclass(slots=True)
class HoldEntry:
    """One hold as its stream tells it."""

    account_id: str
    key_id: str
    work_id: str
    maximum: int
    price_version: int
    day: date
    placed_at: datetime
    state: str = "placed"
    captured: int = 0
    returned: int = 0


@dataclass(slots=True)
class JournalLine:
    """A change of one ledger of an account, which the journal must have, with what a statement
    says of it."""

    account_id: str
    ledger: str
    amount: int
    kind: str
    work_id: str | None
    grant_id: str | None
    at: datetime


@dataclass(slots=True)
class Book:
    """`find` is told of every rule that an event breaks."""

    find: Finding
    credit: dict[str, CreditSums] = field(default_factory=lambda: defaultdict(CreditSums))
    holds: dict[str, HoldEntry] = field(default_factory=dict)
    key_days: dict[tuple[str, date], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0])
    )
    key_totals: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    key_accounts: dict[str, str] = field(default_factory=dict)
    charged_by_keys: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    platform_failures: set[str] = field(default_factory=set)
    journal: dict[int, list[JournalLine]] = field(default_factory=dict)
    command_id: str = ""
    command_created_work: bool = False
    command_moved_money: bool = False

    def read(self, event: Aggregate.Event, position: int) -> None:
        """One event of the log, in order."""
        if event.envelope.command_id != self.command_id:
            self.command_id = event.envelope.command_id
            self.command_created_work = self.command_moved_money = False
        handler = self._HANDLERS.get(get_topic(type(event)))
        if handler is not None:
            handler(self, event, position)

    def _note_in_command(self, *, created: bool = False, moved: bool = False) -> None:
        """A command's events stand together in the log."""
        before = self.command_created_work and self.command_moved_money
        self.command_created_work |= created
        self.command_moved_money |= moved
        if not before and self.command_created_work and self.command_moved_money:
            self.find("10 a create moves no money", self.command_id, "it moved some")

    # Accounts -------------------------------------------------------------------------------

    def _moved(
        self, event: Any, position: int, *, available: int = 0, held: int = 0, **others: int
    ) -> None:
        sums = self.credit[event.originator_id]
        sums.available += available
        sums.held += held
        sums.granted += others.get("granted", 0)
        sums.charged += others.get("charged", 0)
        self._note_in_command(moved=True)
        if sums.available < 0 or sums.held < 0:
            self.find("2 credit is never negative", event.originator_id, f"at position {position}")

    def _enter(self, event: Any, position: int, kind: str, *lines: tuple[str, int]) -> None:
        self.journal[position] = [
            JournalLine(
                account_id=event.originator_id,
                ledger=ledger,
                amount=amount,
                kind=kind,
                work_id=None if kind == "grant" else event.work_id,
                grant_id=event.grant_id if kind == "grant" else None,
                at=event.envelope.at,
            )
            for ledger, amount in lines
        ]

    def _credit_granted(self, event: Any, position: int) -> None:
        amount = event.amount_nano_usd
        self._moved(event, position, available=amount, granted=amount)
        self._enter(
            event, position, "grant", ("Expense:Grants", -amount), ("Customer:Available", amount)
        )

    def _credit_reserved(self, event: Any, position: int) -> None:
        amount = event.amount_nano_usd
        self._moved(event, position, available=-amount, held=amount)
        self._enter(
            event, position, "hold", ("Customer:Available", -amount), ("Customer:Held", amount)
        )

    def _credit_captured(self, event: Any, position: int) -> None:
        charge, returned = event.charge_nano_usd, event.returned_nano_usd
        self._moved(event, position, available=returned, held=-charge - returned, charged=charge)
        kind = audited_kind(event.work_id)
        if kind is None:
            self.find("6 a charge is for work", event.work_id, "there is no such kind of work")
        self._enter(
            event,
            position,
            "charge",
            ("Customer:Held", -charge - returned),
            (kind.income if kind is not None else "", charge),
            ("Customer:Available", returned),
        )

    def _credit_released(self, event: Any, position: int) -> None:
        returned = event.returned_nano_usd
        self._moved(event, position, available=returned, held=-returned)
        self._enter(
            event,
            position,
            "release",
            ("Customer:Held", -returned),
            ("Customer:Available", returned),
        )

    # Holds ----------------------------------------------------------------------------------

    def _hold_placed(self, event: Any, _position: int) -> None:
        if event.work_id in self.holds:
            self.find("7 one hold for each job", event.originator_id, "placed twice")
        self.holds[event.work_id] = HoldEntry(
            account_id=event.account_id,
            key_id=event.key_id,
            work_id=event.work_id,
            maximum=event.maximum_nano_usd,
            price_version=event.price_version,
            day=event.spend_day,
            placed_at=event.envelope.at,
        )

    def _hold_captured(self, event: Any, _position: int) -> None:
        self._end_hold(event, "captured", event.charge_nano_usd)

    def _hold_released(self, event: Any, _position: int) -> None:
        self._end_hold(event, "released", 0)

    def _hold_expired(self, event: Any, _position: int) -> None:
        self._end_hold(event, "expired", 0)

    def _end_hold(self, event: Any, state: str, captured: int) -> None:
        hold = self.holds.get(event.originator_id.removeprefix("hold_"))
        if hold is None:
            self.find("4 a hold ends once", event.originator_id, f"{state}, but never placed")
            return
        if hold.state != "placed":
            self.find("4 a hold ends once", event.originator_id, f"{hold.state}, then {state}")
        if not 0 <= captured <= hold.maximum:
            self.find("5 a capture is within its hold", event.originator_id, f"{captured}")
        if captured + event.returned_nano_usd != hold.maximum:
            self.find(
                "5 captured and returned are what was placed",
                event.originator_id,
                f"{captured} + {event.returned_nano_usd} of {hold.maximum}",
            )
        hold.state, hold.captured, hold.returned = state, captured, event.returned_nano_usd

    # Keys -----------------------------------------------------------------------------------

    def _key_registered(self, event: Any, _position: int) -> None:
        self.key_accounts[event.originator_id] = event.account_id

    def _spend_reserved(self, event: Any, _position: int) -> None:
        self._spent(event, charged=0, held=event.amount_nano_usd)

    def _spend_charged(self, event: Any, _position: int) -> None:
        charge = event.charge_nano_usd
        self._spent(event, charged=charge, held=-charge - event.returned_nano_usd)
        account_id = self.key_accounts.get(event.originator_id, "")
        self.charged_by_keys[account_id] += charge

    def _spend_released(self, event: Any, _position: int) -> None:
        self._spent(event, charged=0, held=-event.returned_nano_usd)

    def _spent(self, event: Any, *, charged: int, held: int) -> None:
        bucket = self.key_days[event.originator_id, event.day]
        bucket[0] += charged
        bucket[1] += held
        self.key_totals[event.originator_id] += charged + held
        self._note_in_command(moved=True)

    # Work -----------------------------------------------------------------------------------

    def _work_created(self, _event: Any, _position: int) -> None:
        self._note_in_command(created=True)

    def _job_failed(self, event: Any, _position: int) -> None:
        if event.side == "platform":
            self.platform_failures.add(event.originator_id)

    def _account_opened(self, event: Any, _position: int) -> None:
        self.credit[event.originator_id] = CreditSums()

    _HANDLERS: ClassVar[Mapping[str, Callable[[Book, Any, int], None]]] = {
        "gridline.account.opened": _account_opened,
        "gridline.account.credit_granted": _credit_granted,
        "gridline.account.credit_reserved": _credit_reserved,
        "gridline.account.credit_captured": _credit_captured,
        "gridline.account.credit_released": _credit_released,
        "gridline.credit_hold.placed": _hold_placed,
        "gridline.credit_hold.captured": _hold_captured,
        "gridline.credit_hold.released": _hold_released,
        "gridline.credit_hold.expired": _hold_expired,
        "gridline.key_spend.registered": _key_registered,
        "gridline.key_spend.spend_reserved": _spend_reserved,
        "gridline.key_spend.spend_charged": _spend_charged,
        "gridline.key_spend.spend_released": _spend_released,
        "gridline.batch.created": _work_created,
        "gridline.fine_tuning_job.created": _work_created,
        "gridline.fine_tuning_job.failed": _job_failed,
    }
