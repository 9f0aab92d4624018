"""`gridlined audit verify`: replays the whole log and proves that all that shows money agrees.

Log = holds = key spend = journal = balance rows, every read model is the one that the log gives,
and every charge follows from its receipt, its pinned prices and what was measured. It works in one
snapshot of the database, writes to temporary tables alone, needs nothing else, and names each
difference instead of stopping at the first. Numbers in brackets and before the rules are those of
the ledger's invariants (`docs/ledger.md`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any

from adapters.audit.book import Book, Finding, HoldEntry
from adapters.audit.history import History
from adapters.audit.objects import compare_objects
from adapters.audit.personal_rows import compare_personal_rows
from adapters.audit.read_models import DerivedReadModels, follower_positions
from adapters.audit.rows import compare_journal, compare_rows
from adapters.audit.work_kinds import AUDITED, AuditedKind
from adapters.event_log import snapshots
from adapters.event_log.event_store import decode
from adapters.event_log.postgres import Connection
from domain.errors import InvalidRequest
from domain.ids import PRICE_BOOK_ID
from domain.ledger import money
from domain.ledger.account import Account
from domain.ledger.credit_hold import CreditHold
from domain.ledger.key_spend import KeySpend
from domain.ledger.money import usd_text
from domain.ledger.price_book import PriceBook
from domain.ledger.receipt import Receipt
from domain.log.aggregate import Aggregate
from domain.ports import Objects

PAGE_EVENTS = 1000

FOLLOWERS_WAIT_SECONDS = 0.05
FOLLOWS = "18 what follows the log keeps up with it"

_ONE_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_LOG_END = "SELECT coalesce(max(notification_id), 0) AS position FROM gridline_events"
_SELECT_EVENTS = """
    SELECT notification_id, originator_id, originator_version, topic, state FROM gridline_events
    WHERE notification_id > %s ORDER BY notification_id LIMIT %s
"""
_SELECT_SNAPSHOTS = """
    SELECT originator_id, originator_version, shape, state FROM gridline_snapshots
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """A rule that does not hold, of what, and how."""

    rule: str
    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was replayed, the totals in nano-USD, and every difference found.

    `through` is the log position of the last event, `followers` how far each read model that
    follows the log had come: it is compared up to there.
    """

    events: int
    streams: int
    through: int
    followers: Mapping[str, int]
    accounts: int
    holds: int
    open_holds: int
    receipts: int
    granted_nano_usd: int
    available_nano_usd: int
    held_nano_usd: int
    charged_nano_usd: int
    differences: tuple[Difference, ...]
    objects: int | None = None
    """How many objects were read; None where that was not asked for."""

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def lines(self) -> tuple[str, ...]:
        """The report for people, the verdict last."""
        verdict = "audit passed" if self.passed else f"{len(self.differences)} differences"
        return (
            f"log: {self.events} events in {self.streams} streams, through {self.through}",
            *(f"{name}: through {position}" for name, position in self.followers.items()),
            f"accounts: {self.accounts}; granted {usd_text(self.granted_nano_usd)} USD = available "
            f"{usd_text(self.available_nano_usd)} + held {usd_text(self.held_nano_usd)} + charged "
            f"{usd_text(self.charged_nano_usd)}",
            f"holds: {self.holds}, {self.open_holds} open; receipts: {self.receipts}",
            *(() if self.objects is None else (f"objects: {self.objects} read",)),
            *(f"{each.rule}: {each.subject}: {each.message}" for each in self.differences),
            verdict,
        )

    def to_wire(self) -> dict[str, Any]:
        """The report as JSON; amounts are decimal strings of USD."""
        return {
            "passed": self.passed,
            "events": self.events,
            "streams": self.streams,
            "through": self.through,
            "followers": dict(self.followers),
            "accounts": self.accounts,
            "holds": self.holds,
            "open_holds": self.open_holds,
            "receipts": self.receipts,
            "granted_usd": usd_text(self.granted_nano_usd),
            "available_usd": usd_text(self.available_nano_usd),
            "held_usd": usd_text(self.held_nano_usd),
            "charged_usd": usd_text(self.charged_nano_usd),
            "objects": self.objects,
            "differences": [
                {"rule": each.rule, "subject": each.subject, "message": each.message}
                for each in self.differences
            ],
        }


def wait_for_followers(connection: Connection, *, patience_seconds: float) -> int:
    """Gives the read models that follow the log the time to come to where it ends now, and returns
    that position; `verify` names the one that did not."""
    end = _log_end(connection)
    give_up_at = time.monotonic() + patience_seconds
    while min(follower_positions(connection).values()) < end and time.monotonic() < give_up_at:
        time.sleep(FOLLOWERS_WAIT_SECONDS)
    return end


def verify(
    connection: Connection, *, now: datetime | None = None, followed_through: int | None = None
) -> AuditReport:
    """Replays the log that `connection` (in autocommit) sees and compares all that is derived from
    it. Followers must have come to `followed_through`, or else to the log's end; what had to end by
    `now`, or else by the time of the last event, has ended. Raises nothing of its own: whatever is
    wrong is a difference of the report."""
    with connection.transaction():
        connection.execute(_ONE_SNAPSHOT)
        followers = follower_positions(connection)
        audit = _Audit()
        audit.check_followers(followers, _log_end(connection), followed_through)
        derived = DerivedReadModels(connection, through=followers, find=audit.find)
        audit.replay(connection, derived)
        audit.check_accounts()
        audit.check_keys()
        audit.check_work()
        audit.check_history(now)
        derived.compare()
        compare_rows(connection, audit.book, audit.find)
        compare_personal_rows(connection, audit.aggregates, audit.find)
        compare_journal(connection, audit.book, through=followers["journal"], find=audit.find)
        return audit.report(followers)


async def with_objects(
    report: AuditReport, connection: Connection, objects: Objects
) -> AuditReport:
    """The report with what reading every stored object adds to it."""
    found: list[Difference] = []
    count = await compare_objects(connection, objects, _finding(found))
    return replace(report, objects=count, differences=(*report.differences, *found))


def _finding(differences: list[Difference]) -> Finding:
    def find(rule: str, subject: str, message: str) -> None:
        differences.append(Difference(rule=rule, subject=subject, message=message))

    return find


def _log_end(connection: Connection) -> int:
    row = connection.execute(_LOG_END).fetchone()
    assert row is not None
    return int(row["position"])


@dataclass(slots=True)
class _Audit:
    """One pass over the log: the aggregates it folds to, and the book's independent sums."""

    aggregates: dict[str, Aggregate] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)
    events: int = 0
    through: int = 0
    receipts: int = 0
    last_at: datetime | None = None
    find: Finding = field(init=False)
    book: Book = field(init=False)
    history: History = field(init=False)

    def __post_init__(self) -> None:
        self.find = _finding(self.differences)
        self.book = Book(find=self.find)
        self.history = History(self.book, self.find)

    # The log --------------------------------------------------------------------------------

    def check_followers(
        self, followers: Mapping[str, int], end: int, followed_through: int | None
    ) -> None:
        """None is behind the log, and none has seen what is not there."""
        wanted = end if followed_through is None else followed_through
        for name, position in followers.items():
            if position < wanted:
                self.find(FOLLOWS, name, f"it came to {position}, the log to {wanted}")
            elif position > end:
                self.find(FOLLOWS, name, f"it came to {position}, but the log ends at {end}")

    def replay(self, connection: Connection, derived: DerivedReadModels) -> None:
        """Folds every stream, keeps the book, and derives the read models."""
        stored = {
            (row["originator_id"], row["originator_version"]): row
            for row in connection.execute(_SELECT_SNAPSHOTS).fetchall()
        }
        for row in _log(connection):
            self.events += 1
            self.through = row["notification_id"]
            stream = row["originator_id"]
            expected = self.versions.get(stream, 0) + 1
            if row["originator_version"] != expected:
                self.find("streams are gapless", stream, f"version {expected} is missing")
                self.broken.add(stream)
            self.versions[stream] = row["originator_version"]
            event = self._decoded(row)
            if event is None:
                continue
            self.last_at = event.envelope.at
            self.book.read(event, row["notification_id"])
            self.history.read(event, row["notification_id"])
            derived.take(event, row["notification_id"])
            if self.events % PAGE_EVENTS == 0:
                derived.flush()
            self._fold(stream, event)
            snapshot = stored.get((stream, row["originator_version"]))
            if snapshot is not None:
                self._check_snapshot(stream, snapshot)
        for stream, version in stored:
            if version > self.versions.get(stream, 0):
                self.find("17 a snapshot is a fold", stream, f"the log ends before {version}")

    def _decoded(self, row: dict[str, Any]) -> Aggregate.Event | None:
        try:
            return decode(
                topic=row["topic"],
                originator_id=row["originator_id"],
                originator_version=row["originator_version"],
                state=bytes(row["state"]),
            )
        except Exception as error:  # noqa: BLE001 - an unreadable event is a finding, whatever it is
            self.find("every event is readable", row["originator_id"], type(error).__name__)
            self.broken.add(row["originator_id"])
            return None

    def _fold(self, stream: str, event: Aggregate.Event) -> None:
        if stream in self.broken:
            self.aggregates.pop(stream, None)
            return
        try:
            folded = event.mutate(self.aggregates.get(stream))
        except Exception as error:  # noqa: BLE001 - a stream that does not fold is a finding
            self.find("every stream folds", stream, type(error).__name__)
            self.broken.add(stream)
            return
        if isinstance(folded, Aggregate):
            self.aggregates[stream] = folded

    def _check_snapshot(self, stream: str, row: dict[str, Any]) -> None:
        aggregate = self.aggregates.get(stream)
        if aggregate is None or row["shape"] != snapshots.shape(type(aggregate)):
            return
        if bytes(row["state"]) != snapshots.encode(aggregate):
            self.find("17 a snapshot is a fold", stream, "its state is another")

    # The rules ------------------------------------------------------------------------------

    def check_accounts(self) -> None:
        """Credit adds up, and holds and keys have the same of it (1, 3, 8)."""
        open_holds: dict[str, dict[str, int]] = defaultdict(dict)
        for hold in self.book.holds.values():
            if hold.state == "placed":
                open_holds[hold.account_id][hold.work_id] = hold.maximum
        for account in self._all(Account):
            sums = self.book.credit[account.id]
            granted, charged = account.granted_nano_usd, account.charged_nano_usd
            kept = account.available_nano_usd + account.held_nano_usd
            if kept != granted - charged:
                self.find("1 credit adds up", account.id, f"{kept} is not {granted} - {charged}")
            folded = (account.available_nano_usd, account.held_nano_usd, granted, charged)
            if folded != (sums.available, sums.held, sums.granted, sums.charged):
                self.find("1 credit adds up", account.id, "its events sum to something else")
            if account.holds_nano_usd != open_holds[account.id]:
                self.find("3 held credit is the open holds", account.id, "they differ")
            if self.book.charged_by_keys[account.id] != charged:
                self.find("8 keys were charged what was captured", account.id, "they differ")

    def check_keys(self) -> None:
        """A key's day is the sum of that day's holds, captured or open (9)."""
        wanted: dict[tuple[str, date], list[int]] = defaultdict(lambda: [0, 0])
        for hold in self.book.holds.values():
            bucket = wanted[hold.key_id, hold.day]
            bucket[0] += hold.captured
            bucket[1] += hold.maximum if hold.state == "placed" else 0
        rule = "9 a key's day is the sum of its holds"
        for key_id, day in wanted.keys() | self.book.key_days.keys():
            if wanted[key_id, day] != self.book.key_days[key_id, day]:
                self.find(rule, key_id, f"{day} differs")
        days: dict[str, dict[date, int]] = defaultdict(dict)
        for (key_id, day), (charged, held) in self.book.key_days.items():
            days[key_id][day] = charged + held
        for key in self._all(KeySpend):
            for day, spent in days[key.id].items():
                if key.spent_on(day) != spent:
                    self.find(rule, key.id, f"{day} folds to something else")
            if key.total_nano_usd != sum(days[key.id].values()):
                self.find(rule, key.id, "its total is not the sum of its days")

    def check_history(self, now: datetime | None) -> None:
        """No stream contradicts itself or another (7, 11 to 13)."""
        at = now or self.last_at
        if at is not None:
            self.history.check(now=at)

    def check_work(self) -> None:
        """Open work that started has one open hold, ended work has none, and a charge is its hold's
        capture and follows from its receipt (4 to 7)."""
        for hold in self._all(CreditHold):
            known = self.book.holds.get(hold.work_id)
            if known is None or (hold.state, hold.captured_nano_usd) != (
                known.state,
                known.captured,
            ):
                self.find("4 a hold ends once", hold.id, "its events say something else")
        works = [(kind, work) for kind in AUDITED.values() for work in self._all(kind.aggregate)]
        for kind, work in works:
            self._check_work(kind, work, self.book.holds.get(work.id))
        for work_id in self.book.holds.keys() - {work.id for _, work in works} - self.broken:
            self.find("7 one hold for each job", work_id, "there is a hold, but no such work")

    def _check_work(self, kind: AuditedKind, work: Any, hold: HoldEntry | None) -> None:
        is_open = hold is not None and hold.state == "placed"
        if work.is_terminal and is_open:
            self.find("7 ended work holds nothing", work.id, "its hold is open")
        if work.status in kind.started and not is_open:
            self.find("7 started work has one open hold", work.id, "it has none")
        charge = work.receipt.charge_nano_usd if work.receipt is not None else 0
        if work.is_terminal and charge != (hold.captured if hold is not None else 0):
            self.find("6 a charge is its hold's capture", work.id, "they differ")
        if charge and work.id in self.book.platform_failures:
            self.find("6 platform failures are free", work.id, f"charged {charge}")
        if work.receipt is not None:
            self.receipts += 1
            self._check_receipt(kind, work, work.receipt, hold)

    def _check_receipt(
        self, kind: AuditedKind, work: Any, receipt: Receipt, hold: HoldEntry | None
    ) -> None:
        rule = "6 a charge follows from its receipt"
        book = self.aggregates.get(PRICE_BOOK_ID)
        prices = book.lists.get(receipt.price_version) if isinstance(book, PriceBook) else None
        if prices is None:
            self.find(rule, work.id, f"there are no prices of version {receipt.price_version}")
            return
        if hold is None or (hold.price_version, hold.maximum) != (
            receipt.price_version,
            receipt.maximum_nano_usd,
        ):
            self.find(rule, work.id, "its hold has other prices or another maximum")
        try:
            measured = kind.measured(work, prices)
            minimum = kind.minimum(prices, receipt.base)
        except (KeyError, InvalidRequest):
            self.find(rule, work.id, "its prices do not have its models")
            return
        stated = [
            (line.what, line.model, line.tokens, line.rate_nano_usd_per_mtok)
            for line in receipt.lines
        ]
        if stated != measured:
            self.find(rule, work.id, "tokens or rates are not what was measured and published")
        charge = money.price((tokens, rate) for _, _, tokens, rate in measured)
        if receipt.minimum_applies:
            charge = max(charge, minimum)
        charge = min(charge, receipt.maximum_nano_usd)
        if (receipt.charge_nano_usd, receipt.minimum_nano_usd) != (charge, minimum):
            self.find(rule, work.id, f"{receipt.charge_nano_usd} is not {charge}")
        if receipt.charge_nano_usd + receipt.returned_nano_usd != receipt.maximum_nano_usd:
            self.find(rule, work.id, "charged and returned are not the maximum")

    def report(self, followers: Mapping[str, int]) -> AuditReport:
        """The totals, which are the log's."""
        sums = self.book.credit.values()
        holds = self.book.holds.values()
        return AuditReport(
            events=self.events,
            streams=len(self.versions),
            through=self.through,
            followers=followers,
            accounts=len(self._all(Account)),
            holds=len(holds),
            open_holds=sum(hold.state == "placed" for hold in holds),
            receipts=self.receipts,
            granted_nano_usd=sum(each.granted for each in sums),
            available_nano_usd=sum(each.available for each in sums),
            held_nano_usd=sum(each.held for each in sums),
            charged_nano_usd=sum(each.charged for each in sums),
            differences=tuple(self.differences),
        )

    def _all(self, cls: type[Any]) -> list[Any]:
        return [each for each in self.aggregates.values() if isinstance(each, cls)]


def _log(connection: Connection) -> Iterator[dict[str, Any]]:
    position = 0
    while True:
        rows = connection.execute(_SELECT_EVENTS, (position, PAGE_EVENTS)).fetchall()
        if not rows:
            return
        yield from rows
        position = rows[-1]["notification_id"]
