"""Batches as the API shows them.

While a batch runs its counts only grow: they are the most that was ever reported, even when a lost
attempt is run again; at the end they are exact. Metadata is personal and joined from `work_texts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from domain.catalog import Endpoint
from domain.inputs.batch_line import LineError
from domain.ledger.receipt import Receipt
from domain.limits import CompletionWindow
from domain.log.stored import TokenUsage
from domain.work.batch import BatchStatus, Ending
from domain.work.quote import BatchQuote
from projections.paging import Page, bounds, page
from projections.projection import Statement
from projections.read_model import Connection, ReadModel

_CREATED = """
    INSERT INTO batches
        (id, account_id, key_id, position, status, created_at, expires_at, input_file_id,
         input_key, endpoint, completion_window, output_expires_seconds, price_version)
    VALUES
        (%(id)s, %(account_id)s, %(key_id)s, %(position)s, 'validating', %(at)s, %(expires_at)s,
         %(input_file_id)s, %(input_key)s, %(endpoint)s, %(completion_window)s,
         %(output_expires_seconds)s, %(price_version)s)
"""
_VALIDATED = """
    UPDATE batches SET base = %(base)s, base_revision = %(base_revision)s,
        requests = %(requests)s, quote = %(quote)s
    WHERE id = %(id)s
"""
_WAITING = "UPDATE batches SET waiting_for = %(waiting_for)s WHERE id = %(id)s"
_STARTED = """
    UPDATE batches SET status = 'in_progress', in_progress_at = %(at)s, waiting_for = NULL
    WHERE id = %(id)s
"""
_FAILED = """
    UPDATE batches SET status = 'failed', failed_at = %(at)s, errors = %(errors)s,
        waiting_for = NULL
    WHERE id = %(id)s
"""
_CANCEL_REQUESTED = """
    UPDATE batches SET status = 'cancelling', cancelling_at = %(at)s, ending = 'cancelled',
        waiting_for = NULL
    WHERE id = %(id)s
"""
_WINDOW_ENDED = "UPDATE batches SET ending = 'expired', waiting_for = NULL WHERE id = %(id)s"
_FINALIZING = """
    UPDATE batches SET status = 'finalizing', finalizing_at = %(at)s, ending = 'completed'
    WHERE id = %(id)s
"""
_FINISHED = """
    UPDATE batches SET
        status = %(ending)s,
        completed_at = CASE WHEN %(ending)s::text = 'completed' THEN %(at)s::timestamptz END,
        cancelled_at = CASE WHEN %(ending)s::text = 'cancelled' THEN %(at)s::timestamptz END,
        expired_at = CASE WHEN %(ending)s::text = 'expired' THEN %(at)s::timestamptz END,
        requests = coalesce(requests, %(completed)s::int + %(failed)s::int),
        completed = %(completed)s, failed = %(failed)s,
        output_file_id = %(output_file_id)s, error_file_id = %(error_file_id)s,
        usage = %(usage)s, receipt = %(receipt)s
    WHERE id = %(id)s
"""
_COUNTED = """
    UPDATE batches SET
        completed = greatest(completed, %(completed)s),
        failed = greatest(failed, least(%(failed)s, requests - greatest(completed, %(completed)s)))
    WHERE id = %(id)s
"""

_COLUMNS = """
    SELECT b.id, b.account_id, b.key_id, b.status, b.created_at, b.in_progress_at,
           b.finalizing_at, b.completed_at, b.failed_at, b.expired_at, b.cancelling_at,
           b.cancelled_at, b.expires_at, b.input_file_id, b.input_key, b.endpoint,
           b.completion_window, b.output_expires_seconds, b.price_version, b.base,
           b.base_revision, b.requests, b.completed, b.failed, b.quote, b.ending,
           b.waiting_for, b.output_file_id, b.error_file_id, b.errors, b.usage, b.receipt,
           t.metadata
    FROM batches b LEFT JOIN work_texts t ON t.work_id = b.id
"""
_GET = _COLUMNS + "WHERE b.id = %(id)s AND b.account_id = %(account_id)s"
_LIST = (
    _COLUMNS
    + """
    WHERE b.account_id = %(account_id)s AND b.position > %(above)s AND b.position < %(below)s
    ORDER BY b.position DESC LIMIT %(limit)s
"""
)
_POSITION = "SELECT position FROM batches WHERE id = %(after)s AND account_id = %(account_id)s"


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One batch. `requests` is null until it is validated; `usage` and both file ids until it has
    ended; `base`, `base_revision` and `quote` until it is validated."""

    id: str
    account_id: str
    key_id: str
    status: BatchStatus
    created_at: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None
    expires_at: datetime
    input_file_id: str
    input_key: str
    endpoint: Endpoint
    completion_window: CompletionWindow
    output_expires_seconds: int | None
    price_version: int
    base: str | None
    base_revision: str | None
    requests: int | None
    completed: int
    failed: int
    quote: BatchQuote | None
    ending: Ending | None
    waiting_for: str | None
    output_file_id: str | None
    error_file_id: str | None
    errors: tuple[LineError, ...]
    usage: tuple[TokenUsage, ...] | None
    receipt: Receipt | None
    metadata: dict[str, str] | None

    @property
    def maximum_nano_usd(self) -> int | None:
        """The most that it can cost."""
        return self.quote.maximum_nano_usd if self.quote is not None else None

    @property
    def total(self) -> int:
        """Request lines: zero until the batch has left validation, and if it failed there."""
        return 0 if self.status in ("validating", "failed") else self.requests or 0


def get(connection: Connection, *, account_id: str, batch_id: str) -> BatchRow | None:
    """The batch, or None if the account has none of that id."""
    row = connection.execute(_GET, {"id": batch_id, "account_id": account_id}).fetchone()
    return _row(row) if row is not None else None


def list_page(
    connection: Connection, *, account_id: str, limit: int, after: str | None = None
) -> Page[BatchRow]:
    """A page of the account's batches, newest first. Raises InvalidRequest for `after`."""
    scope = {"account_id": account_id}
    between = bounds(connection, select_position=_POSITION, scope=scope, after=after)
    rows = connection.execute(_LIST, {**scope, "limit": limit + 1, **between}).fetchall()
    return page([_row(row) for row in rows], limit=limit)


def _row(row: dict[str, Any]) -> BatchRow:
    usage, quote, receipt = row["usage"], row["quote"], row["receipt"]
    return BatchRow(
        **{
            **row,
            "errors": tuple(LineError.model_validate(each) for each in row["errors"] or ()),
            "usage": (
                tuple(TokenUsage.model_validate(each) for each in usage)
                if usage is not None
                else None
            ),
            "quote": BatchQuote.model_validate(quote) if quote is not None else None,
            "receipt": Receipt.model_validate(receipt) if receipt is not None else None,
        }
    )


def _jsonb(value: Any) -> Jsonb | None:
    return Jsonb(value.model_dump(mode="json")) if value is not None else None


def _created(event: Any, position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "account_id": event.account_id,
        "key_id": event.key_id,
        "position": position,
        "at": event.envelope.at,
        "expires_at": event.expires_at,
        "input_file_id": event.input_file_id,
        "input_key": event.input.key,
        "endpoint": event.endpoint,
        "completion_window": event.completion_window,
        "output_expires_seconds": event.output_expires_seconds,
        "price_version": event.price_version,
    }
    return [(_CREATED, parameters)]


def _validated(event: Any, _position: int) -> list[Statement]:
    plan = event.plan
    batch = {
        "id": event.originator_id,
        "base": plan.quote.base,
        "base_revision": plan.base_revision,
        "requests": plan.quote.requests,
        "quote": _jsonb(plan.quote),
    }
    return [(_VALIDATED, batch)]


def _waiting(event: Any, _position: int) -> list[Statement]:
    return [(_WAITING, {"id": event.originator_id, "waiting_for": event.waiting_for})]


def _started(event: Any, _position: int) -> list[Statement]:
    return [(_STARTED, {"id": event.originator_id, "at": event.envelope.at})]


def _failed(event: Any, _position: int) -> list[Statement]:
    errors = Jsonb([each.model_dump(mode="json") for each in event.errors])
    return [(_FAILED, {"id": event.originator_id, "at": event.envelope.at, "errors": errors})]


def _counted(event: Any, _position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "completed": event.counted.completed,
        "failed": event.counted.failed,
    }
    return [(_COUNTED, parameters)]


def _cancel_requested(event: Any, _position: int) -> list[Statement]:
    return [(_CANCEL_REQUESTED, {"id": event.originator_id, "at": event.envelope.at})]


def _window_ended(event: Any, _position: int) -> list[Statement]:
    return [(_WINDOW_ENDED, {"id": event.originator_id})]


def _finalizing(event: Any, _position: int) -> list[Statement]:
    return [(_FINALIZING, {"id": event.originator_id, "at": event.envelope.at})]


def _finished(event: Any, _position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "at": event.envelope.at,
        "ending": event.ending,
        "completed": event.completed,
        "failed": event.failed,
        "output_file_id": event.output_file_id,
        "error_file_id": event.error_file_id,
        "usage": Jsonb([used.model_dump(mode="json") for used in event.usage]),
        "receipt": _jsonb(event.receipt),
    }
    return [(_FINISHED, parameters)]


BATCHES = ReadModel(
    name="batches",
    tables=("batches",),
    handlers={
        "gridline.batch.created": _created,
        "gridline.batch.validated": _validated,
        "gridline.batch.waiting": _waiting,
        "gridline.batch.started": _started,
        "gridline.batch.failed": _failed,
        "gridline.batch.progressed": _counted,
        "gridline.batch.chunk_finished": _counted,
        "gridline.batch.cancel_requested": _cancel_requested,
        "gridline.batch.window_ended": _window_ended,
        "gridline.batch.finalizing": _finalizing,
        "gridline.batch.finished": _finished,
    },
)
