"""The actions behind `gridlined`: one function a command, each opens what it needs and prints.

`cli.py` calls `run` with the parsed command line. Operators' commands take the connection from
`--data DIR` (the directory of a running `gridlined up`) or from GRIDLINE_DATABASE_URL. Printing is
allowed here, as the place where results meet people.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import psycopg

from adapters.audit import verify as audit
from adapters.clock import clock_of
from adapters.embedded.postgres import Postgres
from adapters.embedded.process import CannotStart
from adapters.embedded.supervisor import Supervisor
from adapters.event_log.event_store import decode
from adapters.event_log.migrate import MigrationRefused, migrate
from adapters.event_log.postgres import UnsafeDatabase, connect
from adapters.objects import open_store
from adapters.operators.actions import open_operator
from adapters.settings import Settings, process_environment
from domain.errors import GridlineError
from domain.ledger.account import AccountLimits
from domain.ledger.money import usd_text
from domain.limits import OPEN_BATCHES_NEW_ACCOUNT, OPEN_FINE_TUNES_NEW_ACCOUNT
from domain.ports import Objects
from projections.direct import heartbeats
from projections.follower import Follower
from projections.money import keys
from projections.registry import FOLLOWING, INLINE
from projections.work import open_work as work

Action = Callable[[Namespace, Settings], None]

FOLLOWERS_PATIENCE_SECONDS = 10.0
"""For which an audit waits for what follows the log."""


def run(options: Namespace) -> str | int:
    """What `sys.exit` is to be given: 0, or a message that says why not."""
    action = ACTIONS[options.command, getattr(options, "action", None)]
    try:
        action(options, _settings(options))
    except (CannotStart, GridlineError, MigrationRefused, UnsafeDatabase, ValueError) as error:
        return f"gridlined: {error}"
    except psycopg.OperationalError as error:
        return f"gridlined: the database cannot be reached; is `gridlined up` running? {error}"
    except KeyboardInterrupt:
        return 130
    return 0


def _settings(options: Namespace) -> Settings:
    settings = Settings.from_environment(process_environment())
    if options.command == "up":
        return settings
    if options.data is not None:
        if not (options.data / "postgres").is_dir():
            raise ValueError(f"{options.data} is not the data directory of a `gridlined up`")
        server = Postgres(options.data)
        url = server.owner_url if options.command == "migrate" else server.application_url
        objects = settings.object_store_url or (options.data / "objects").absolute().as_uri()
        settings = replace(settings, database_url=url, object_store_url=objects)
    if not settings.database_url:
        raise ValueError("Name the database: --data DIR, or GRIDLINE_DATABASE_URL")
    return settings


def _up(options: Namespace, settings: Settings) -> None:
    key_file: Path = options.data / "api-key"

    def prepare(mine: Settings) -> str:
        with (
            open_operator(mine) as operator,
            connect(mine.database_url, name="gridlined") as connection,
        ):
            operator.publish_prices(mine.prices_file)
            # Whoever was heard of here died with the last supervisor: ready means a living runner,
            # and no work waits for the lease of a dead one to end.
            for runner in heartbeats.list_all(connection):
                heartbeats.delete(connection, runner.runner_id)
            operator.give_up([assigned.attempt for assigned in work.assigned(connection)])
            return operator.open_first_account(connection, key_file)

    Supervisor(
        directory=options.data,
        port=options.port,
        ready_file=options.ready_file,
        settings=settings,
        say=_say,
        prepare=prepare,
    ).run(process_environment())


def _accounts_create(options: Namespace, settings: Settings) -> None:
    limits = AccountLimits(
        open_fine_tunes=_given(options.open_fine_tunes, OPEN_FINE_TUNES_NEW_ACCOUNT),
        open_batches=_given(options.open_batches, OPEN_BATCHES_NEW_ACCOUNT),
    )
    with open_operator(settings) as operator:
        opened = operator.open_account(
            email=options.email, credit_usd=options.credit_usd, limits=limits
        )
    _show(options, asdict(opened))


def _accounts_grant(options: Namespace, settings: Settings) -> None:
    with open_operator(settings) as operator:
        operator.grant(
            account_id=options.account, credit_usd=options.credit_usd, reason=options.reason
        )
    _show(options, {"account_id": options.account, "granted_usd": options.credit_usd})


def _keys_create(options: Namespace, settings: Settings) -> None:
    with open_operator(settings) as operator:
        key_id, key = operator.create_key(account_id=options.account, name=options.name)
    _show(options, {"key_id": key_id, "api_key": key})


def _keys_list(options: Namespace, settings: Settings) -> None:
    today = clock_of(settings).now().date()
    with connect(settings.database_url, name="gridlined") as connection:
        listed = keys.list_all(connection, account_id=options.account, day=today)
    if options.json:
        _say(json.dumps([_key_facts(key) for key in listed]))
    for key in () if options.json else listed:
        state = "revoked" if key.revoked_at else f"{key.prefix}…  {key.name}"
        spent = f"{usd_text(key.total_nano_usd)} USD, today {usd_text(key.day_nano_usd)} USD"
        _say(f"{key.id}  {state}  spent {spent}")


def _key_facts(key: keys.KeyRow) -> dict[str, object]:
    return {
        "key_id": key.id,
        "prefix": key.prefix,
        "name": key.name,
        "created_at": key.created_at.isoformat(),
        "revoked_at": key.revoked_at and key.revoked_at.isoformat(),
        "total_usd": usd_text(key.total_nano_usd),
        "today_usd": usd_text(key.day_nano_usd),
    }


def _keys_revoke(options: Namespace, settings: Settings) -> None:
    with open_operator(settings) as operator:
        operator.revoke_key(options.key_id)
    _show(options, {"key_id": options.key_id, "revoked": True})


def _keys_limit(options: Namespace, settings: Settings) -> None:
    with open_operator(settings) as operator:
        operator.limit_key(options.key_id, daily_usd=options.daily_usd, total_usd=options.total_usd)
    limits = {"daily_usd": options.daily_usd, "total_usd": options.total_usd}
    _show(options, {"key_id": options.key_id, **limits})


def _prices_publish(options: Namespace, settings: Settings) -> None:
    with open_operator(settings) as operator:
        operator.publish_prices(options.file)
    _show(options, {"published": options.file or "the list that ships"})


def _migrate(options: Namespace, settings: Settings) -> None:
    _show(options, {"applied": list(migrate(settings.database_url))})


def _rebuild(options: Namespace, settings: Settings) -> None:
    known = {projection.name: projection for projection in (*INLINE, *FOLLOWING)}
    unknown = sorted(set(options.projection) - known.keys())
    if unknown:
        raise ValueError(f"No read model {', '.join(unknown)}; there are {', '.join(known)}")
    runner = Follower(
        partial(connect, settings.database_url, name="gridlined"), decode, tuple(known.values())
    )
    for name in options.projection or known:
        events = runner.rebuild(known[name])
        _say(json.dumps({"name": name, "events": events}) if options.json else f"{name}: {events}")


def _audit_verify(options: Namespace, settings: Settings) -> None:
    with connect(settings.database_url, name="gridlined") as connection:
        end = audit.wait_for_followers(connection, patience_seconds=FOLLOWERS_PATIENCE_SECONDS)
        report = audit.verify(connection, now=clock_of(settings).now(), followed_through=end)
    for line in [json.dumps(report.to_wire())] if options.json else report.lines():
        _say(line)
    if not report.passed:
        raise ValueError("the ledger differs from its log")


def _store(settings: Settings) -> Objects:
    if not settings.object_store_url:
        raise ValueError("Name the object store: GRIDLINE_OBJECT_STORE_URL")
    return open_store(settings.object_store_url)


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _show(options: Namespace, facts: Mapping[str, object]) -> None:
    if options.json:
        _say(json.dumps(facts))
    else:
        for name, value in facts.items():
            _say(f"{name}: {value}")


def _say(text: str) -> None:
    # The terminal may be gone; that is no reason to leave anything half done.
    with suppress(BrokenPipeError):
        print(text, flush=True)


ACTIONS: Mapping[tuple[str, str | None], Action] = {
    ("up", None): _up,
    ("accounts", "create"): _accounts_create,
    ("accounts", "grant"): _accounts_grant,
    ("keys", "create"): _keys_create,
    ("keys", "list"): _keys_list,
    ("keys", "revoke"): _keys_revoke,
    ("keys", "limit"): _keys_limit,
    ("prices", "publish"): _prices_publish,
    ("migrate", None): _migrate,
    ("rebuild", None): _rebuild,
    ("audit", "verify"): _audit_verify,
}
