"""Fine-tuned models as the API lists them. A deleted one keeps its row, for a repeated DELETE."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from domain.log.stored import StoredObject
from projections.projection import Statement
from projections.read_model import Connection, ReadModel

_REGISTERED = """
    INSERT INTO models
        (id, account_id, position, job_id, base, base_revision, created_at, rank, servable,
         config, weights)
    VALUES
        (%(id)s, %(account_id)s, %(position)s, %(job_id)s, %(base)s, %(base_revision)s, %(at)s,
         %(rank)s, %(servable)s, %(config)s, %(weights)s)
"""
_DELETED = "UPDATE models SET deleted_at = %(at)s WHERE id = %(id)s"

_COLUMNS = """
    SELECT id, account_id, job_id, base, base_revision, created_at, rank, servable, config, weights
    FROM models
"""
_GET = _COLUMNS + "WHERE id = %(id)s AND account_id = %(account_id)s AND deleted_at IS NULL"
_LIST = (
    _COLUMNS
    + """
    WHERE account_id = %(account_id)s AND deleted_at IS NULL ORDER BY position DESC
"""
)
_TOMBSTONE = """
    SELECT deleted_at FROM models
    WHERE id = %(id)s AND account_id = %(account_id)s AND deleted_at IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One registered adapter; `servable` is false where its base's fine-tunes are download-only."""

    id: str
    account_id: str
    job_id: str
    base: str
    base_revision: str
    created_at: datetime
    rank: int
    servable: bool
    config: StoredObject
    weights: StoredObject


def get(connection: Connection, *, account_id: str, model: str) -> ModelRow | None:
    """The model, or None if the account has none of that name."""
    row = connection.execute(_GET, {"id": model, "account_id": account_id}).fetchone()
    return _row(row) if row is not None else None


def list_all(connection: Connection, *, account_id: str) -> tuple[ModelRow, ...]:
    """All of the account's models, newest first: there are at most a hundred."""
    rows = connection.execute(_LIST, {"account_id": account_id}).fetchall()
    return tuple(_row(row) for row in rows)


def servable_bases(connection: Connection, *, account_id: str) -> dict[str, str]:
    """The base of each of the account's models that batches can be run on."""
    return {row.id: row.base for row in list_all(connection, account_id=account_id) if row.servable}


def deleted_at(connection: Connection, *, account_id: str, model: str) -> datetime | None:
    """When the account's model of that name was deleted; None if it was not."""
    row = connection.execute(_TOMBSTONE, {"id": model, "account_id": account_id}).fetchone()
    return row["deleted_at"] if row is not None else None


def _row(row: dict[str, Any]) -> ModelRow:
    return ModelRow(
        **{
            **row,
            "config": StoredObject.model_validate(row["config"]),
            "weights": StoredObject.model_validate(row["weights"]),
        }
    )


def _registered(event: Any, position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "account_id": event.account_id,
        "position": position,
        "job_id": event.job_id,
        "base": event.base,
        "base_revision": event.base_revision,
        "at": event.envelope.at,
        "rank": event.rank,
        "servable": event.servable,
        "config": Jsonb(event.config.model_dump(mode="json")),
        "weights": Jsonb(event.weights.model_dump(mode="json")),
    }
    return [(_REGISTERED, parameters)]


def _deleted(event: Any, _position: int) -> list[Statement]:
    return [(_DELETED, {"id": event.originator_id, "at": event.envelope.at})]


MODELS = ReadModel(
    name="models",
    tables=("models",),
    handlers={
        "gridline.fine_tuned_model.registered": _registered,
        "gridline.fine_tuned_model.deleted": _deleted,
    },
)
