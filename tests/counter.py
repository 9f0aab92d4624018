"""A small aggregate, its handlers and a read model, for the tests of the log itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from domain.errors import LimitExceeded
from domain.log.aggregate import Aggregate, Envelope, event
from domain.log.unit_of_work import CommandContext, PersonalRow, UnitOfWork
from projections.projection import Statement

CONTEXT = CommandContext(
    actor="key_test", correlation_id="req_test", causation="POST /test", command_id="cmd_test"
)
CEILING = 1_000_000


class Counter(Aggregate, topic="test.counter"):
    """Counts up to a ceiling, by name."""

    snapshot_interval: ClassVar[int] = 10

    total: int
    by_name: dict[str, int]
    last_at: datetime | None

    @event("Opened", topic="test.counter.opened")
    def __init__(self, *, id: str, envelope: Envelope) -> None:
        self.total = 0
        self.by_name = {}
        self.last_at = None

    def add(self, amount: int, *, name: str, ceiling: int, envelope: Envelope) -> None:
        if self.total + amount > ceiling:
            raise LimitExceeded("The counter is full.")
        self._added(amount=amount, name=name, at=envelope.at, envelope=envelope)

    @event("Added", topic="test.counter.added")
    def _added(self, *, amount: int, name: str, at: datetime, envelope: Envelope) -> None:
        self.total += amount
        self.by_name[name] = self.by_name.get(name, 0) + amount
        self.last_at = at


@dataclass(frozen=True)
class Add:
    id: str
    amount: int = 1
    name: str = "n"
    ceiling: int = CEILING


def open_counter(uow: UnitOfWork, id: str) -> str:
    uow.add(Counter(id=id, envelope=uow.envelope))
    return id


def add(uow: UnitOfWork, command: Add) -> int:
    counter = uow.get(Counter, command.id)
    counter.add(command.amount, name=command.name, ceiling=command.ceiling, envelope=uow.envelope)
    return counter.total


def add_then_refuse(uow: UnitOfWork, command: Add) -> int:
    """A badly written handler: it refuses after its first change."""
    add(uow, command)
    raise LimitExceeded("Refused too late.")


def add_then_break(uow: UnitOfWork, command: Add) -> int:
    add(uow, command)
    raise AssertionError("our own mistake")


def remember_name(uow: UnitOfWork, row: PersonalRow) -> None:
    uow.personal(row)


class Totals:
    """The read model of counters."""

    name = "test_totals"
    tables = ("test_totals",)

    def apply(self, event: Aggregate.Event, position: int) -> Sequence[Statement]:
        match event:
            case Counter.Opened():  # type: ignore[attr-defined]
                return [
                    (
                        "INSERT INTO test_totals (id, total, events, position)"
                        " VALUES (%s, 0, 1, %s)",
                        (event.originator_id, position),
                    )
                ]
            case Counter.Added(amount=amount):  # type: ignore[attr-defined]
                return [
                    (
                        "UPDATE test_totals SET total = total + %s, events = events + 1,"
                        " position = %s WHERE id = %s",
                        (amount, position, event.originator_id),
                    )
                ]
            case _:
                return []


TOTALS_TABLES = """
    CREATE TABLE test_totals (
        id text PRIMARY KEY, total bigint NOT NULL, events bigint NOT NULL, position bigint NOT NULL
    );
    CREATE TABLE test_people (id text PRIMARY KEY, name text NOT NULL UNIQUE, metadata jsonb);
    GRANT SELECT, INSERT, UPDATE, DELETE ON test_totals, test_people TO gridline;
"""


class SteppingClock:
    """Every reading is a second later."""

    def __init__(self) -> None:
        self._seconds = 0

    def now(self) -> datetime:
        self._seconds += 1
        return datetime.fromtimestamp(1_800_000_000 + self._seconds, UTC)


class CountingIds:
    """Ids in order; safe to draw from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def new(self, prefix: str) -> str:
        with self._lock:
            self._next += 1
            return f"{prefix}{self._next:032x}"
