"""Accounts, their credit and their limits: the operator's commands."""

from __future__ import annotations

from dataclasses import dataclass

from domain import ids
from domain.commands.keys import KeySecret, RegisterKey, register_key
from domain.ledger.account import Account, AccountLimits
from domain.unit_of_work import PersonalRow, UnitOfWork


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
        account.grant_credit(command.credit_nano_usd, reason="opening grant", envelope=uow.envelope)
    uow.add(account)
    uow.personal(
        PersonalRow("account_people", {"account_id": account.id}, {"email": command.email})
    )
    key_id = register_key(uow, RegisterKey(account_id=account.id, secret=command.secret))
    return AccountOpened(account_id=account.id, key_id=key_id)


@dataclass(frozen=True, slots=True)
class GrantCredit:
    account_id: str
    amount_nano_usd: int
    reason: str


def grant_credit(uow: UnitOfWork, command: GrantCredit) -> None:
    """Raises NotFound."""
    uow.get(Account, command.account_id).grant_credit(
        command.amount_nano_usd, reason=command.reason, envelope=uow.envelope
    )


@dataclass(frozen=True, slots=True)
class SetAccountLimits:
    account_id: str
    limits: AccountLimits


def set_account_limits(uow: UnitOfWork, command: SetAccountLimits) -> None:
    """Raises NotFound."""
    uow.get(Account, command.account_id).set_limits(command.limits, envelope=uow.envelope)
