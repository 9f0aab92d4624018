"""`gridlined`: runs Gridline's processes, and does what an operator does to a running one.

Only the parser is here, so that a runner's installation, which has neither PostgreSQL's client nor
a web server, can use it too; the actions are in `commands.py`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

MODULES: Mapping[str, tuple[str, str]] = {
    "api": ("api", "serve HTTP"),
    "worker": ("adapters.worker", "schedule, dispatch, ingest and look after everything"),
    "runner": ("gpu_runners", "run work on this machine"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 0, 1 for a refusal or failure that the message explains, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    if options.command in MODULES:
        module, _ = MODULES[options.command]
        os.execv(sys.executable, [sys.executable, "-m", module])  # noqa: S606
    # Imported this late because a runner's installation cannot import it.
    sys.exit(importlib.import_module("adapters.operators.commands").run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gridlined", description="Runs and looks after Gridline.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="run everything on this machine, until Ctrl-C")
    up.add_argument("--data", type=Path, required=True, metavar="DIR", help="where all state is")
    up.add_argument("--port", type=int, default=8080, help="the API's port; 0: any that is free")
    up.add_argument("--ready-file", type=Path, metavar="F", help="JSON, written when all is ready")
    for name, (_, text) in MODULES.items():
        commands.add_parser(name, help=f"{text}; GRIDLINE_ variables are its settings")
    _add_accounts(commands)
    _add_keys(commands)
    audit = _group(commands, "audit", "prove the ledger")
    verify = _operator(audit, "verify", "replay the log and compare all that was derived from it")
    verify.add_argument(
        "--objects", action="store_true", help="read every stored object too, and compare digests"
    )
    _operator(commands, "rebuild", "derive all read models from the log again").add_argument(
        "projection", nargs="*", help="names of read models; none: all of them"
    )
    _operator(commands, "migrate", "bring the database to this release's shape")
    prices = _group(commands, "prices", "the price list")
    publish = _operator(prices, "publish", "put a price list in force for new quotes")
    publish.add_argument("file", nargs="?", default="", help="none: the one that ships")
    return parser


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _group(commands: Commands, name: str, text: str) -> Commands:
    group = commands.add_parser(name, help=text)
    return group.add_subparsers(dest="action", required=True, metavar="ACTION")


def _operator(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="the directory of a running `gridlined up`; else GRIDLINE_DATABASE_URL counts",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(text: str) -> int:
    """How many things may be open at once; argparse reports what this raises as wrong usage."""
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise argparse.ArgumentTypeError("must be an integer from 0 to 999,999")
    return int(text)


def _add_accounts(commands: Commands) -> None:
    accounts = _group(commands, "accounts", "accounts and credit")
    create = _operator(accounts, "create", "a new account with credit and one key")
    create.add_argument("--email", required=True)
    create.add_argument("--credit-usd", default="0", metavar="X")
    create.add_argument("--open-fine-tunes", type=_count, default=None, metavar="N")
    create.add_argument("--open-batches", type=_count, default=None, metavar="N")
    grant = _operator(accounts, "grant", "add credit")
    grant.add_argument("--account", required=True, metavar="ID")
    grant.add_argument("--credit-usd", required=True, metavar="X")
    grant.add_argument("--reason", default="grant")


def _add_keys(commands: Commands) -> None:
    keys = _group(commands, "keys", "API keys")
    create = _operator(keys, "create", "another key of an account; its text is shown once")
    create.add_argument("--account", required=True, metavar="ID")
    create.add_argument("--name", default="key")
    listing = _operator(keys, "list", "the keys of an account, with what they spent")
    listing.add_argument("--account", required=True, metavar="ID")
    _operator(keys, "revoke", "close a key for good").add_argument("key_id")
    limit = _operator(keys, "limit", "spend limits of a key; without a number there is none")
    limit.add_argument("key_id")
    limit.add_argument("--daily-usd", default=None, metavar="X")
    limit.add_argument("--total-usd", default=None, metavar="X")


if __name__ == "__main__":
    main()
