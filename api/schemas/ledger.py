"""Credits, receipts and statements. Amounts are exact decimal strings of USD."""

from __future__ import annotations

from typing import Any

from api.schemas.quotes import quote_object
from api.schemas.times import seconds, seconds_or_none
from domain.ledger.money import usd_text
from domain.ledger.receipt import Receipt
from projections.money.accounts import AccountRow
from projections.money.holds import HoldRow
from projections.money.receipts import ReceiptRow
from projections.money.statements import Statement, StatementLine


def credits_object(
    row: AccountRow,
    open_holds: tuple[HoldRow, ...],
    *,
    stored_bytes: int,
    stored_bytes_max: int,
) -> dict[str, Any]:
    """What the account has, what its open work holds, and what it has open."""
    return {
        "object": "gridline.credits",
        "currency": "usd",
        "available_usd": usd_text(row.available_nano_usd),
        "held_usd": usd_text(row.held_nano_usd),
        "granted_usd": usd_text(row.granted_nano_usd),
        "charged_usd": usd_text(row.charged_nano_usd),
        "holds": [hold_object(hold) for hold in open_holds],
        "open_fine_tunes": {"open": row.open_fine_tunes, "limit": row.open_fine_tunes_max},
        "open_batches": {"open": row.open_batches, "limit": row.open_batches_max},
        "models": row.models,
        "uploads": {"bytes": stored_bytes, "limit": stored_bytes_max},
    }


def hold_object(row: HoldRow) -> dict[str, Any]:
    """One hold, open or ended."""
    return {
        "work_id": row.work_id,
        "state": row.state,
        "placed_at": seconds(row.placed_at),
        "expires_at": seconds(row.expires_at),
        "ended_at": seconds_or_none(row.ended_at),
        "spend_day": row.spend_day.isoformat(),
        "maximum_usd": usd_text(row.maximum_nano_usd),
        "captured_usd": usd_text(row.captured_nano_usd),
        "returned_usd": usd_text(row.returned_nano_usd),
    }


def receipt_object(row: ReceiptRow, *, statement_position: int | None) -> dict[str, Any]:
    """All that explains the charge of a job or batch, or that there is none. `statement_position`
    is that of its newest line in the statement, null until the journal has one."""
    maximum = row.maximum_nano_usd
    return {
        "object": "gridline.receipt",
        "id": row.work_id,
        "kind": row.kind,
        "status": row.status,
        "api_key_id": row.key_id,
        "currency": "usd",
        "created_at": seconds(row.created_at),
        "ended_at": seconds_or_none(row.ended_at),
        "price_version": row.price_version,
        "statement_position": statement_position,
        "max_charge_usd": usd_text(maximum) if maximum is not None else None,
        "quote": quote_object(row.quote) if row.quote is not None else None,
        "hold": hold_object(row.hold) if row.hold is not None else None,
        "charge_usd": usd_text(row.receipt.charge_nano_usd if row.receipt else 0),
        "charge": _charge(row.receipt) if row.receipt is not None else None,
    }


def _charge(receipt: Receipt) -> dict[str, Any]:
    return {
        "lines": [
            {
                "what": line.what,
                "model": line.model,
                "tokens": line.tokens,
                "usd_per_mtok": usd_text(line.rate_nano_usd_per_mtok),
            }
            for line in receipt.lines
        ],
        "minimum_usd": usd_text(receipt.minimum_nano_usd),
        "minimum_applies": receipt.minimum_applies,
        "decided_by": receipt.decided_by,
        "ended": receipt.ended,
        "code": receipt.code,
        "side": receipt.side,
        "charge_usd": usd_text(receipt.charge_nano_usd),
        "returned_usd": usd_text(receipt.returned_nano_usd),
        "base": receipt.base,
        "base_revision": receipt.base_revision,
        "input_sha256": list(receipt.input_sha256),
    }


def statement_object(statement: Statement, *, is_current: bool) -> dict[str, Any]:
    """A statement; `through` is what the next one is asked `after`. `is_current` says whether the
    journal has reached the newest movement of the account's credit."""
    return {
        "object": "gridline.statement",
        "currency": "usd",
        "after": statement.after,
        "through": statement.through,
        "is_current": is_current,
        "has_more": statement.has_more,
        "opening": _balances(statement.opening_available_nano_usd, statement.opening_held_nano_usd),
        "data": [_line(line) for line in statement.lines],
        "closing": _balances(statement.closing_available_nano_usd, statement.closing_held_nano_usd),
    }


def _balances(available_nano_usd: int, held_nano_usd: int) -> dict[str, str]:
    return {"available_usd": usd_text(available_nano_usd), "held_usd": usd_text(held_nano_usd)}


def _line(line: StatementLine) -> dict[str, Any]:
    return {
        "position": line.position,
        "at": seconds(line.at),
        "kind": line.kind,
        "work_id": line.work_id,
        "grant_id": line.grant_id,
        "note": line.note,
        "available_change_usd": usd_text(line.available_change_nano_usd),
        "held_change_usd": usd_text(line.held_change_nano_usd),
        "charged_usd": usd_text(line.charged_nano_usd),
        **_balances(line.available_nano_usd, line.held_nano_usd),
    }
