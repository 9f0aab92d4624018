"""Accounts, their credit and their limits: the operator's commands."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from domain import ids
from domain.commands.keys import KeySecret, RegisterKey, register_key
from domain.errors import InvalidRequest
from domain.ledger.account import Account, AccountLimits
from domain.limits import GRANT_NOTE_CHARACTERS_MAX
from domain.log.idempotent_request import IdempotentRequest
from domain.log.unit_of_work import PersonalRow, UnitOfWork


@dataclass(frozen=True, slots=True)
class OpenAccount:
    """A new account with its first key and granted credit."""

    email: str
    limits: AccountLimits
    credit_nano_usd: int
    secret: KeySecret


@dataclass(frozen=True, slots=True)
class AccountOpened:
    account_id: str
    key_id: str


def open_account(uow: UnitOfWork, command: OpenAccount) -> AccountOpened:
    """Opens the account, grants its credit and registers its key."""
    account = Account(id=uow.new_id(ids.ACCOUNT), envelope=uow.envelope, limits=command.limits)
    if command.credit_nano_usd:
        _grant(uow, account, command.credit_nano_usd, note="opening grant")
    uow.add(account)
    uow.personal(
        PersonalRow("account_people", {"account_id": account.id}, {"email": command.email})
    )
    key_id = register_key(uow, RegisterKey(account_id=account.id, secret=command.secret))
    return AccountOpened(account_id=account.id, key_id=key_id)


@dataclass(frozen=True, slots=True)
class GrantCredit:
    """`note` is for people, and can be deleted; with the same `idempotency_key` credit is granted
    once."""

    account_id: str
    amount_nano_usd: int
    note: str
    idempotency_key: str | None = None


def grant_credit(uow: UnitOfWork, command: GrantCredit) -> str:
    """Adds free credit; returns the grant's id. Raises NotFound, and InvalidRequest for a note that
    is too long, or for another grant under the same key."""
    if len(command.note) > GRANT_NOTE_CHARACTERS_MAX:
        raise InvalidRequest(
            f"A grant's note is at most {GRANT_NOTE_CHARACTERS_MAX} characters.", param="note"
        )
    account = uow.get(Account, command.account_id)
    if command.idempotency_key is None:
        return _grant(uow, account, command.amount_nano_usd, note=command.note)
    stream = ids.idempotency_id(account.id, "grants", command.idempotency_key)
    asked = f"{command.amount_nano_usd}\0{command.note}"
    digest = hashlib.sha256(asked.encode()).hexdigest()
    before = uow.find(IdempotentRequest, stream)
    if before is not None:
        before.must_equal(digest)
        return before.result_id
    grant_id = _grant(uow, account, command.amount_nano_usd, note=command.note)
    uow.add(
        IdempotentRequest(id=stream, envelope=uow.envelope, body_sha256=digest, result_id=grant_id)
    )
    return grant_id


def _grant(uow: UnitOfWork, account: Account, amount_nano_usd: int, *, note: str) -> str:
    grant_id = uow.new_id(ids.GRANT)
    account.grant_credit(amount_nano_usd, grant_id=grant_id, envelope=uow.envelope)
    uow.personal(
        PersonalRow("grant_notes", {"grant_id": grant_id}, {"account_id": account.id, "note": note})
    )
    return grant_id


@dataclass(frozen=True, slots=True)
class SetAccountLimits:
    account_id: str
    limits: AccountLimits


def set_account_limits(uow: UnitOfWork, command: SetAccountLimits) -> None:
    """Raises NotFound."""
    uow.get(Account, command.account_id).set_limits(command.limits, envelope=uow.envelope)
