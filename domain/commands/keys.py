"""API keys: the operator's commands."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from domain import ids
from domain.errors import NotFound
from domain.ledger.account import Account
from domain.ledger.key_spend import KeySpend, SpendLimits
from domain.log.unit_of_work import PersonalRow, UnitOfWork


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
