"""`gridlined`: runs Gridline's processes, and does what an operator does to a running one.

Only the command line is here: what may be typed, its help and its exit statuses. The actions are in
`commands.py`, which each command imports only when it runs: a runner's installation has neither
PostgreSQL's client nor a web server, and uses this program too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from adapters.process.settings import Unusable
from adapters.process.start import CANNOT_START
from domain.errors import GridlineError
from domain.limits import OPEN_BATCHES_NEW_ACCOUNT, OPEN_FINE_TUNES_NEW_ACCOUNT

REFUSED = 1

MODULES: Mapping[str, str] = {"api": "api", "worker": "adapters.worker", "runner": "gpu_runners"}
SERVER_PACKAGES = ("psycopg", "uvicorn")
"""What the extra `server` brings, and a runner does without."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Exit status 0; 1 for a refusal or failure that the message explains; 2 for wrong usage and
    for what cannot be used as it is set up."""
    try:
        app(arguments, prog_name="gridlined")
    except GridlineError as refused:
        _end(refused.message, status=REFUSED)
    except Unusable as unusable:
        _end(str(unusable), status=CANNOT_START)
    except ModuleNotFoundError as missing:
        _end(_lacks(missing.name), status=CANNOT_START)
    raise AssertionError("typer ends the process")


def _end(reason: str, *, status: int) -> NoReturn:
    sys.stderr.write(f"gridlined: {reason}\n")
    sys.exit(status)


def _lacks(package: str | None) -> str:
    return f"this installation has no {package}: install Gridline with its extra `server`"


def _examples(*lines: str) -> str:
    """The end of a command's help; the mark keeps the lines as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  gridlined {line}" for line in lines)


def _group(help_text: str) -> typer.Typer:
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)


app = typer.Typer(
    help="Runs and looks after Gridline.",
    epilog="\b\nExit status:\n  0 done\n  1 refused, or the audit found a difference\n"
    "  2 wrong usage, or something that the settings name cannot be used",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
accounts = _group("Accounts and credit.")
keys = _group("API keys.")
audit = _group("Prove the ledger.")
prices = _group("The price list.")
app.add_typer(accounts, name="accounts")
app.add_typer(keys, name="keys")
app.add_typer(audit, name="audit")
app.add_typer(prices, name="prices")


def _usd(text: str) -> str:
    """An amount as people write it: no sign, exponent, separator or foreign digit."""
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", text):
        raise typer.BadParameter(f"must be an amount of USD such as 10 or 0.5, not {text!r}")
    return text


def _count(given: str | int) -> int:
    """How many things may be open at once; a default comes as the number that it is."""
    if not re.fullmatch(r"[0-9]{1,6}", str(given)):
        raise typer.BadParameter(f"must be an integer from 0 to 999,999, not {given!r}")
    return int(given)


def _port(given: str | int) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", str(given)) or int(given) > 65_535:
        raise typer.BadParameter(f"must be an integer from 0 to 65535, not {given!r}")
    return int(given)


Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The directory of a `gridlined up`; without it GRIDLINE_DATABASE_URL counts.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AccountId = Annotated[str, typer.Option("--account", metavar="ID", help="The account's id.")]
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="The key's id.")]
Limit = Annotated[str | None, typer.Option(metavar="X", parser=_usd, help="USD; none: no limit.")]


@app.command(epilog=_examples("up --data .gridline", "up --data /srv/gridline --port 0"))
def up(
    data: Annotated[Path, typer.Option(metavar="DIR", help="Where all state is.")],
    port: Annotated[
        int, typer.Option(parser=_port, metavar="N", help="The API's port; 0: any that is free.")
    ] = 8080,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="F", help="JSON, written when all is ready.")
    ] = None,
) -> None:
    """Run everything on this machine, until Ctrl-C."""
    from adapters.operators import commands

    commands.up(data=data, port=port, ready_file=ready_file)


@app.command()
def api() -> None:
    """Serve HTTP; GRIDLINE_ variables are its settings."""
    _become("api")


@app.command()
def worker() -> None:
    """Schedule, send out and look after all work; GRIDLINE_ variables are its settings."""
    _become("worker")


@app.command()
def runner() -> None:
    """Run work on this machine; GRIDLINE_ variables are its settings."""
    _become("runner")


def _become(process: str) -> NoReturn:
    for package in () if process == "runner" else SERVER_PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise Unusable(_lacks(package))
    os.execv(sys.executable, [sys.executable, "-m", MODULES[process]])  # noqa: S606


@accounts.command(
    "create",
    epilog=_examples("accounts create --email you@example.org --credit-usd 10 --data .gridline"),
)
def accounts_create(
    email: Annotated[str, typer.Option(help="Whom to write to about it.")],
    credit_usd: Annotated[
        str, typer.Option(metavar="X", parser=_usd, help="What it may spend at first.")
    ] = "0",
    open_fine_tunes: Annotated[
        int, typer.Option(metavar="N", parser=_count, help="Jobs that may be open at once.")
    ] = OPEN_FINE_TUNES_NEW_ACCOUNT,
    open_batches: Annotated[
        int, typer.Option(metavar="N", parser=_count, help="Batches that may be open at once.")
    ] = OPEN_BATCHES_NEW_ACCOUNT,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """A new account with credit and one key, whose text is shown once."""
    from adapters.operators import commands

    commands.accounts_create(
        email=email,
        credit_usd=credit_usd,
        open_fine_tunes=open_fine_tunes,
        open_batches=open_batches,
        data=data,
        as_json=as_json,
    )


@accounts.command(
    "grant",
    epilog=_examples(
        "accounts grant --account acct_… --credit-usd 5 --data .gridline",
        "accounts grant --account acct_… --credit-usd 5 --note 'by wire' --idempotency-key wire-17",
    ),
)
def accounts_grant(
    account: AccountId,
    credit_usd: Annotated[str, typer.Option(metavar="X", parser=_usd, help="How much.")],
    note: Annotated[
        str, typer.Option(help="For people, on statements; kept outside the log.")
    ] = "grant",
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="A payment's id, say: with the same one, credit is granted once."),
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Add credit."""
    from adapters.operators import commands

    commands.accounts_grant(
        account_id=account,
        credit_usd=credit_usd,
        note=note,
        idempotency_key=idempotency_key,
        data=data,
        as_json=as_json,
    )


@keys.command(
    "create", epilog=_examples("keys create --account acct_… --name laptop --data .gridline")
)
def keys_create(
    account: AccountId,
    name: Annotated[str, typer.Option(help="What to know it by.")] = "key",
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Another key of an account; its text is shown once."""
    from adapters.operators import commands

    commands.keys_create(account_id=account, name=name, data=data, as_json=as_json)


@keys.command("list", epilog=_examples("keys list --account acct_… --data .gridline"))
def keys_list(account: AccountId, data: Data = None, as_json: AsJson = False) -> None:
    """The keys of an account, with what they spent."""
    from adapters.operators import commands

    commands.keys_list(account_id=account, data=data, as_json=as_json)


@keys.command("revoke", epilog=_examples("keys revoke key_… --data .gridline"))
def keys_revoke(key_id: KeyId, data: Data = None, as_json: AsJson = False) -> None:
    """Close a key for good."""
    from adapters.operators import commands

    commands.keys_revoke(key_id=key_id, data=data, as_json=as_json)


@keys.command("limit", epilog=_examples("keys limit key_… --daily-usd 2 --data .gridline"))
def keys_limit(
    key_id: KeyId,
    daily_usd: Limit = None,
    total_usd: Limit = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Spend limits of a key; without a number there is none."""
    from adapters.operators import commands

    commands.keys_limit(
        key_id=key_id, daily_usd=daily_usd, total_usd=total_usd, data=data, as_json=as_json
    )


@audit.command(
    "verify",
    epilog=_examples("audit verify --data .gridline", "audit verify --objects --json"),
)
def audit_verify(
    objects: Annotated[
        bool,
        typer.Option("--objects", help="Read every stored object too, and compare digests."),
    ] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Replay the log and compare all that was derived from it."""
    from adapters.operators import commands

    commands.audit_verify(objects=objects, data=data, as_json=as_json)


@prices.command(
    "publish", epilog=_examples("prices publish", "prices publish prices.json --data .gridline")
)
def prices_publish(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="None: the list that ships.")
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Put a price list in force for new quotes."""
    from adapters.operators import commands

    commands.prices_publish(file=file, data=data, as_json=as_json)


@app.command(epilog=_examples("rebuild --data .gridline", "rebuild accounts journal"))
def rebuild(
    projection: Annotated[
        list[str] | None, typer.Argument(help="Names of read models; none: all of them.")
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Derive read models from the log again."""
    from adapters.operators import commands

    commands.rebuild(names=projection or [], data=data, as_json=as_json)


@app.command(epilog=_examples("migrate"))
def migrate(data: Data = None, as_json: AsJson = False) -> None:
    """Bring the database to this release's shape; connects as its owner."""
    from adapters.operators import commands

    commands.migrate_database(data=data, as_json=as_json)


if __name__ == "__main__":
    main()
