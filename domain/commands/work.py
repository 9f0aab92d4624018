"""Starting work, giving it to runners, taking it back from lost ones, recording what they report,
and ending what is past its time: the same commands for every kind.

What a kind does at each of them stands in its row of `COMMANDS`, which has exactly the kinds of
`domain/work/kinds.py`. Here is what holds for all: reports and losses of an attempt that is not
current change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from domain.commands.attempts import batches as chunks
from domain.commands.attempts import trainings
from domain.commands.batches import end_batch_window, start_batch
from domain.commands.fine_tuning import expire_fine_tuning_job, start_fine_tuning_job
from domain.ids import BATCH, JOB
from domain.log.stored import Attempt, StoredObject
from domain.log.unit_of_work import UnitOfWork
from domain.messages import Report, Task
from domain.work.kinds import find_kind, find_work, kind_of


@dataclass(frozen=True, slots=True)
class KindCommands:
    """What a kind of work does. All but `start`, `assign` and `expire` are asked of the current
    attempt alone; each may find that there is nothing to do."""

    start: Callable[[UnitOfWork, str], None]
    """Holds the credit and wants attempts; or waits; or ends without having run."""
    assign: Callable[[UnitOfWork, str, int, str], Attempt | None]
    """(work, chunk, runner): the next attempt, or None if none is wanted."""
    wait: Callable[[UnitOfWork, str], None]
    """Says that no runner is free."""
    claims: Callable[[Report], tuple[StoredObject, ...]]
    """Objects that a report says are stored, and that are recorded only as the store has them."""
    record: Callable[[UnitOfWork, Attempt, Report, Collection[StoredObject]], None]
    """With those of the claimed objects that the store has just so."""
    lose: Callable[[UnitOfWork, Attempt], None]
    """The attempt's runner is gone."""
    give_back: Callable[[UnitOfWork, Attempt], None]
    """The runner is there and does not take the attempt."""
    expire: Callable[[UnitOfWork, str], None]
    """Ends what is past its time."""
    task: Callable[[UnitOfWork, Attempt], Task]
    """What the runner needs to know; the same each time it is sent."""


COMMANDS: dict[str, KindCommands] = {
    BATCH: KindCommands(
        start=start_batch,
        assign=chunks.assign,
        wait=chunks.wait,
        claims=chunks.claims,
        record=chunks.record,
        lose=chunks.lose,
        give_back=chunks.lose,
        expire=end_batch_window,
        task=chunks.task,
    ),
    JOB: KindCommands(
        start=start_fine_tuning_job,
        assign=trainings.assign,
        wait=trainings.wait,
        claims=trainings.claims,
        record=trainings.record,
        lose=trainings.lose,
        give_back=trainings.give_back,
        expire=expire_fine_tuning_job,
        task=trainings.task,
    ),
}


@dataclass(frozen=True, slots=True)
class StartWork:
    work_id: str


def start_work(uow: UnitOfWork, command: StartWork) -> None:
    """Holds the credit and lets runners have it; or waits; or ends it, with nothing run."""
    _commands_of(command.work_id).start(uow, command.work_id)


@dataclass(frozen=True, slots=True)
class AssignWork:
    """`chunk` is 0 for work that is not cut into chunks."""

    work_id: str
    chunk: int
    runner_id: str


def assign_work(uow: UnitOfWork, command: AssignWork) -> Attempt | None:
    """Records the next attempt by this runner, or None if the work no longer wants one."""
    of_kind = _commands_of(command.work_id)
    return of_kind.assign(uow, command.work_id, command.chunk, command.runner_id)


@dataclass(frozen=True, slots=True)
class WaitForRunner:
    work_id: str


def wait_for_runner(uow: UnitOfWork, command: WaitForRunner) -> None:
    """Says that the work waits for a runner (fine-tuning page, "The job"), once."""
    _commands_of(command.work_id).wait(uow, command.work_id)


@dataclass(frozen=True, slots=True)
class LoseAttempt:
    attempt: Attempt


def lose_attempt(uow: UnitOfWork, command: LoseAttempt) -> None:
    """The lease of the attempt's runner ended."""
    if _is_current(uow, command.attempt):
        _commands_of(command.attempt.work_id).lose(uow, command.attempt)


def give_attempt_back(uow: UnitOfWork, command: LoseAttempt) -> None:
    """The runner is there and does not take the attempt."""
    if _is_current(uow, command.attempt):
        _commands_of(command.attempt.work_id).give_back(uow, command.attempt)


@dataclass(frozen=True, slots=True)
class RecordReport:
    """A runner's report; its broker position is recorded in the same append. `stored` are those of
    its claimed objects that the store has as claimed."""

    report: Report
    stored: tuple[StoredObject, ...] = ()


def record_report(uow: UnitOfWork, command: RecordReport) -> None:
    """Records what a report of the current attempt says; any other changes nothing, nor does one
    about work that nobody knows."""
    attempt = command.report.attempt.to_log()
    if _is_current(uow, attempt):
        _commands_of(attempt.work_id).record(uow, attempt, command.report, command.stored)


def claims_objects(report: Report) -> bool:
    """Whether the store is to be asked before the report is recorded."""
    kind = find_kind(report.attempt.work_id)
    return kind is not None and bool(COMMANDS[kind.prefix].claims(report))


def claimed_objects(uow: UnitOfWork, report: Report) -> tuple[StoredObject, ...]:
    """What is to be read from the store before the report is recorded: nothing of an attempt that
    is not current, and nothing that is not the attempt's own. Reads only."""
    attempt = report.attempt.to_log()
    if not _is_current(uow, attempt):
        return ()
    of_kind = _commands_of(attempt.work_id)
    prefix = of_kind.task(uow, attempt).output_prefix
    return tuple(claimed for claimed in of_kind.claims(report) if claimed.key.startswith(prefix))


@dataclass(frozen=True, slots=True)
class ExpireWork:
    work_id: str


def expire_work(uow: UnitOfWork, command: ExpireWork) -> None:
    """Ends work that is past its time; whether it is, is decided here again."""
    _commands_of(command.work_id).expire(uow, command.work_id)


def current_task(uow: UnitOfWork, attempt: Attempt) -> Task | None:
    """What the attempt is to run, or None if it is not the current one of its work. Reads only."""
    if not _is_current(uow, attempt):
        return None
    return _commands_of(attempt.work_id).task(uow, attempt)


def _commands_of(work_id: str) -> KindCommands:
    return COMMANDS[kind_of(work_id).prefix]


def _is_current(uow: UnitOfWork, attempt: Attempt) -> bool:
    work = find_work(uow, attempt.work_id)
    return work is not None and work.is_current(attempt)
