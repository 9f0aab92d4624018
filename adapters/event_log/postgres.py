"""Connections to PostgreSQL, the refusal of unsafe servers, and rows written with an append.

The event store, the projection runner, the read side and migrations connect through here. It never
decides anything and never touches an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import psycopg
from psycopg import pq, sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from adapters.process.settings import Unusable
from domain.log.unit_of_work import PersonalRow

Connection = psycopg.Connection[dict[str, Any]]

SERVER_VERSION_MIN = 170_000
LOCK_TIMEOUT_SECONDS = 5
"""How long an append waits for the log's lock before it is tried again."""

_REQUIRED_SETTINGS = {
    "fsync": ("on",),
    "full_page_writes": ("on",),
    "synchronous_commit": ("on", "local", "remote_write", "remote_apply"),
}


class UnsafeDatabase(Unusable):
    """The server or its settings could lose what was acknowledged; the process must not start."""


class DatabaseAway(Unusable):
    """No server answers where the settings say. It may be starting: who can wait, waits."""


def connect(url: str, *, name: str, autocommit: bool = True) -> Connection:
    """One connection with dict rows; `name` shows in pg_stat_activity."""
    return psycopg.connect(
        url,
        autocommit=autocommit,
        row_factory=dict_row,
        application_name=name,
        connect_timeout=5,
    )


def reach(url: str, *, name: str) -> Connection:
    """The first connection of a process. Raises DatabaseAway, and Unusable where the server is
    there but lets us not in: a wrong password, or no such role or database."""
    try:
        return connect(url, name=name)
    except psycopg.OperationalError as error:
        answered = pq.PGconn.ping(url.encode()) == pq.Ping.OK
        refused: type[Unusable] = Unusable if answered else DatabaseAway
        raise refused(f"GRIDLINE_DATABASE_URL: {told(error)}") from error


def told(error: psycopg.Error) -> str:
    """What the server or the client library says of it, as one line. For errors of connecting and
    of privileges only: those of statements may quote rows."""
    return " ".join(str(error).split())


def refuse_unsafe_server(connection: Connection) -> None:
    """Raises UnsafeDatabase, naming the setting, where a commit could be lost or the log's
    privileges do not exist."""
    if connection.info.server_version < SERVER_VERSION_MIN:
        raise UnsafeDatabase(
            f"GRIDLINE_DATABASE_URL: PostgreSQL {SERVER_VERSION_MIN // 10_000} or newer is needed "
            f"(MAINTAIN privilege); this is {connection.info.server_version // 10_000}"
        )
    rows = connection.execute(
        "SELECT name, setting FROM pg_settings WHERE name = ANY(%s) ORDER BY name",
        (list(_REQUIRED_SETTINGS),),
    ).fetchall()
    unsafe = [
        f"{row['name']} = {row['setting']}"
        for row in rows
        if row["setting"] not in _REQUIRED_SETTINGS[row["name"]]
    ]
    if unsafe:
        raise UnsafeDatabase(
            f"GRIDLINE_DATABASE_URL: PostgreSQL runs with {', '.join(unsafe)}: an acknowledged "
            "charge could be lost. Set each to on"
        )


def write_personal(connection: psycopg.Connection[Any], rows: Sequence[PersonalRow]) -> None:
    """Upserts and deletes, table by table, each table's in order; dicts and lists are stored as
    jsonb."""
    by_table: dict[str, list[PersonalRow]] = {}
    for row in rows:
        by_table.setdefault(row.table, []).append(row)
    for of_table in by_table.values():
        for shape, group in groupby(of_table, key=_shape):
            with connection.cursor() as cursor:
                cursor.executemany(_personal_sql(*shape), [_parameters(row) for row in group])


def _shape(row: PersonalRow) -> tuple[str, tuple[str, ...], tuple[str, ...] | None]:
    values = None if row.values is None else tuple(row.values)
    return row.table, tuple(row.key), values


def _parameters(row: PersonalRow) -> dict[str, Any]:
    columns: Mapping[str, Any] = {**row.key, **(row.values or {})}
    return {
        name: Jsonb(value) if isinstance(value, dict | list) else value
        for name, value in columns.items()
    }


@cache
def _personal_sql(table: str, key: tuple[str, ...], values: tuple[str, ...] | None) -> bytes:
    if values is None:
        delete = sql.SQL("DELETE FROM {table} WHERE {match}").format(
            table=sql.Identifier(table), match=_assignments(key, " AND ")
        )
        return delete.as_bytes()
    columns = (*key, *values)
    action = (
        sql.SQL("DO UPDATE SET {}").format(_assignments(values, ", "))
        if values
        else sql.SQL("DO NOTHING")
    )
    upsert = sql.SQL(
        "INSERT INTO {table} ({columns}) VALUES ({values}) ON CONFLICT ({key}) {action}"
    ).format(
        table=sql.Identifier(table),
        columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
        values=sql.SQL(", ").join(map(sql.Placeholder, columns)),
        key=sql.SQL(", ").join(map(sql.Identifier, key)),
        action=action,
    )
    return upsert.as_bytes()


def _assignments(columns: tuple[str, ...], separator: str) -> sql.Composed:
    return sql.SQL(separator).join(
        sql.SQL("{} = {}").format(sql.Identifier(name), sql.Placeholder(name)) for name in columns
    )
