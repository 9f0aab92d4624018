"""Credit holds, so that customers see what their open work holds and receipts can show how a hold
ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from domain.ledger.credit_hold import HoldState
from projections.projection import Statement
from projections.read_model import Connection, ReadModel

_PLACED = """
    INSERT INTO holds
        (id, work_id, account_id, key_id, position, placed_at, expires_at, spend_day,
         price_version, maximum_nano_usd, state)
    VALUES
        (%(id)s, %(work_id)s, %(account_id)s, %(key_id)s, %(position)s, %(at)s, %(expires_at)s,
         %(spend_day)s, %(price_version)s, %(maximum)s, 'placed')
"""
_ENDED = """
    UPDATE holds SET state = %(state)s, ended_at = %(at)s, captured_nano_usd = %(captured)s,
        returned_nano_usd = %(returned)s
    WHERE id = %(id)s
"""

_COLUMNS = """
    SELECT id, work_id, account_id, key_id, placed_at, expires_at, ended_at, spend_day,
           price_version, maximum_nano_usd, captured_nano_usd, returned_nano_usd, state
    FROM holds
"""
_OF_WORK = _COLUMNS + "WHERE work_id = %(work_id)s AND account_id = %(account_id)s"
_OPEN = (
    _COLUMNS
    + """
    WHERE account_id = %(account_id)s AND state = 'placed' ORDER BY position
"""
)


@dataclass(frozen=True, slots=True)
class HoldRow:
    """One hold; amounts in nano-USD, zero captured and returned while it is open."""

    id: str
    work_id: str
    account_id: str
    key_id: str
    placed_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    spend_day: date
    price_version: int
    maximum_nano_usd: int
    captured_nano_usd: int
    returned_nano_usd: int
    state: HoldState


def of_work(connection: Connection, *, account_id: str, work_id: str) -> HoldRow | None:
    """The hold of a job or batch; None if it never started."""
    row = connection.execute(_OF_WORK, {"work_id": work_id, "account_id": account_id}).fetchone()
    return HoldRow(**row) if row is not None else None


def open_of(connection: Connection, *, account_id: str) -> tuple[HoldRow, ...]:
    """The account's open holds, oldest first."""
    rows = connection.execute(_OPEN, {"account_id": account_id}).fetchall()
    return tuple(HoldRow(**row) for row in rows)


def _placed(event: Any, position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "work_id": event.work_id,
        "account_id": event.account_id,
        "key_id": event.key_id,
        "position": position,
        "at": event.envelope.at,
        "expires_at": event.expires_at,
        "spend_day": event.spend_day,
        "price_version": event.price_version,
        "maximum": event.maximum_nano_usd,
    }
    return [(_PLACED, parameters)]


def _ended(event: Any, state: HoldState, *, captured: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "state": state,
        "at": event.envelope.at,
        "captured": captured,
        "returned": event.returned_nano_usd,
    }
    return [(_ENDED, parameters)]


def _captured(event: Any, _position: int) -> list[Statement]:
    return _ended(event, "captured", captured=event.charge_nano_usd)


def _released(event: Any, _position: int) -> list[Statement]:
    return _ended(event, "released", captured=0)


def _expired(event: Any, _position: int) -> list[Statement]:
    return _ended(event, "expired", captured=0)


HOLDS = ReadModel(
    name="holds",
    tables=("holds",),
    handlers={
        "gridline.credit_hold.placed": _placed,
        "gridline.credit_hold.captured": _captured,
        "gridline.credit_hold.released": _released,
        "gridline.credit_hold.expired": _expired,
    },
)
