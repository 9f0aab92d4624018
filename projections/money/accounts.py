"""Accounts: credit, limits and open work, as GET /gridline/credits and the operator's CLI show
them. Money is never decided from these rows. The e-mail is personal and joined from
`account_people`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from projections.projection import Statement
from projections.read_model import Connection, ReadModel

_OPENED = """
    INSERT INTO accounts (id, position, changed_position, created_at, open_fine_tunes_max,
        open_batches_max)
    VALUES (%(id)s, %(position)s, %(position)s, %(at)s, %(fine_tunes)s, %(batches)s)
"""
_LIMITS_SET = """
    UPDATE accounts SET changed_position = %(position)s, open_fine_tunes_max = %(fine_tunes)s,
        open_batches_max = %(batches)s
    WHERE id = %(id)s
"""
_MOVED = """
    UPDATE accounts SET changed_position = %(position)s,
        available_nano_usd = available_nano_usd + %(available)s,
        held_nano_usd = held_nano_usd + %(held)s,
        granted_nano_usd = granted_nano_usd + %(granted)s,
        charged_nano_usd = charged_nano_usd + %(charged)s
    WHERE id = %(id)s
"""
_COUNTED = """
    UPDATE accounts SET changed_position = %(position)s,
        open_fine_tunes = open_fine_tunes + %(fine_tunes)s,
        open_batches = open_batches + %(batches)s, models = models + %(models)s
    WHERE id = %(id)s
"""
_TRAINING = """
    UPDATE accounts SET changed_position = %(position)s, training_job_id = %(job_id)s
    WHERE id = %(id)s
"""

_COLUMNS = """
    SELECT a.id, p.email, a.created_at, a.available_nano_usd, a.held_nano_usd,
           a.granted_nano_usd, a.charged_nano_usd, a.open_fine_tunes, a.open_fine_tunes_max,
           a.open_batches, a.open_batches_max, a.models, a.training_job_id, a.changed_position
    FROM accounts a LEFT JOIN account_people p ON p.account_id = a.id
"""
_GET = _COLUMNS + "WHERE a.id = %(id)s"


@dataclass(frozen=True, slots=True)
class AccountRow:
    """One account; amounts in nano-USD. `changed_position` is the log position of the last event
    of its stream: whatever waits for the account need not look again before it grows."""

    id: str
    email: str | None
    created_at: datetime
    available_nano_usd: int
    held_nano_usd: int
    granted_nano_usd: int
    charged_nano_usd: int
    open_fine_tunes: int
    open_fine_tunes_max: int
    open_batches: int
    open_batches_max: int
    models: int
    training_job_id: str | None
    changed_position: int


def get(connection: Connection, account_id: str) -> AccountRow | None:
    """The account, or None."""
    row = connection.execute(_GET, {"id": account_id}).fetchone()
    return AccountRow(**row) if row is not None else None


def _moved(
    event: Any,
    position: int,
    *,
    available: int = 0,
    held: int = 0,
    granted: int = 0,
    charged: int = 0,
) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "position": position,
        "available": available,
        "held": held,
        "granted": granted,
        "charged": charged,
    }
    return [(_MOVED, parameters)]


def _counted(
    event: Any, position: int, *, fine_tunes: int = 0, batches: int = 0, models: int = 0
) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "position": position,
        "fine_tunes": fine_tunes,
        "batches": batches,
        "models": models,
    }
    return [(_COUNTED, parameters)]


def _opened(event: Any, position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "position": position,
        "at": event.envelope.at,
        "fine_tunes": event.limits.open_fine_tunes,
        "batches": event.limits.open_batches,
    }
    return [(_OPENED, parameters)]


def _limits_set(event: Any, position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "position": position,
        "fine_tunes": event.limits.open_fine_tunes,
        "batches": event.limits.open_batches,
    }
    return [(_LIMITS_SET, parameters)]


def _credit_granted(event: Any, position: int) -> list[Statement]:
    amount = event.amount_nano_usd
    return _moved(event, position, available=amount, granted=amount)


def _credit_reserved(event: Any, position: int) -> list[Statement]:
    amount = event.amount_nano_usd
    return _moved(event, position, available=-amount, held=amount)


def _credit_captured(event: Any, position: int) -> list[Statement]:
    charge, returned = event.charge_nano_usd, event.returned_nano_usd
    return _moved(event, position, available=returned, held=-charge - returned, charged=charge)


def _credit_released(event: Any, position: int) -> list[Statement]:
    returned = event.returned_nano_usd
    return _moved(event, position, available=returned, held=-returned)


def _fine_tune_slot_taken(event: Any, position: int) -> list[Statement]:
    return _counted(event, position, fine_tunes=1)


def _fine_tune_slot_freed(event: Any, position: int) -> list[Statement]:
    return _counted(event, position, fine_tunes=-1, models=int(event.model_registered))


def _model_slot_freed(event: Any, position: int) -> list[Statement]:
    return _counted(event, position, models=-1)


def _batch_slot_taken(event: Any, position: int) -> list[Statement]:
    return _counted(event, position, batches=1)


def _batch_slot_freed(event: Any, position: int) -> list[Statement]:
    return _counted(event, position, batches=-1)


def _training_slot_taken(event: Any, position: int) -> list[Statement]:
    return [(_TRAINING, {"id": event.originator_id, "position": position, "job_id": event.job_id})]


def _training_slot_freed(event: Any, position: int) -> list[Statement]:
    return [(_TRAINING, {"id": event.originator_id, "position": position, "job_id": None})]


ACCOUNTS = ReadModel(
    name="accounts",
    tables=("accounts",),
    handlers={
        "gridline.account.opened": _opened,
        "gridline.account.limits_set": _limits_set,
        "gridline.account.credit_granted": _credit_granted,
        "gridline.account.credit_reserved": _credit_reserved,
        "gridline.account.credit_captured": _credit_captured,
        "gridline.account.credit_released": _credit_released,
        "gridline.account.fine_tune_slot_taken": _fine_tune_slot_taken,
        "gridline.account.fine_tune_slot_freed": _fine_tune_slot_freed,
        "gridline.account.model_slot_freed": _model_slot_freed,
        "gridline.account.batch_slot_taken": _batch_slot_taken,
        "gridline.account.batch_slot_freed": _batch_slot_freed,
        "gridline.account.training_slot_taken": _training_slot_taken,
        "gridline.account.training_slot_freed": _training_slot_freed,
    },
)
