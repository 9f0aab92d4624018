"""What a command handler sees of the log: aggregates by id, new ids, the time, and nothing else.

Handlers in `domain/commands/` are given a unit of work by the writer of `adapters/event_log` or, in
tests, by its in-memory twin. A handler is a pure function of the aggregates it gets, its command,
the ids and `now`: it may run twice, passes all its guards before its first change, and never saves,
since whatever it changed is saved when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeVar

from domain.log.aggregate import Aggregate, Envelope

A = TypeVar("A", bound=Aggregate)
C = TypeVar("C")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PersonalRow:
    """A row that the customer can have deleted: e-mail, filenames, metadata, suffixes.

    It is written in the same append as the command's events and is no projection, so a rebuild
    keeps it. `key` are the primary key's columns; `values` the others. None deletes every
    row with the `key`, which may then be any columns.
    """

    table: str
    key: dict[str, Any]
    values: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class CommandContext:
    """Where a command comes from; the writer makes the events' Envelope of it and the clock.

    `actor` is a key id, a user id or `system:<process part>`; `command_id` is kept by a retry.
    """

    actor: str
    correlation_id: str
    causation: str
    command_id: str


class UnitOfWork(Protocol):
    """One command's view of the log. All that it changes lands in one append, or nothing does."""

    @property
    def now(self) -> datetime:
        """The command's effective time, UTC."""
        ...

    @property
    def envelope(self) -> Envelope:
        """The envelope of every event of this command."""
        ...

    def new_id(self, prefix: str) -> str:
        """A fresh id: prefix + 32 hex digits. A handler that runs twice draws a new one."""
        ...

    def find(self, cls: type[A], id: str) -> A | None:
        """The aggregate of that id, or None if there is none."""
        ...

    def get(self, cls: type[A], id: str) -> A:
        """The aggregate of that id. Raises NotFound."""
        ...

    def add(self, aggregate: Aggregate) -> None:
        """Has a newly created aggregate saved with the command."""
        ...

    def personal(self, row: PersonalRow) -> None:
        """Writes or deletes a personal row in the command's append."""
        ...

    def tracking(self, name: str, position: int) -> None:
        """Records a position in the command's append, which must be greater than the stored one
        of that name. Raises DuplicateDelivery if it is not."""
        ...


Handler = Callable[[UnitOfWork, C], R]


class CommandWriter(Protocol):
    """Who runs commands: the `Writer` of `adapters/event_log`, in tests its `MemoryWriter`.

    `tracking` is a (name, position) recorded in the command's append. Besides what the handler
    raises: DuplicateDelivery, ConcurrentUpdate, Overloaded, StorageOutcomeUnknown.
    """

    def submit(
        self,
        handler: Handler[C, R],
        command: C,
        context: CommandContext,
        *,
        tracking: tuple[str, int] | None = None,
    ) -> Future[R]:
        """Queues the command; the future has the handler's value once it is committed."""
        ...

    async def execute(
        self,
        handler: Handler[C, R],
        command: C,
        context: CommandContext,
        *,
        tracking: tuple[str, int] | None = None,
    ) -> R:
        """The same for asyncio callers."""
        ...

    def close(self) -> None:
        """Finishes what is queued and takes no more."""
        ...
