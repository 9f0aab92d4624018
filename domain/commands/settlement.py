"""Placing and ending a credit hold: the hold, the account and the key's spend, always together."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from domain.ids import hold_id
from domain.ledger.account import Account
from domain.ledger.credit_hold import CreditHold
from domain.ledger.key_spend import KeySpend
from domain.log.unit_of_work import UnitOfWork

Funding = Literal["held", "wait", "refuse"]


@dataclass(frozen=True, slots=True)
class HoldTerms:
    """What a job or batch needs held to start: the larger of its minimum and its worst case."""

    work_id: str
    account_id: str
    key_id: str
    maximum_nano_usd: int
    price_version: int
    expires_at: datetime


def place_hold(uow: UnitOfWork, terms: HoldTerms) -> Funding:
    """Holds the credit if it is free; else says whether to wait for what the account's own open
    holds may give back, or that it will not suffice."""
    account = uow.get(Account, terms.account_id)
    if not account.can_fund(terms.maximum_nano_usd):
        return "wait" if account.may_fund_later(terms.maximum_nano_usd) else "refuse"
    key = uow.get(KeySpend, terms.key_id)
    uow.add(
        CreditHold(
            id=hold_id(terms.work_id),
            envelope=uow.envelope,
            account_id=terms.account_id,
            key_id=terms.key_id,
            work_id=terms.work_id,
            maximum_nano_usd=terms.maximum_nano_usd,
            price_version=terms.price_version,
            spend_day=uow.now.date(),
            expires_at=terms.expires_at,
        )
    )
    account.reserve(terms.work_id, terms.maximum_nano_usd, envelope=uow.envelope)
    key.reserve(terms.work_id, terms.maximum_nano_usd, envelope=uow.envelope)
    return "held"


def capture_hold(uow: UnitOfWork, work_id: str, charge_nano_usd: int) -> None:
    """Ends the hold with a charge; the rest goes back."""
    hold = uow.get(CreditHold, hold_id(work_id))
    hold.capture(charge_nano_usd, envelope=uow.envelope)
    uow.get(Account, hold.account_id).capture(work_id, charge_nano_usd, envelope=uow.envelope)
    uow.get(KeySpend, hold.key_id).charge(work_id, charge_nano_usd, envelope=uow.envelope)


def release_hold(uow: UnitOfWork, work_id: str) -> None:
    """Ends the hold without a charge; work that never started has none."""
    hold = uow.find(CreditHold, hold_id(work_id))
    if hold is None or not hold.is_open:
        return
    if uow.now >= hold.expires_at:
        hold.expire(envelope=uow.envelope)
    else:
        hold.release(envelope=uow.envelope)
    uow.get(Account, hold.account_id).release(work_id, envelope=uow.envelope)
    uow.get(KeySpend, hold.key_id).release(work_id, envelope=uow.envelope)
