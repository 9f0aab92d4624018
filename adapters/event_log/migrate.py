"""Brings a database to the shape that this release needs, as the database's owner.

`migrations/NNNN_pre_what.sql` run before a release's processes start, `NNNN_post_what.sql` may run
once the old ones are gone; each in one transaction, in order, once. `schema.sql` is what they add
up to, which a test proves. Called by the supervisor, the operator's CLI and tests; never by the
application's role, which may not create tables.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import psycopg

from adapters.event_log.postgres import Connection, reach, told
from adapters.process.settings import Unusable

_LOCK = 4_775_021_907_138_530
"""Any number that no one else takes as an advisory lock."""

_NAME = re.compile(r"(\d{4})_(pre|post)_\w+\.sql")


class MigrationRefused(Unusable):
    """The database was not made by these migrations, or its owner is somebody else; nothing was
    changed."""


class OtherSchema(Unusable):
    """The database has not the shape that this release needs."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file."""

    number: int
    phase: str
    name: str
    text: str

    @property
    def sha256(self) -> str:
        """What is recorded, so that an edited migration is noticed."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def migrations() -> list[Migration]:
    """All migrations of this release, in order."""
    found = []
    for file in resources.files("adapters.event_log.migrations").iterdir():
        if file.name.endswith(".sql"):
            match = _NAME.fullmatch(file.name)
            assert match, f"{file.name} is not named NNNN_pre_what.sql or NNNN_post_what.sql"
            found.append(
                Migration(int(match[1]), match[2], file.name, file.read_text(encoding="utf-8"))
            )
    found.sort(key=lambda migration: migration.number)
    assert [migration.number for migration in found] == list(range(1, len(found) + 1))
    return found


def migrate(owner_url: str) -> Sequence[str]:
    """Applies what is missing and returns the names of it; safe to call from several processes.

    Raises MigrationRefused where an applied migration differs from this release's, or where the
    role may not change the database; and Unusable.
    """
    with reach(owner_url, name="gridline-migrate") as connection:
        try:
            return _migrate(connection)
        except psycopg.errors.InsufficientPrivilege as error:
            raise MigrationRefused(
                f"GRIDLINE_DATABASE_URL: {told(error)}. A migration connects as the database's "
                f"owner, a role that may create roles; {connection.info.user} is not that role"
            ) from error


def refuse_other_schema(connection: Connection) -> None:
    """Raises OtherSchema unless what this release runs on was applied. More may have been: a newer
    release's first half."""
    applied = _applied(connection)
    for migration in migrations():
        if migration.phase == "pre" and applied.get(migration.number) != migration.sha256:
            has = "another" if migration.number in applied else "no"
            raise OtherSchema(
                f"GRIDLINE_DATABASE_URL: database {connection.info.dbname} has {has} "
                f"{migration.name}; run `gridlined migrate` as its owner"
            )


def _migrate(connection: Connection) -> Sequence[str]:
    connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
    applied = _applied(connection)
    done = []
    for migration in migrations():
        if migration.number in applied:
            _check(migration, applied[migration.number])
        else:
            _apply(connection, migration)
            done.append(migration.name)
    return done


def _applied(connection: Connection) -> dict[int, str]:
    exists = connection.execute(
        "SELECT to_regclass('gridline_migrations') IS NOT NULL AS yes"
    ).fetchone()
    if not exists or not exists["yes"]:
        return {}
    rows = connection.execute("SELECT number, sha256 FROM gridline_migrations").fetchall()
    return {row["number"]: row["sha256"] for row in rows}


def _check(migration: Migration, sha256: str) -> None:
    if migration.sha256 != sha256:
        raise MigrationRefused(
            f"{migration.name} was applied with another text: this database was made by an "
            "unreleased version. Start with a new one"
        )


def _apply(connection: Connection, migration: Migration) -> None:
    with connection.transaction():
        # The text comes with the product; without parameters it may hold several statements.
        connection.execute(migration.text)
        connection.execute(
            "INSERT INTO gridline_migrations (number, name, sha256) VALUES (%s, %s, %s)",
            (migration.number, migration.name, migration.sha256),
        )
