"""API keys: who a bearer is, each key's limits and its spend by UTC day. Limits are never decided
from these rows. The text's hash, prefix and name are personal, in `api_key_secrets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from projections.projection import Statement
from projections.read_model import Connection, ReadModel

_REGISTERED = """
    INSERT INTO api_keys (id, account_id, position, created_at)
    VALUES (%(id)s, %(account_id)s, %(position)s, %(at)s)
"""
_LIMITS_SET = """
    UPDATE api_keys SET daily_limit_nano_usd = %(daily)s, total_limit_nano_usd = %(total)s
    WHERE id = %(id)s
"""
_REVOKED = "UPDATE api_keys SET revoked_at = %(at)s WHERE id = %(id)s"
_SPENT = """
    INSERT INTO api_key_days AS d (key_id, day, charged_nano_usd, held_nano_usd)
    VALUES (%(id)s, %(day)s, %(charged)s, %(held)s)
    ON CONFLICT (key_id, day) DO UPDATE SET
        charged_nano_usd = d.charged_nano_usd + excluded.charged_nano_usd,
        held_nano_usd = d.held_nano_usd + excluded.held_nano_usd
"""

_COLUMNS = """
    SELECT k.id, k.account_id, k.created_at, k.revoked_at, k.daily_limit_nano_usd,
           k.total_limit_nano_usd, s.prefix, s.name,
           coalesce((SELECT sum(d.charged_nano_usd + d.held_nano_usd)::bigint
                     FROM api_key_days d WHERE d.key_id = k.id), 0) AS total_nano_usd,
           coalesce((SELECT d.charged_nano_usd + d.held_nano_usd
                     FROM api_key_days d WHERE d.key_id = k.id AND d.day = %(day)s), 0)
               AS day_nano_usd
    FROM api_keys k LEFT JOIN api_key_secrets s ON s.key_id = k.id
"""
_LIST = _COLUMNS + "WHERE k.account_id = %(account_id)s ORDER BY k.position"
_AUTHENTICATE = """
    SELECT k.id AS key_id, k.account_id
    FROM api_key_secrets s JOIN api_keys k ON k.id = s.key_id
    WHERE s.secret_sha256 = %(secret_sha256)s AND k.revoked_at IS NULL
"""


@dataclass(frozen=True, slots=True)
class Bearer:
    """Whose a request is."""

    key_id: str
    account_id: str


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key; spends are charged plus held, in nano-USD. `prefix` and `name` are null once it is
    revoked, since nothing is kept of its text."""

    id: str
    account_id: str
    created_at: datetime
    revoked_at: datetime | None
    daily_limit_nano_usd: int | None
    total_limit_nano_usd: int | None
    prefix: str | None
    name: str | None
    total_nano_usd: int
    day_nano_usd: int


def authenticate(connection: Connection, secret_sha256: str) -> Bearer | None:
    """Whose key has that SHA-256 (hex), or None for an unknown or revoked one."""
    row = connection.execute(_AUTHENTICATE, {"secret_sha256": secret_sha256}).fetchone()
    return Bearer(**row) if row is not None else None


def list_all(connection: Connection, *, account_id: str, day: date) -> tuple[KeyRow, ...]:
    """The account's keys, oldest first, revoked ones included."""
    rows = connection.execute(_LIST, {"account_id": account_id, "day": day}).fetchall()
    return tuple(KeyRow(**row) for row in rows)


def _registered(event: Any, position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "account_id": event.account_id,
        "position": position,
        "at": event.envelope.at,
    }
    return [(_REGISTERED, parameters)]


def _limits_set(event: Any, _position: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "daily": event.limits.daily_nano_usd,
        "total": event.limits.total_nano_usd,
    }
    return [(_LIMITS_SET, parameters)]


def _revoked(event: Any, _position: int) -> list[Statement]:
    return [(_REVOKED, {"id": event.originator_id, "at": event.envelope.at})]


def _spent(event: Any, *, charged: int, held: int) -> list[Statement]:
    parameters = {
        "id": event.originator_id,
        "day": event.day,
        "charged": charged,
        "held": held,
    }
    return [(_SPENT, parameters)]


def _spend_reserved(event: Any, _position: int) -> list[Statement]:
    return _spent(event, charged=0, held=event.amount_nano_usd)


def _spend_charged(event: Any, _position: int) -> list[Statement]:
    charge = event.charge_nano_usd
    return _spent(event, charged=charge, held=-charge - event.returned_nano_usd)


def _spend_released(event: Any, _position: int) -> list[Statement]:
    return _spent(event, charged=0, held=-event.returned_nano_usd)


KEYS = ReadModel(
    name="keys",
    tables=("api_keys", "api_key_days"),
    handlers={
        "gridline.key_spend.registered": _registered,
        "gridline.key_spend.limits_set": _limits_set,
        "gridline.key_spend.revoked": _revoked,
        "gridline.key_spend.spend_reserved": _spend_reserved,
        "gridline.key_spend.spend_charged": _spend_charged,
        "gridline.key_spend.spend_released": _spend_released,
    },
)
