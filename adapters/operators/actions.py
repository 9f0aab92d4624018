"""What an operator does to accounts, keys and prices, from the command line or at a first start.

`gridlined` and the supervisor call it with the writer that the composition root made. A key's
text is drawn here, handed to the caller once, and never kept or logged.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import secrets
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from adapters.bootstrap import control_plane
from adapters.embedded.private_file import write_private
from adapters.event_log.postgres import Connection
from adapters.process.settings import Settings, Unusable, is_operator_name
from domain.commands.accounts import GrantCredit, OpenAccount, grant_credit, open_account
from domain.commands.keys import (
    KeySecret,
    LimitKey,
    RegisterKey,
    RevokeKey,
    limit_key,
    register_key,
    revoke_key,
)
from domain.commands.prices import PublishPrices, publish_prices
from domain.commands.work import LoseAttempt, lose_attempt
from domain.errors import InvalidRequest
from domain.ledger.account import AccountLimits
from domain.ledger.key_spend import SpendLimits
from domain.ledger.money import nano_usd
from domain.ledger.prices import PriceList
from domain.limits import CREDIT_USD_MAX, OPEN_FINE_TUNES
from domain.log.stored import Attempt
from domain.log.unit_of_work import C, CommandContext, CommandWriter, Handler, R

KEY_PREFIX = "gl_"
KEY_SHOWN_CHARACTERS = 10
"""As much of a key as people may see again: enough to tell keys apart, too little to guess one."""

FIRST_ACCOUNT_EMAIL = "local@localhost"
FIRST_ACCOUNT_CREDIT_USD = "25"
FIRST_ACCOUNT_LIMITS = AccountLimits(open_fine_tunes=OPEN_FINE_TUNES, open_batches=10)

EMAIL_CHARACTERS_MAX = 254
"""RFC 5321's bound of a path."""

_ANY_ACCOUNT = "SELECT 1 AS found FROM accounts LIMIT 1"


@dataclass(frozen=True, slots=True)
class OpenedAccount:
    """A new account, with the only copy of its key's text."""

    account_id: str
    key_id: str
    api_key: str


class Operator:
    """The actions of one process, each a command of its own in the log, with the `name` of who
    ordered it."""

    def __init__(self, writer: CommandWriter, *, name: str = "") -> None:
        self._writer = writer
        self._actor = f"system:operator:{name}" if name else "system:operator"

    def open_account(
        self,
        *,
        email: str,
        credit_usd: str,
        limits: AccountLimits,
        api_key: str | None = None,
    ) -> OpenedAccount:
        """An account with credit and one key. Raises InvalidRequest for what is no e-mail address
        or no credit."""
        if not 1 <= len(email) <= EMAIL_CHARACTERS_MAX or not email.isprintable():
            raise InvalidRequest(
                f"The e-mail address must have 1 to {EMAIL_CHARACTERS_MAX} printable characters"
            )
        credit_nano_usd = _credit(credit_usd, least_nano_usd=0)
        key = api_key or draw_key()
        opened = self._run(
            open_account,
            OpenAccount(
                email=email,
                limits=limits,
                credit_nano_usd=credit_nano_usd,
                secret=secret_of(key, name="first key"),
            ),
        )
        return OpenedAccount(account_id=opened.account_id, key_id=opened.key_id, api_key=key)

    def open_first_account(self, connection: Connection, key_file: Path) -> str:
        """The text of the first account's key; the account is made if there is none at all.

        The key is written before the account that it opens, so that a start that is killed between
        the two is simply done again.
        """
        if not key_file.exists():
            write_private(key_file, draw_key())
        key = key_file.read_text(encoding="ascii").strip()
        if connection.execute(_ANY_ACCOUNT).fetchone() is None:
            self.open_account(
                email=FIRST_ACCOUNT_EMAIL,
                credit_usd=FIRST_ACCOUNT_CREDIT_USD,
                limits=FIRST_ACCOUNT_LIMITS,
                api_key=key,
            )
        return key

    def grant(
        self, *, account_id: str, credit_usd: str, note: str, idempotency_key: str | None = None
    ) -> str:
        """Adds credit, once for each key, and returns the grant's id. Raises NotFound, and
        InvalidRequest for what is no positive amount or too long a note."""
        command = GrantCredit(
            account_id=account_id,
            amount_nano_usd=_credit(credit_usd, least_nano_usd=1),
            note=note,
            idempotency_key=idempotency_key,
        )
        return self._run(grant_credit, command)

    def create_key(self, *, account_id: str, name: str) -> tuple[str, str]:
        """A new key of an account: its id and its text. Raises NotFound."""
        key = draw_key()
        command = RegisterKey(account_id=account_id, secret=secret_of(key, name=name))
        return self._run(register_key, command), key

    def revoke_key(self, key_id: str) -> None:
        """Raises NotFound."""
        self._run(revoke_key, RevokeKey(key_id=key_id))

    def limit_key(self, key_id: str, *, daily_usd: str | None, total_usd: str | None) -> None:
        """Puts spend limits in force, None for no limit. Raises NotFound."""
        limits = SpendLimits(
            daily_nano_usd=None if daily_usd is None else nano_usd(daily_usd),
            total_nano_usd=None if total_usd is None else nano_usd(total_usd),
        )
        self._run(limit_key, LimitKey(key_id=key_id, limits=limits))

    def give_up(self, attempts: Iterable[Attempt]) -> None:
        """These lost their runners; attempts that are not current any more change nothing."""
        for attempt in attempts:
            self._run(lose_attempt, LoseAttempt(attempt=attempt))

    def publish_prices(self, prices: PriceList) -> None:
        """Puts a list in force; the same list again changes nothing. Raises InvalidRequest."""
        self._run(publish_prices, PublishPrices(prices=prices))

    def _run(self, handler: Handler[C, R], command: C) -> R:
        context = CommandContext(
            actor=self._actor,
            correlation_id=f"operator_{uuid.uuid4().hex}",
            causation=type(command).__name__,
            command_id=uuid.uuid4().hex,
        )
        return self._writer.submit(handler, command, context).result()


@contextmanager
def open_operator(settings: Settings) -> Iterator[Operator]:
    """An operator with a writer of its own on the settings' database. Raises Unusable."""
    with control_plane(settings) as plane:
        yield Operator(plane.writer, name=settings.operator or _login_name())


def _login_name() -> str:
    """The user that runs this, as the operating system calls them; "" in a container without."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""
    return name if is_operator_name(name) else ""


def shipped_prices() -> PriceList:
    """The list that comes with the product."""
    shipped = resources.files("domain.ledger").joinpath("prices.json")
    return PriceList.from_json(shipped.read_text(encoding="utf-8"))


def read_prices(file: Path) -> PriceList:
    """A list of the operator's own. Raises Unusable, naming the field."""
    try:
        return PriceList.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"price file {file}: {error}") from None
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Unusable(f"price file {file}: {place or 'it'}: {first['msg']}") from None


def _credit(usd: str, *, least_nano_usd: int) -> int:
    amount_nano_usd = nano_usd(usd)
    if not least_nano_usd <= amount_nano_usd <= nano_usd(CREDIT_USD_MAX):
        lowest = "0" if least_nano_usd == 0 else "more than 0"
        raise InvalidRequest(f"Credit is from {lowest} to {CREDIT_USD_MAX:,} USD, not {usd}")
    return amount_nano_usd


def draw_key() -> str:
    """The text of a new key: 256 bits from the operating system."""
    return KEY_PREFIX + secrets.token_hex(32)


def secret_of(key: str, *, name: str) -> KeySecret:
    """What is kept of a key."""
    return KeySecret(
        sha256=hashlib.sha256(key.encode()).hexdigest(),
        prefix=key[:KEY_SHOWN_CHARACTERS],
        name=name,
    )
