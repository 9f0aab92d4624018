"""The actions behind `gridlined`: one function a command, each opens what it needs and prints.

`cli.py` calls them with what was typed. The database is that of `--data DIR` (the directory of a
running `gridlined up`) or GRIDLINE_DATABASE_URL's. What cannot be done as asked is a GridlineError,
what is not there an Unusable; `cli.py` tells either. Printing is allowed here, as the place where
results meet people.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import psycopg

from adapters.audit import verify as audit
from adapters.embedded.postgres import Postgres
from adapters.embedded.supervisor import Supervisor
from adapters.event_log.event_store import decode
from adapters.event_log.migrate import migrate, refuse_other_schema
from adapters.event_log.postgres import Connection, connect, reach, told
from adapters.objects import open_store
from adapters.operators.actions import Operator, open_operator, read_prices, shipped_prices
from adapters.process.clock import clock_of
from adapters.process.settings import Settings, Unusable, process_environment
from adapters.process.telemetry import configure_logging
from domain.errors import GridlineError, InvalidRequest
from domain.ledger.account import AccountLimits
from domain.ledger.money import usd_text
from projections.direct import heartbeats
from projections.follower import Follower
from projections.money import keys
from projections.registry import FOLLOWING, INLINE
from projections.work import open_work as work

FOLLOWERS_PATIENCE_SECONDS = 10.0
"""For which an audit waits for what follows the log."""


def up(*, data: Path, port: int, ready_file: Path | None) -> None:
    """Returns when it was told to stop."""
    settings = _environment()
    prices = read_prices(Path(settings.prices_file)) if settings.prices_file else shipped_prices()

    def prepare(mine: Settings) -> str:
        with open_operator(mine) as operator, _connection(mine) as connection:
            operator.publish_prices(prices)
            # Whoever was heard of here died with the last supervisor: ready means a living runner,
            # and no work waits for the lease of a dead one to end.
            for runner in heartbeats.list_all(connection):
                heartbeats.delete(connection, runner.runner_id)
            operator.give_up([assigned.attempt for assigned in work.assigned(connection)])
            return operator.open_first_account(connection, data / "api-key")

    Supervisor(
        directory=data,
        port=port,
        ready_file=ready_file,
        settings=settings,
        say=_say,
        prepare=prepare,
    ).run(process_environment())


def accounts_create(
    *,
    email: str,
    credit_usd: str,
    open_fine_tunes: int,
    open_batches: int,
    data: Path | None,
    as_json: bool,
) -> None:
    limits = AccountLimits(open_fine_tunes=open_fine_tunes, open_batches=open_batches)
    with _operator(data) as operator:
        opened = operator.open_account(email=email, credit_usd=credit_usd, limits=limits)
    _show(asdict(opened), as_json=as_json)


def accounts_grant(
    *,
    account_id: str,
    credit_usd: str,
    note: str,
    idempotency_key: str | None,
    data: Path | None,
    as_json: bool,
) -> None:
    with _operator(data) as operator:
        grant_id = operator.grant(
            account_id=account_id,
            credit_usd=credit_usd,
            note=note,
            idempotency_key=idempotency_key,
        )
    facts = {"account_id": account_id, "grant_id": grant_id, "granted_usd": credit_usd}
    _show(facts, as_json=as_json)


def keys_create(*, account_id: str, name: str, data: Path | None, as_json: bool) -> None:
    with _operator(data) as operator:
        key_id, key = operator.create_key(account_id=account_id, name=name)
    _show({"key_id": key_id, "api_key": key}, as_json=as_json)


def keys_list(*, account_id: str, data: Path | None, as_json: bool) -> None:
    settings = _settings(data)
    today = clock_of(settings).now().date()
    with _connection(settings) as connection:
        listed = keys.list_all(connection, account_id=account_id, day=today)
    if as_json:
        _say(json.dumps([_key_facts(key) for key in listed]))
    for key in () if as_json else listed:
        state = "revoked" if key.revoked_at else f"{key.prefix}…  {key.name}"
        spent = f"{usd_text(key.total_nano_usd)} USD, today {usd_text(key.day_nano_usd)} USD"
        _say(f"{key.id}  {state}  spent {spent}")


def keys_revoke(*, key_id: str, data: Path | None, as_json: bool) -> None:
    with _operator(data) as operator:
        operator.revoke_key(key_id)
    _show({"key_id": key_id, "revoked": True}, as_json=as_json)


def keys_limit(
    *, key_id: str, daily_usd: str | None, total_usd: str | None, data: Path | None, as_json: bool
) -> None:
    with _operator(data) as operator:
        operator.limit_key(key_id, daily_usd=daily_usd, total_usd=total_usd)
    limits = {"daily_usd": daily_usd, "total_usd": total_usd}
    _show({"key_id": key_id, **limits}, as_json=as_json)


def prices_publish(*, file: Path | None, data: Path | None, as_json: bool) -> None:
    prices = shipped_prices() if file is None else read_prices(file)
    with _operator(data) as operator:
        operator.publish_prices(prices)
    published = "the list that ships" if file is None else str(file)
    _show({"published": published}, as_json=as_json)


def migrate_database(*, data: Path | None, as_json: bool) -> None:
    settings = _settings(data, as_owner=True)
    with _told_database():
        applied = list(migrate(settings.database_url))
    _show({"applied": applied}, as_json=as_json)


def rebuild(*, names: Sequence[str], data: Path | None, as_json: bool) -> None:
    settings = _settings(data)
    known = {projection.name: projection for projection in (*INLINE, *FOLLOWING)}
    unknown = sorted(set(names) - known.keys())
    if unknown:
        raise InvalidRequest(f"No read model {', '.join(unknown)}; there are {', '.join(known)}")
    with _connection(settings):
        follower = Follower(
            partial(connect, settings.database_url, name="gridlined"), decode, tuple(known.values())
        )
        for name in names or known:
            events = follower.rebuild(known[name])
            _say(json.dumps({"name": name, "events": events}) if as_json else f"{name}: {events}")


def audit_verify(*, objects: bool, data: Path | None, as_json: bool) -> None:
    settings = _settings(data)
    settings.require("object_store_url") if objects else None
    with _connection(settings) as connection:
        end = audit.wait_for_followers(connection, patience_seconds=FOLLOWERS_PATIENCE_SECONDS)
        report = audit.verify(connection, now=clock_of(settings).now(), followed_through=end)
        if objects:
            store = open_store(settings.object_store_url)
            report = asyncio.run(audit.with_objects(report, connection, store))
    for line in [json.dumps(report.to_wire())] if as_json else report.lines():
        _say(line)
    if not report.passed:
        raise LedgerDiffers("The ledger differs from its log")


class LedgerDiffers(GridlineError):
    """The audit found a difference, and has told which."""


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


def _environment() -> Settings:
    settings = Settings.from_environment(process_environment())
    configure_logging("gridlined", level=settings.log_level)
    return settings


def _settings(data: Path | None, *, as_owner: bool = False) -> Settings:
    settings = _environment()
    if data is not None:
        if not (data / "postgres").is_dir():
            raise Unusable(f"--data {data} is not the data directory of a `gridlined up`")
        server = Postgres(data)
        return replace(
            settings,
            database_url=server.owner_url if as_owner else server.application_url,
            object_store_url=settings.object_store_url or (data / "objects").absolute().as_uri(),
        )
    if not settings.database_url:
        raise Unusable("Name the database: --data DIR, or GRIDLINE_DATABASE_URL")
    return settings


@contextmanager
def _operator(data: Path | None) -> Iterator[Operator]:
    with _told_database(), open_operator(_settings(data)) as operator:
        yield operator


@contextmanager
def _connection(settings: Settings) -> Iterator[Connection]:
    with _told_database(), reach(settings.database_url, name="gridlined") as connection:
        refuse_other_schema(connection)
        yield connection


@contextmanager
def _told_database() -> Iterator[None]:
    """A database that goes away in the middle is told as one that was not there."""
    try:
        yield
    except psycopg.OperationalError as error:
        raise Unusable(f"GRIDLINE_DATABASE_URL: {told(error)}") from error


def _show(facts: Mapping[str, object], *, as_json: bool) -> None:
    if as_json:
        _say(json.dumps(facts))
    else:
        for name, value in facts.items():
            _say(f"{name}: {value}")


def _say(text: str) -> None:
    # The terminal may be gone; that is no reason to leave anything half done.
    with suppress(BrokenPipeError):
        print(text, flush=True)
