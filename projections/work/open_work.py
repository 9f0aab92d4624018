"""Open work as the worker sees it: what to validate, start, give to runners, end and watch.

`open_work` has a row for each job and batch that has not ended, `work_items` one for each chunk or
training that wants an attempt or has one. Rows go when nothing is left to do. The worker acts on
what it reads here by commands, which decide again: a row that is a moment old does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from domain.ids import BATCH, JOB
from domain.limits import WAITING_SECONDS_MAX
from domain.log.stored import Attempt
from domain.work.batch import STOP_WITHIN
from domain.work.kinds import KINDS
from domain.work.scheduling import AssignedWork, StartableWork, WaitingWork
from projections.projection import Statement
from projections.read_model import Connection, ReadModel

_OPENED = """
    INSERT INTO open_work
        (work_id, kind, account_id, base, memory_gb, completion_window, position, created_at, stage,
         due_at)
    VALUES
        (%(id)s, %(kind)s, %(account_id)s, %(base)s, %(memory_gb)s, %(completion_window)s,
         %(position)s, %(at)s, %(stage)s, %(due_at)s)
"""
_PLANNED = "UPDATE open_work SET stage = 'planned', base = %(base)s WHERE work_id = %(id)s"
_CHUNKS_PLANNED = """
    INSERT INTO work_items (work_id, chunk, requests, state)
    SELECT %(id)s, p.number - 1, p.requests, 'planned'
    FROM unnest(%(requests)s::int[]) WITH ORDINALITY AS p (requests, number)
"""
_STARTED = "UPDATE open_work SET stage = 'running' WHERE work_id = %(id)s"
_ENDING = "UPDATE open_work SET stage = 'ending', due_at = %(due_at)s WHERE work_id = %(id)s"
_CHUNKS_WANTED = "UPDATE work_items SET state = 'pending' WHERE work_id = %(id)s"
_QUEUED = """
    UPDATE open_work SET stage = 'queued', due_at = %(due_at)s WHERE work_id = %(id)s
"""
_TRAINING_WANTED = """
    INSERT INTO work_items (work_id, chunk, requests, state) VALUES (%(id)s, 0, 0, 'pending')
"""
_RUNNING = "UPDATE open_work SET stage = 'running', due_at = %(due_at)s WHERE work_id = %(id)s"
_ASSIGNED = """
    UPDATE work_items SET state = 'assigned', attempt = %(attempt)s, runner_id = %(runner_id)s
    WHERE work_id = %(id)s AND chunk = %(chunk)s
"""
_GIVEN_BACK = """
    UPDATE work_items SET state = 'pending', runner_id = NULL
    WHERE work_id = %(id)s AND chunk = %(chunk)s
"""
_ITEM_DONE = "DELETE FROM work_items WHERE work_id = %(id)s AND chunk = %(chunk)s"
_NONE_WANTED = """
    DELETE FROM work_items i USING open_work w
    WHERE i.work_id = %(id)s AND i.state <> 'assigned' AND w.work_id = i.work_id
      AND w.stage = 'ending'
"""
_ITEMS_CLOSED = "DELETE FROM work_items WHERE work_id = %(id)s"
_CLOSED = "DELETE FROM open_work WHERE work_id = %(id)s"

_WAITING = """
    SELECT work_id, chunk, attempt, kind, account_id, base, memory_gb, due_at, completion_window
    FROM (
        SELECT i.work_id, i.chunk, i.attempt, w.kind, w.account_id, w.base, w.memory_gb, w.due_at,
               w.completion_window, w.position,
               row_number() OVER (PARTITION BY w.account_id, w.kind, w.base, w.memory_gb
                                  ORDER BY w.completion_window, w.due_at, w.position, i.chunk)
                   AS place
        FROM work_items i JOIN open_work w ON w.work_id = i.work_id
        WHERE i.state = 'pending'
    ) ranked
    WHERE place <= %(each)s ORDER BY due_at, position, chunk
"""
_ASSIGNED_ITEMS = """
    SELECT i.work_id, i.chunk, i.attempt, i.runner_id, w.kind, w.account_id, w.stage
    FROM work_items i JOIN open_work w ON w.work_id = i.work_id
    WHERE i.state = 'assigned' ORDER BY i.work_id, i.chunk
"""
_STARTABLE = """
    SELECT w.work_id, w.account_id, a.changed_position
    FROM open_work w JOIN accounts a ON a.id = w.account_id
    WHERE w.stage IN ('planned', 'waiting') ORDER BY w.position
"""
_DEPTHS = """
    SELECT kind, stage, count(*) AS count, min(created_at) AS oldest_at
    FROM open_work GROUP BY kind, stage
"""
_TO_VALIDATE = """
    SELECT work_id, account_id, bytes
    FROM (
        SELECT w.work_id, w.account_id, f.bytes, w.position,
               row_number() OVER (PARTITION BY w.account_id ORDER BY w.position) AS place
        FROM open_work w JOIN batches b ON b.id = w.work_id JOIN files f ON f.id = b.input_file_id
        WHERE w.stage = 'validating'
    ) ranked
    ORDER BY place, position LIMIT %(limit)s
"""
_TO_FINALIZE = """
    SELECT work_id, account_id, bytes
    FROM (
        SELECT w.work_id, w.account_id, f.bytes, w.position,
               row_number() OVER (PARTITION BY w.account_id ORDER BY w.position) AS place
        FROM open_work w JOIN batches b ON b.id = w.work_id JOIN files f ON f.id = b.input_file_id
        WHERE w.stage = 'ending' AND NOT EXISTS (
            SELECT FROM work_items i WHERE i.work_id = w.work_id AND i.state = 'assigned')
    ) ranked
    ORDER BY place, position LIMIT %(limit)s
"""
_PAST_DUE = """
    SELECT work_id FROM open_work
    WHERE due_at <= %(now)s AND stage <> 'ending' AND stage <> 'waiting'
    ORDER BY due_at LIMIT %(limit)s
"""

_STOP_OVERDUE = """
    SELECT w.work_id FROM open_work w
    WHERE w.stage = 'ending' AND w.due_at <= %(now)s AND EXISTS (
        SELECT FROM work_items i WHERE i.work_id = w.work_id AND i.state = 'assigned')
    ORDER BY w.due_at LIMIT %(limit)s
"""


def waiting(connection: Connection, *, each: int) -> tuple[WaitingWork, ...]:
    """What wants an attempt, earliest end first: at most `each` of one account, kind, base and
    memory, so that no one's long queue hides another's."""
    return tuple(
        WaitingWork(
            work_id=row["work_id"],
            chunk=row["chunk"],
            kind=row["kind"],
            account_id=row["account_id"],
            base=row["base"],
            deadline=row["due_at"],
            memory_gb=row["memory_gb"],
            flexible=row["completion_window"] == "72h",
            attempts=row["attempt"],
        )
        for row in connection.execute(_WAITING, {"each": each}).fetchall()
    )


def assigned(connection: Connection) -> tuple[AssignedWork, ...]:
    """Every current attempt."""
    return tuple(
        AssignedWork(
            attempt=Attempt(
                work_id=row["work_id"],
                chunk=row["chunk"],
                attempt=row["attempt"],
                runner_id=row["runner_id"],
            ),
            kind=row["kind"],
            account_id=row["account_id"],
            stopping=row["stage"] == "ending",
        )
        for row in connection.execute(_ASSIGNED_ITEMS).fetchall()
    )


def startable(connection: Connection) -> tuple[StartableWork, ...]:
    """Work that waits for credit or its account's slot, oldest first; jobs among it that have
    waited too long."""
    return tuple(
        StartableWork(
            work_id=row["work_id"],
            account_id=row["account_id"],
            account_position=row["changed_position"],
        )
        for row in connection.execute(_STARTABLE).fetchall()
    )


@dataclass(frozen=True, slots=True)
class Depth:
    """How much work of a kind is at a stage, and since when the oldest of it is open."""

    kind: str
    stage: str
    count: int
    oldest_at: datetime


def depths(connection: Connection) -> list[Depth]:
    """For each kind and stage that any open work is at."""
    return [Depth(**row) for row in connection.execute(_DEPTHS).fetchall()]


@dataclass(frozen=True, slots=True)
class DueBatch:
    """A batch that the worker has something to do for; `bytes` is the size of its input."""

    work_id: str
    account_id: str
    bytes: int


def batches_to_validate(connection: Connection, *, limit: int) -> list[DueBatch]:
    """Batches without a plan: the oldest of each account, then the next of each."""
    rows = connection.execute(_TO_VALIDATE, {"limit": limit}).fetchall()
    return [DueBatch(**row) for row in rows]


def batches_to_finalize(connection: Connection, *, limit: int) -> list[DueBatch]:
    """Batches of which nothing runs and nothing more will, in the same order."""
    rows = connection.execute(_TO_FINALIZE, {"limit": limit}).fetchall()
    return [DueBatch(**row) for row in rows]


def past_due(connection: Connection, *, now: datetime, limit: int) -> list[str]:
    """Work that is past its time and not ending yet: batches whose window is over, jobs that waited
    for a runner too long, or run past their limit."""
    return _ids(connection.execute(_PAST_DUE, {"now": now, "limit": limit}).fetchall())


def batches_not_stopping(connection: Connection, *, now: datetime, limit: int) -> list[str]:
    """Batches that are ending, and of which an attempt did not stop in time."""
    return _ids(connection.execute(_STOP_OVERDUE, {"now": now, "limit": limit}).fetchall())


def _ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["work_id"] for row in rows]


def _batch_created(event: Any, position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "kind": KINDS[BATCH].task,
        "account_id": event.account_id,
        "base": None,
        "memory_gb": 0,
        "completion_window": event.completion_window,
        "position": position,
        "at": event.envelope.at,
        "stage": "validating",
        "due_at": event.expires_at,
    }
    return [(_OPENED, parameters)]


def _batch_validated(event: Any, _position: int) -> list[Statement]:
    work_id = event.originator_id
    requests = [chunk.requests for chunk in event.plan.chunks]
    return [
        (_PLANNED, {"id": work_id, "base": event.plan.quote.base}),
        (_CHUNKS_PLANNED, {"id": work_id, "requests": requests}),
    ]


def _batch_started(event: Any, _position: int) -> list[Statement]:
    work_id = event.originator_id
    return [(_STARTED, {"id": work_id}), (_CHUNKS_WANTED, {"id": work_id})]


def _assigned(event: Any, chunk: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "chunk": chunk,
        "attempt": event.attempt,
        "runner_id": event.runner_id,
    }
    return [(_ASSIGNED, parameters)]


def _chunk_assigned(event: Any, _position: int) -> list[Statement]:
    return _assigned(event, event.chunk)


def _chunk_attempt_ended(event: Any, position: int) -> list[Statement]:
    if event.last:
        return _chunk_finished(event, position)
    work_id = event.originator_id
    return [(_GIVEN_BACK, {"id": work_id, "chunk": event.chunk}), (_NONE_WANTED, {"id": work_id})]


def _chunk_finished(event: Any, _position: int) -> list[Statement]:
    return [(_ITEM_DONE, {"id": event.originator_id, "chunk": event.chunk})]


def _batch_ending(event: Any, _position: int) -> list[Statement]:
    work_id = event.originator_id
    due_at = event.envelope.at + STOP_WITHIN
    return [(_ENDING, {"id": work_id, "due_at": due_at}), (_NONE_WANTED, {"id": work_id})]


def _closed(event: Any, _position: int) -> list[Statement]:
    work_id = event.originator_id
    return [(_ITEMS_CLOSED, {"id": work_id}), (_CLOSED, {"id": work_id})]


def _job_created(event: Any, position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "kind": KINDS[JOB].task,
        "account_id": event.account_id,
        "base": event.settings.base,
        "memory_gb": event.settings.quote.gpu_memory_class_gb or 0,
        "completion_window": None,
        "position": position,
        "at": event.envelope.at,
        "stage": "waiting",
        "due_at": event.waiting_until,
    }
    return [(_OPENED, parameters)]


def _job_queued(event: Any, _position: int) -> list[Statement]:
    work_id = event.originator_id
    due_at = event.envelope.at + timedelta(seconds=WAITING_SECONDS_MAX)
    return [
        (_QUEUED, {"id": work_id, "due_at": due_at}),
        (_TRAINING_WANTED, {"id": work_id}),
    ]


def _job_assigned(event: Any, _position: int) -> list[Statement]:
    return _assigned(event, 0)


def _job_attempt_lost(event: Any, _position: int) -> list[Statement]:
    return [(_GIVEN_BACK, {"id": event.originator_id, "chunk": 0})]


def _job_started(event: Any, _position: int) -> list[Statement]:
    return [(_RUNNING, {"id": event.originator_id, "due_at": event.deadline})]


WORK = ReadModel(
    name="work",
    tables=("work_items", "open_work"),
    handlers={
        "gridline.batch.created": _batch_created,
        "gridline.batch.validated": _batch_validated,
        "gridline.batch.started": _batch_started,
        "gridline.batch.attempt_assigned": _chunk_assigned,
        "gridline.batch.attempt_lost": _chunk_attempt_ended,
        "gridline.batch.attempt_failed": _chunk_attempt_ended,
        "gridline.batch.chunk_finished": _chunk_finished,
        "gridline.batch.cancel_requested": _batch_ending,
        "gridline.batch.window_ended": _batch_ending,
        "gridline.batch.finalizing": _batch_ending,
        "gridline.batch.finished": _closed,
        "gridline.batch.failed": _closed,
        "gridline.fine_tuning_job.created": _job_created,
        "gridline.fine_tuning_job.queued": _job_queued,
        "gridline.fine_tuning_job.attempt_assigned": _job_assigned,
        "gridline.fine_tuning_job.attempt_lost": _job_attempt_lost,
        "gridline.fine_tuning_job.started": _job_started,
        "gridline.fine_tuning_job.succeeded": _closed,
        "gridline.fine_tuning_job.failed": _closed,
        "gridline.fine_tuning_job.cancelled": _closed,
    },
)
