"""A kind of work is a row in each of a few tables. A scratch kind goes in through exactly those,
and lives from its creation to the journal; an id of no kind stops whatever meets it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest

from adapters.audit.book import Book
from adapters.audit.work_kinds import AUDITED, AuditedKind
from adapters.event_log.memory_store import MemoryWriter
from domain import messages
from domain.commands import accounts
from domain.commands import keys as key_commands
from domain.commands.settlement import HoldTerms, capture_hold, place_hold
from domain.commands.work import (
    COMMANDS,
    AssignWork,
    KindCommands,
    LoseAttempt,
    RecordReport,
    StartWork,
    assign_work,
    current_task,
    lose_attempt,
    record_report,
    start_work,
)
from domain.ledger.account import Account, AccountLimits
from domain.log.aggregate import Aggregate, Envelope, event
from domain.log.stored import Attempt
from domain.log.unit_of_work import CommandContext, Handler, UnitOfWork
from domain.work.kinds import KINDS, Kind, kind_of
from gpu_runners.parent.works import TASK_RUNS
from projections.money import receipts
from projections.money.journal import JOURNAL
from tests.fakes import FakeClock

MERGE = "merge_"
MAXIMUM, CHARGE = 700, 300
TASK = messages.BatchChunkTask(
    input_key="adapters/x",
    start_byte=0,
    end_byte=1,
    first_line=1,
    requests=1,
    sha256="0" * 64,
    endpoint="/v1/embeddings",
    base="bge-m3",
    output_prefix="merges/1/",
)


class Merge(Aggregate, topic="test.merge"):
    """The scratch kind: one attempt, then it is merged."""

    account_id: str
    key_id: str
    runner_id: str | None
    merged: bool
    losses: int

    @event("Created", topic="test.merge.created")
    def __init__(self, *, id: str, envelope: Envelope, account_id: str, key_id: str) -> None:
        self.account_id = account_id
        self.key_id = key_id
        self.runner_id = None
        self.merged = False
        self.losses = 0

    @property
    def is_terminal(self) -> bool:
        return self.merged

    def is_current(self, attempt: Attempt) -> bool:
        return self.runner_id == attempt.runner_id and not self.merged

    def assign(self, *, runner_id: str, envelope: Envelope) -> Attempt:
        self._assigned(runner_id=runner_id, envelope=envelope)
        return Attempt(work_id=self.id, chunk=0, attempt=1 + self.losses, runner_id=runner_id)

    @event("Assigned", topic="test.merge.assigned")
    def _assigned(self, *, runner_id: str, envelope: Envelope) -> None:
        self.runner_id = runner_id

    @event("Lost", topic="test.merge.lost")
    def lose(self, *, envelope: Envelope) -> None:
        self.runner_id = None
        self.losses += 1

    @event("Merged", topic="test.merge.merged")
    def merge(self, *, envelope: Envelope) -> None:
        self.merged = True


def create(uow: UnitOfWork, owner: accounts.AccountOpened) -> str:
    merge = Merge(
        id=uow.new_id(MERGE),
        envelope=uow.envelope,
        account_id=owner.account_id,
        key_id=owner.key_id,
    )
    uow.add(merge)
    return merge.id


def start(uow: UnitOfWork, merge_id: str) -> None:
    merge = uow.get(Merge, merge_id)
    terms = HoldTerms(
        work_id=merge.id,
        account_id=merge.account_id,
        key_id=merge.key_id,
        maximum_nano_usd=MAXIMUM,
        price_version=1,
        expires_at=uow.now + timedelta(hours=1),
    )
    assert place_hold(uow, terms) == "held"


def assign(uow: UnitOfWork, merge_id: str, _chunk: int, runner_id: str) -> Attempt:
    return uow.get(Merge, merge_id).assign(runner_id=runner_id, envelope=uow.envelope)


def lose(uow: UnitOfWork, attempt: Attempt) -> None:
    uow.get(Merge, attempt.work_id).lose(envelope=uow.envelope)


def record(uow: UnitOfWork, attempt: Attempt, _report: messages.Report, _stored: Any) -> None:
    capture_hold(uow, attempt.work_id, CHARGE)
    uow.get(Merge, attempt.work_id).merge(envelope=uow.envelope)


def nothing(_uow: UnitOfWork, _work_id: str) -> None:
    raise AssertionError("not in this history")


@contextmanager
def added(table: MutableMapping[str, Any], row: Any) -> Iterator[None]:
    table[MERGE] = row
    try:
        yield
    finally:
        del table[MERGE]


@pytest.fixture
def merges_are_a_kind() -> Iterator[None]:
    """The rows that `docs/adding.md` names, but for those of the runner and of receipts."""
    kind = Kind(
        prefix=MERGE,
        name="merge",
        task="merge",
        aggregate=Merge,
        income="Income:Usage:Merge",
        says_that_it_began=False,
        says_what_it_waits_for=False,
    )
    commands = KindCommands(
        start=start,
        assign=assign,
        wait=nothing,
        claims=lambda _report: (),
        record=record,
        lose=lose,
        give_back=lose,
        expire=nothing,
        task=lambda _uow, _attempt: TASK,
    )
    audited = AuditedKind(
        prefix=MERGE,
        aggregate=Merge,
        income="Income:Usage:Merge",
        started=(),
        measured=lambda _merge, _prices: [],
        minimum=lambda _prices, _base: 0,
    )
    with ExitStack() as stack:
        for table, row in ((KINDS, kind), (COMMANDS, commands), (AUDITED, audited)):
            stack.enter_context(added(table, row))  # type: ignore[arg-type]
        yield


class Ids:
    def __init__(self) -> None:
        self._next = itertools.count(1)

    def new(self, prefix: str) -> str:
        return f"{prefix}{next(self._next):032x}"


class History:
    """Commands on a log in memory, each at once."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.writer = MemoryWriter(clock=self.clock, ids=Ids())
        secret = key_commands.KeySecret(sha256="0" * 64, prefix="sk", name="first")
        self.owner: accounts.AccountOpened = self.run(
            accounts.open_account,
            accounts.OpenAccount(
                email="someone@example.com",
                limits=AccountLimits(open_fine_tunes=1, open_batches=1),
                credit_nano_usd=1_000,
                secret=secret,
            ),
        )

    def run(self, handler: Handler[Any, Any], command: Any) -> Any:
        context = CommandContext(
            actor="system:test", correlation_id="c", causation="test", command_id="one"
        )
        return self.writer.submit(handler, command, context).result()

    def report(self, attempt: Attempt) -> None:
        report = messages.Report(
            attempt=messages.Attempt.of(attempt),
            seq=1,
            at=datetime(2027, 1, 1, tzinfo=UTC),
            body=messages.ChunkFinished(completed=1, failed=0),
        )
        self.run(record_report, RecordReport(report))


def charged(history: History) -> dict[str, int]:
    """The journal's balances by account, as the log's events enter them."""
    balances: dict[str, int] = {}
    for position, each in history.writer.events():
        for _, entry in JOURNAL.apply(each, position):
            assert isinstance(entry, dict)
            balances[entry["ledger"]] = balances.get(entry["ledger"], 0) + entry["amount"]
    return balances


@pytest.mark.usefixtures("merges_are_a_kind")
def test_a_new_kind_lives_from_its_creation_to_the_journal_through_the_tables_alone() -> None:
    history = History()
    merge_id = history.run(create, history.owner)
    history.run(start_work, StartWork(merge_id))
    first = history.run(assign_work, AssignWork(merge_id, 0, "runner_1"))
    history.run(lose_attempt, LoseAttempt(first))
    history.report(first)
    second = history.run(assign_work, AssignWork(merge_id, 0, "runner_2"))
    assert history.run(current_task, first) is None
    assert history.run(current_task, second) == TASK

    history.report(second)
    history.report(second)

    account = history.writer.load(Account, history.owner.account_id)
    assert account is not None
    assert (account.available_nano_usd, account.charged_nano_usd) == (1_000 - CHARGE, CHARGE)
    assert charged(history) == {
        "Expense:Grants": -1_000,
        "Customer:Available": 1_000 - CHARGE,
        "Customer:Held": 0,
        "Income:Usage:Merge": CHARGE,
    }


@pytest.mark.usefixtures("merges_are_a_kind")
def test_the_audit_books_a_new_kind_as_what_it_is() -> None:
    history, findings = History(), []
    merge_id = history.run(create, history.owner)
    history.run(start_work, StartWork(merge_id))
    history.report(history.run(assign_work, AssignWork(merge_id, 0, "runner_1")))

    book = Book(find=lambda *finding: findings.append(finding))
    for position, each in history.writer.events():
        book.read(each, position)

    income = [line for lines in book.journal.values() for line in lines if "Income" in line.ledger]
    assert [(line.ledger, line.amount) for line in income] == [("Income:Usage:Merge", CHARGE)]
    assert not [finding for finding in findings if "kind" in finding[2]]


def test_an_id_of_no_kind_stops_and_is_never_booked_as_anothers() -> None:
    history = History()
    merge_id = history.run(create, history.owner)

    with pytest.raises(AssertionError, match="no kind of work"):
        history.run(start_work, StartWork(merge_id))
    with pytest.raises(AssertionError, match="no kind of work"):
        kind_of("file-0123")
    history.run(start, merge_id)
    history.run(capture, merge_id)
    with pytest.raises(AssertionError, match="no kind of work"):
        charged(history)


def capture(uow: UnitOfWork, work_id: str) -> None:
    capture_hold(uow, work_id, CHARGE)


def test_a_report_about_work_of_no_kind_changes_nothing() -> None:
    history = History()
    before = len(history.writer.events())

    history.report(Attempt(work_id="stranger-1", chunk=0, attempt=1, runner_id="r"))

    assert len(history.writer.events()) == before


def test_every_table_has_every_kind() -> None:
    assert [prefix for prefix, kind in KINDS.items() if kind.prefix != prefix] == []
    assert KINDS.keys() == COMMANDS.keys() == receipts.READERS.keys() == AUDITED.keys()
    tasks = {kind.task for kind in KINDS.values()}
    assert tasks == set(get_args(messages.TaskKind)) == set(TASK_RUNS)
    assert len({kind.income for kind in KINDS.values()}) == len(KINDS)


def test_no_prefix_starts_with_another() -> None:
    for one, other in itertools.permutations(KINDS, 2):
        assert not one.startswith(other)
