"""Files as the API shows them. A deleted one keeps its row: its place in lists, and the time of its
deletion for a repeated DELETE. Names are personal and joined from `file_names`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from domain.assets.file import Purpose
from domain.inputs.training_file import TrainingFacts
from projections.paging import Order, Page, bounds, page
from projections.projection import Statement
from projections.read_model import Connection, ReadModel

_STORED = """
    INSERT INTO files
        (id, account_id, position, purpose, bytes, sha256, object_key, created_at, expires_at,
         training)
    VALUES
        (%(id)s, %(account_id)s, %(position)s, %(purpose)s, %(bytes)s, %(sha256)s,
         %(object_key)s, %(at)s, %(expires_at)s, %(training)s)
"""
_PINNED = "UPDATE files SET pins = pins + %(by)s WHERE id = %(id)s"
_DELETED = "UPDATE files SET deleted_at = %(at)s WHERE id = %(id)s"

_COLUMNS = """
    SELECT f.id, f.account_id, f.purpose, f.bytes, f.sha256, f.object_key, f.created_at,
           f.expires_at, f.training, coalesce(n.filename, '') AS filename
    FROM files f LEFT JOIN file_names n ON n.file_id = f.id
"""
_GET = (
    _COLUMNS
    + """
    WHERE f.id = %(id)s AND f.account_id = %(account_id)s AND f.deleted_at IS NULL
"""
)
_LIST = (
    _COLUMNS
    + """
    WHERE f.account_id = %(account_id)s AND f.deleted_at IS NULL
      AND f.position > %(above)s AND f.position < %(below)s
      AND (%(purpose)s::text IS NULL OR f.purpose = %(purpose)s)
"""
)
_LIST_ORDERED: dict[Order, str] = {
    "desc": _LIST + "ORDER BY f.position DESC LIMIT %(limit)s",
    "asc": _LIST + "ORDER BY f.position LIMIT %(limit)s",
}
_POSITION = "SELECT position FROM files WHERE id = %(after)s AND account_id = %(account_id)s"
_TOMBSTONE = """
    SELECT deleted_at FROM files
    WHERE id = %(id)s AND account_id = %(account_id)s AND deleted_at IS NOT NULL
"""
_UPLOADED = """
    SELECT
        (SELECT coalesce(sum(bytes), 0)::bigint FROM files
         WHERE account_id = %(account_id)s AND purpose IN ('fine-tune', 'batch')
           AND deleted_at IS NULL) AS stored_bytes,
        count(*) AS recent, min(created_at) AS oldest_recent_at
    FROM files
    WHERE account_id = %(account_id)s AND purpose IN ('fine-tune', 'batch')
      AND created_at > %(since)s
"""
_EXPIRED = """
    SELECT id FROM files WHERE expires_at <= %(now)s AND deleted_at IS NULL AND pins = 0
    ORDER BY expires_at LIMIT %(limit)s
"""


@dataclass(frozen=True, slots=True)
class FileRow:
    """One file. `filename` is empty once its name was erased; `training` is null but for fine-tune
    files."""

    id: str
    account_id: str
    purpose: Purpose
    bytes: int
    sha256: str
    object_key: str
    created_at: datetime
    expires_at: datetime | None
    training: TrainingFacts | None
    filename: str


def get(connection: Connection, *, account_id: str, file_id: str) -> FileRow | None:
    """The file, or None if the account has none of that id."""
    row = connection.execute(_GET, {"id": file_id, "account_id": account_id}).fetchone()
    return _row(row) if row is not None else None


def list_page(
    connection: Connection,
    *,
    account_id: str,
    limit: int,
    after: str | None = None,
    order: Order = "desc",
    purpose: str | None = None,
) -> Page[FileRow]:
    """A page of the account's files. Raises InvalidRequest for `after`."""
    between = bounds(
        connection,
        select_position=_POSITION,
        scope={"account_id": account_id},
        after=after,
        order=order,
    )
    rows = connection.execute(
        _LIST_ORDERED[order],
        {"account_id": account_id, "purpose": purpose, "limit": limit + 1, **between},
    ).fetchall()
    return page([_row(row) for row in rows], limit=limit)


def deleted_at(connection: Connection, *, account_id: str, file_id: str) -> datetime | None:
    """When the account's file of that id was deleted or expired; None if it was not."""
    row = connection.execute(_TOMBSTONE, {"id": file_id, "account_id": account_id}).fetchone()
    return row["deleted_at"] if row is not None else None


@dataclass(frozen=True, slots=True)
class Uploaded:
    """What an account has uploaded: bytes that are kept, and how many files lately."""

    stored_bytes: int
    recent: int
    oldest_recent_at: datetime | None


def uploaded(connection: Connection, *, account_id: str, since: datetime) -> Uploaded:
    """The account's uploads; `recent` are those after `since`, deleted ones too."""
    row = connection.execute(_UPLOADED, {"account_id": account_id, "since": since}).fetchone()
    assert row is not None
    return Uploaded(**row)


def expired(connection: Connection, *, now: datetime, limit: int) -> list[str]:
    """Ids of files whose time is over and that no open work uses."""
    rows = connection.execute(_EXPIRED, {"now": now, "limit": limit}).fetchall()
    return [row["id"] for row in rows]


def _row(row: dict[str, Any]) -> FileRow:
    training = row["training"]
    facts = TrainingFacts.model_validate(training) if training is not None else None
    return FileRow(**{**row, "training": facts})


def _stored(event: Any, position: int) -> list[Statement]:
    training = event.training
    parameters = {
        "id": event.originator_id,
        "account_id": event.account_id,
        "position": position,
        "purpose": event.purpose,
        "bytes": event.object.bytes,
        "sha256": event.object.sha256,
        "object_key": event.object.key,
        "at": event.envelope.at,
        "expires_at": event.expires_at,
        "training": Jsonb(training.model_dump(mode="json")) if training is not None else None,
    }
    return [(_STORED, parameters)]


def _pinned(event: Any, _position: int) -> list[Statement]:
    return [(_PINNED, {"id": event.originator_id, "by": 1})]


def _unpinned(event: Any, _position: int) -> list[Statement]:
    return [(_PINNED, {"id": event.originator_id, "by": -1})]


def _deleted(event: Any, _position: int) -> list[Statement]:
    return [(_DELETED, {"id": event.originator_id, "at": event.envelope.at})]


FILES = ReadModel(
    name="files",
    tables=("files",),
    handlers={
        "gridline.file.stored": _stored,
        "gridline.file.pinned": _pinned,
        "gridline.file.unpinned": _unpinned,
        "gridline.file.deleted": _deleted,
    },
)
