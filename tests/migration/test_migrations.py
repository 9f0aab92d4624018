"""Migrations make the database that schema.sql describes, once, and refuse one that they did not
make."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from adapters.embedded.postgres import OWNER, SUPERUSER, Postgres
from adapters.event_log.migrate import MigrationRefused, migrate, migrations
from adapters.event_log.postgres import connect

SCHEMA = Path(__file__).parents[2] / "schema.sql"

CATALOGUE = {
    "columns": """
        SELECT table_name, column_name, ordinal_position, data_type, udt_name, is_nullable,
               column_default, is_identity, identity_generation, collation_name
        FROM information_schema.columns WHERE table_schema = 'public'""",
    "tables": """
        SELECT relname, relkind, relpersistence, reloptions, relacl::text
        FROM pg_class WHERE relnamespace = 'public'::regnamespace""",
    "indexes": "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace""",
    "routines": """
        SELECT proname, pg_get_functiondef(oid), proacl::text
        FROM pg_proc WHERE pronamespace = 'public'::regnamespace""",
    "tracking": "SELECT application_name, notification_id FROM gridline_tracking",
}


@pytest.fixture
def owner_urls(postgres: Postgres) -> Iterator[list[str]]:
    """Two empty databases."""
    names = ["migration_a", "migration_b"]
    superuser_url = postgres.url(SUPERUSER, database="postgres")
    with psycopg.connect(superuser_url, autocommit=True) as superuser:
        for name in names:
            superuser.execute(
                sql.SQL("CREATE DATABASE {} OWNER {}").format(
                    sql.Identifier(name), sql.Identifier(OWNER)
                )
            )
        yield [postgres.url(OWNER, database=name) for name in names]
        for name in names:
            superuser.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def catalogue(url: str) -> dict[str, list[str]]:
    with connect(url, name="test") as connection:
        return {
            what: sorted(str(row) for row in connection.execute(query).fetchall())
            for what, query in CATALOGUE.items()
        }


def test_migrations_make_what_schema_sql_describes(owner_urls: list[str]) -> None:
    migrated, described = owner_urls
    assert migrate(migrated) == [migration.name for migration in migrations()]
    with psycopg.connect(described) as owner:
        owner.execute(SCHEMA.read_text())  # type: ignore[call-overload]
    assert catalogue(migrated) == catalogue(described)
    assert any("gridline_events" in table for table in catalogue(migrated)["tables"])


def test_migrating_again_or_at_the_same_time_applies_nothing_twice(owner_urls: list[str]) -> None:
    url = owner_urls[0]
    applied: list[str] = []
    threads = [threading.Thread(target=lambda: applied.extend(migrate(url))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert applied == [migration.name for migration in migrations()]
    assert migrate(url) == []


def test_a_database_of_another_history_is_refused(owner_urls: list[str]) -> None:
    url = owner_urls[0]
    migrate(url)
    with psycopg.connect(url) as owner:
        owner.execute("UPDATE gridline_migrations SET sha256 = 'another' WHERE number = 1")
    with pytest.raises(MigrationRefused, match="0001_pre_initial"):
        migrate(url)
