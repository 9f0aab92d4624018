"""The events of a fine-tuning job that its owner reads (GET /fine_tuning/jobs/{id}/events): what
happened, in words, and the losses as metrics.

The first one also keeps, unseen, where the eval rows come from, for the metrics at the end. Ids are
derived from the place in the log, so that a rebuild gives the same ones. A named event has its name
in `data.code`, and so has the last event of a failed job.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from psycopg.types.json import Jsonb

from domain.log.stored import number
from projections.paging import Page, bounds, page
from projections.projection import Statement
from projections.read_model import Connection, ReadModel
from projections.work.fine_tuning_jobs import REASONS, eval_source_of

Level = Literal["info", "warn", "error"]
Kind = Literal["message", "metrics"]

_PLACES_MAX = 8
"""Job events that one event of the log may make; a page's order is log position times this."""

_INSERT = """
    INSERT INTO fine_tuning_events
        (id, job_id, position, created_at, level, type, message, data, eval_source)
    VALUES
        (%(id)s, %(job_id)s, %(position)s, %(at)s, %(level)s, %(type)s, %(message)s, %(data)s,
         %(eval_source)s)
"""
_INSERT_WITH_EVAL_SOURCE = """
    INSERT INTO fine_tuning_events (id, job_id, position, created_at, level, type, message, data)
    SELECT %(id)s, %(job_id)s, %(position)s, %(at)s, %(level)s, %(type)s, %(message)s,
           %(data)s::jsonb || jsonb_build_object('eval_source', first.eval_source)
    FROM fine_tuning_events first
    WHERE first.job_id = %(job_id)s AND first.eval_source IS NOT NULL
"""

_LIST = """
    SELECT id, job_id, created_at, level, type, message, data FROM fine_tuning_events
    WHERE job_id = %(job_id)s AND position > %(above)s AND position < %(below)s
    ORDER BY position DESC LIMIT %(limit)s
"""
_POSITION = """
    SELECT position FROM fine_tuning_events WHERE id = %(after)s AND job_id = %(job_id)s
"""


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event of a job."""

    id: str
    job_id: str
    created_at: datetime
    level: Level
    type: Kind
    message: str
    data: dict[str, Any] | None


def list_page(
    connection: Connection, *, job_id: str, limit: int, after: str | None = None
) -> Page[EventRow]:
    """A page of the job's events, newest first; the caller has seen whose job it is. Raises
    InvalidRequest for `after`."""
    scope = {"job_id": job_id}
    between = bounds(connection, select_position=_POSITION, scope=scope, after=after)
    rows = connection.execute(_LIST, {**scope, "limit": limit + 1, **between}).fetchall()
    return page([EventRow(**row) for row in rows], limit=limit)


def _entry(
    event: Any,
    position: int,
    message: str,
    *,
    place: int = 0,
    level: Level = "info",
    type: Kind = "message",
    data: dict[str, Any] | None = None,
    eval_source: str | None = None,
) -> dict[str, Any]:
    assert place < _PLACES_MAX
    job_id = event.originator_id
    digest = hashlib.sha256(f"{job_id}/{position}/{place}".encode()).hexdigest()
    return {
        "id": f"ftevent-{digest[:32]}",
        "job_id": job_id,
        "position": position * _PLACES_MAX + place,
        "at": event.envelope.at,
        "level": level,
        "type": type,
        "message": message,
        "data": Jsonb(data) if data is not None else None,
        "eval_source": eval_source,
    }


def _created(event: Any, position: int) -> list[Statement]:
    message = f"Created fine-tuning job: {event.originator_id}"
    entries = [_entry(event, position, message, eval_source=eval_source_of(event.settings))]
    if event.settings.has_suffix:
        entries.append(
            _entry(
                event,
                position,
                "The suffix is kept on the job, but is not part of the model's name.",
                place=1,
                level="warn",
                data={"code": "suffix_ignored"},
            )
        )
    return [(_INSERT, entry) for entry in entries]


def _waiting(event: Any, position: int) -> list[Statement]:
    data = {"code": "waiting_for_capacity", "reason": event.waiting_for}
    return [(_INSERT, _entry(event, position, REASONS[event.waiting_for], data=data))]


def _queued(event: Any, position: int) -> list[Statement]:
    message = "Files validated and credit held, moving job to queued state"
    return [(_INSERT, _entry(event, position, message))]


def _attempt_lost(event: Any, position: int) -> list[Statement]:
    message = "The machine chosen for the job was lost before training began; another is chosen."
    return [(_INSERT, _entry(event, position, message, level="warn"))]


def _started(event: Any, position: int) -> list[Statement]:
    return [(_INSERT, _entry(event, position, "Fine-tuning job started"))]


def _progressed(event: Any, position: int) -> list[Statement]:
    known = {
        "step": event.step,
        "total_steps": event.steps,
        "trained_tokens": event.trained_tokens,
        "train_loss": number(event.train_loss),
        "eval_loss_before": number(event.eval_loss_before),
    }
    data = {name: value for name, value in known.items() if value is not None}
    message = f"Step {event.step}/{event.steps}"
    if event.train_loss is not None:
        message += f": training loss={event.train_loss:.4f}"
    return [(_INSERT, _entry(event, position, message, type="metrics", data=data))]


def _succeeded(event: Any, position: int) -> list[Statement]:
    result = event.result
    data = {
        "step": result.steps,
        "total_steps": result.steps,
        "train_loss": number(result.train_loss),
        "eval_loss_before": number(result.eval_loss_before),
        "eval_loss": number(result.eval_loss),
        "eval_rows": result.eval_rows,
        "steps": result.steps,
        "seconds": number(result.seconds),
    }
    metrics = _entry(event, position, _losses(result), type="metrics", data=data)
    registered = _entry(event, position, f"New fine-tuned model created: {event.model}", place=1)
    done = _entry(event, position, "The job has successfully completed", place=2)
    return [(_INSERT_WITH_EVAL_SOURCE, metrics), (_INSERT, registered), (_INSERT, done)]


def _losses(result: Any) -> str:
    if result.eval_loss_before is None or result.eval_loss is None:
        return f"Training ended: training loss={result.train_loss:.4f}"
    return (
        f"Training ended: eval loss {result.eval_loss_before:.4f} before, {result.eval_loss:.4f} "
        f"after, on {result.eval_rows} rows"
    )


def _failed(event: Any, position: int) -> list[Statement]:
    entry = _entry(event, position, event.message, level="error", data={"code": event.code})
    return [(_INSERT, entry)]


def _cancelled(event: Any, position: int) -> list[Statement]:
    return [(_INSERT, _entry(event, position, "Fine-tuning job cancelled"))]


FINE_TUNING_EVENTS = ReadModel(
    name="fine_tuning_events",
    tables=("fine_tuning_events",),
    handlers={
        "gridline.fine_tuning_job.created": _created,
        "gridline.fine_tuning_job.waiting": _waiting,
        "gridline.fine_tuning_job.queued": _queued,
        "gridline.fine_tuning_job.attempt_lost": _attempt_lost,
        "gridline.fine_tuning_job.started": _started,
        "gridline.fine_tuning_job.progressed": _progressed,
        "gridline.fine_tuning_job.succeeded": _succeeded,
        "gridline.fine_tuning_job.failed": _failed,
        "gridline.fine_tuning_job.cancelled": _cancelled,
    },
)
