"""The kinds of work that runners do, as facts: one row for each.

Everything that depends on the kind of a piece of work looks it up here by the work's id, or in a
table of its own with exactly these kinds: its commands (`domain/commands/work.py`), its receipt
(`projections/money/receipts.py`) and the audit's checks (`adapters/audit/work_kinds.py`). An id
that is of no kind is our own mistake and stops: no work is ever taken for another kind's.
`docs/adding.md` says what a new kind brings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

from domain.ids import BATCH, JOB
from domain.log.aggregate import Aggregate
from domain.log.stored import Attempt
from domain.log.unit_of_work import UnitOfWork
from domain.work.batch import Batch
from domain.work.fine_tuning_job import FineTuningJob


class Work(Protocol):
    """What attempts of any kind of work are looked up in."""

    @property
    def id(self) -> str: ...

    @property
    def is_terminal(self) -> bool: ...

    def is_current(self, attempt: Attempt) -> bool:
        """Whether this attempt is the one whose reports count."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """`name` is what receipts call it; `task` what runners call it, who offer slots by task."""

    prefix: str
    name: str
    task: str
    aggregate: type[Aggregate]
    income: str
    """The journal's account of what is charged for it."""
    says_that_it_began: bool
    """Whether the word that a runner has begun is worth an event."""
    says_what_it_waits_for: bool
    """Whether its owner is told that no runner is free."""


KINDS: dict[str, Kind] = {
    BATCH: Kind(
        prefix=BATCH,
        name="batch",
        task="batch_chunk",
        aggregate=Batch,
        income="Income:Usage:Batch",
        says_that_it_began=False,
        says_what_it_waits_for=False,
    ),
    JOB: Kind(
        prefix=JOB,
        name="fine_tuning.job",
        task="train",
        aggregate=FineTuningJob,
        income="Income:Usage:Training",
        says_that_it_began=True,
        says_what_it_waits_for=True,
    ),
}
"""By the prefix of their ids. A prefix never starts with another one."""


def find_kind(work_id: str) -> Kind | None:
    """The kind of an id that may be anything, as one in a request or a message."""
    return next((kind for prefix, kind in KINDS.items() if work_id.startswith(prefix)), None)


def kind_of(work_id: str) -> Kind:
    """The kind of an id of ours. Asserts that there is one."""
    kind = find_kind(work_id)
    assert kind is not None, f"{work_id} is of no kind of work"
    return kind


def find_work(uow: UnitOfWork, work_id: str) -> Work | None:
    """The work of that id, or None; None too for an id of no kind."""
    kind = find_kind(work_id)
    return None if kind is None else cast("Work | None", uow.find(kind.aggregate, work_id))
