"""Accounts, credit, keys and prices: the operator's commands."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from domain import ids
from domain.errors import NotFound
from domain.ledger.account import Account, AccountLimits
from domain.ledger.key_spend import KeySpend, SpendLimits
from domain.ledger.price_book import PriceBook
from domain.ledger.prices import PriceList
from domain.unit_of_work import PersonalRow, UnitOfWork


@dataclass(frozen=True, slots=True)
class KeySecret:
    """What is kept of a key's text: its SHA-256, and a prefix by which people know it."""

    sha256: str
    prefix: str
    name: str

    @property
    def digest(self) -> str:
        """What the log has of it: the audit can tell a row's secret by it, and nobody a key."""
        return hashlib.sha256(self.sha256.encode()).hexdigest()


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


@dataclass(frozen=True, slots=True)
class RegisterKey:
    account_id: str
    secret: KeySecret


def register_key(uow: UnitOfWork, command: RegisterKey) -> str:
    """A new key of the account; returns its id. Raises NotFound."""
    uow.get(Account, command.account_id)
    key = KeySpend(
        id=uow.new_id(ids.KEY),
        envelope=uow.envelope,
        account_id=command.account_id,
        secret_digest=command.secret.digest,
    )
    uow.add(key)
    uow.personal(
        PersonalRow(
            "api_key_secrets",
            {"key_id": key.id},
            {
                "account_id": command.account_id,
                "secret_sha256": command.secret.sha256,
                "prefix": command.secret.prefix,
                "name": command.secret.name,
            },
        )
    )
    return key.id


@dataclass(frozen=True, slots=True)
class RevokeKey:
    key_id: str


def revoke_key(uow: UnitOfWork, command: RevokeKey) -> None:
    """The key opens nothing more, and nothing is kept of its text. Raises NotFound."""
    uow.get(KeySpend, command.key_id).revoke(envelope=uow.envelope)
    uow.personal(PersonalRow("api_key_secrets", {"key_id": command.key_id}, None))


@dataclass(frozen=True, slots=True)
class LimitKey:
    key_id: str
    limits: SpendLimits


def limit_key(uow: UnitOfWork, command: LimitKey) -> None:
    """Puts a key's spend limits in force. Raises NotFound."""
    key = uow.get(KeySpend, command.key_id)
    if key.revoked:
        raise NotFound("No such key.", param="key")
    key.set_limits(command.limits, envelope=uow.envelope)


@dataclass(frozen=True, slots=True)
class PublishPrices:
    prices: PriceList


def publish_prices(uow: UnitOfWork, command: PublishPrices) -> None:
    """Publishes a price list; the same one again is no change. Raises InvalidRequest."""
    book = uow.find(PriceBook, ids.PRICE_BOOK_ID)
    if book is None:
        uow.add(PriceBook(id=ids.PRICE_BOOK_ID, envelope=uow.envelope, prices=command.prices))
    else:
        book.publish(command.prices, envelope=uow.envelope)
