"""A table of what operators get wrong: each process says it in one line and ends with status 2.

Every row is a real process with a real PostgreSQL, broker and object store beside it, of which one
thing is wrong. A line names the setting that is to be changed; no traceback, and no password.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from adapters.embedded.postgres import Postgres
from adapters.kafka import ensure_topics
from adapters.process.settings import Settings, process_environment
from tests.conftest import Database

SECONDS_MAX = 30
API = ("-m", "api")
WORKER = ("-m", "adapters.worker")
RUNNER = ("-m", "gpu_runners")
GRIDLINED = ("-m", "adapters.operators.cli")
VERIFY = (*GRIDLINED, "audit", "verify")
GRANT = (*GRIDLINED, "accounts", "grant", "--account=acct_1", "--credit-usd=1")
MIGRATE = (*GRIDLINED, "migrate")
PUBLISH = (*GRIDLINED, "prices", "publish")

Environment = dict[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """What is really there, for rows to spoil."""

    database: Database
    postgres: Postgres
    directory: Path
    taken_port: int


@pytest.fixture
def place(database: Database, postgres: Postgres, tmp_path: Path) -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Place(database, postgres, tmp_path, listener.getsockname()[1])


@pytest.fixture
def right(place: Place, broker_settings: Settings) -> Environment:
    """Settings with which everything starts."""
    return {
        "GRIDLINE_DATABASE_URL": place.database.application_url,
        "GRIDLINE_KAFKA_BOOTSTRAP": broker_settings.kafka_bootstrap,
        "GRIDLINE_KAFKA_GROUPS": "0",
        "GRIDLINE_TOPIC_PREFIX": broker_settings.topic_prefix,
        "GRIDLINE_OBJECT_STORE_URL": (place.directory / "objects").as_uri(),
        "GRIDLINE_WEIGHTS_DIR": str(place.directory / "weights"),
        "GRIDLINE_PORT": "0",
    }


@pytest.fixture
async def topics(broker_settings: Settings) -> None:
    """As a deployment has them that was started before."""
    await ensure_topics(broker_settings)


def in_directory(name: str, text: str) -> Callable[[Place], str]:
    def write(place: Place) -> str:
        (place.directory / name).write_text(text)
        return str(place.directory / name)

    return write


def with_password(password: str) -> Callable[[Place], str]:
    def spoilt(place: Place) -> str:
        url = place.database.application_url
        start, _, rest = url.partition("@")
        return f"{start.rpartition(':')[0]}:{password}@{rest}"

    return spoilt


def with_database(name: str) -> Callable[[Place], str]:
    return lambda place: place.postgres.url("gridline", database=name)


def without_schema(place: Place) -> str:
    with psycopg.connect(place.database.superuser_url, autocommit=True) as connection:
        connection.execute("DROP TABLE gridline_migrations")
    return place.database.application_url


def of_another_release(place: Place) -> str:
    with psycopg.connect(place.database.superuser_url) as connection:
        connection.execute("UPDATE gridline_migrations SET sha256 = 'x'")
    return place.database.application_url


def that_forgets(place: Place) -> str:
    with psycopg.connect(place.database.superuser_url, autocommit=True) as connection:
        row = connection.execute("SELECT current_database()").fetchone()
        assert row is not None
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(sql.Identifier(row[0]))
        )
    return place.database.application_url


def unmigrated(place: Place) -> str:
    """As the application's role, which may not make tables."""
    return without_schema(place)


def the_taken_port(place: Place) -> str:
    return str(place.taken_port)


def a_file(place: Place) -> str:
    (place.directory / "file").write_text("")
    return (place.directory / "file" / "objects").as_uri()


NOBODY = "postgresql://gridline:SECRET@127.0.0.1:1/gridline"
NO_BASES = '{"version": 2, "effective_from": "2026-01-01T00:00:00Z"}'

ROWS: list[tuple[tuple[str, ...], str, str | Callable[[Place], str], str]] = [
    (API, "PORT", "99999", "less than or equal to 65535"),
    (WORKER, "SCHEDULER_TICK_SECONDS", "-1", "greater than 0"),
    (RUNNER, "ENGINE", "gpt", "'vllm', 'transformers' or 'echo'"),
    (VERIFY, "LOG_LEVEL", "loud", "'WARNING'"),
    (API, "DATABASE_URL", "", "is not set"),
    (WORKER, "DATABASE_URL", "", "is not set"),
    (VERIFY, "DATABASE_URL", "", "--data DIR"),
    (WORKER, "KAFKA_BOOTSTRAP", "", "is not set"),
    (RUNNER, "KAFKA_BOOTSTRAP", "", "is not set"),
    (API, "OBJECT_STORE_URL", "", "is not set"),
    (WORKER, "OBJECT_STORE_URL", "", "is not set"),
    (RUNNER, "OBJECT_STORE_URL", "", "is not set"),
    (RUNNER, "WEIGHTS_DIR", "", "is not set"),
    (API, "DATABASE_URL", NOBODY, "refused"),
    (VERIFY, "DATABASE_URL", NOBODY, "refused"),
    (GRANT, "DATABASE_URL", NOBODY, "refused"),
    (MIGRATE, "DATABASE_URL", NOBODY, "refused"),
    (API, "DATABASE_URL", with_password("SECRET"), "password authentication failed"),
    (WORKER, "DATABASE_URL", with_password("SECRET"), "password authentication failed"),
    (GRANT, "DATABASE_URL", with_password("SECRET"), "password authentication failed"),
    (API, "DATABASE_URL", with_database("nowhere"), '"nowhere" does not exist'),
    (WORKER, "DATABASE_URL", with_database("nowhere"), '"nowhere" does not exist'),
    (VERIFY, "DATABASE_URL", with_database("nowhere"), '"nowhere" does not exist'),
    (API, "DATABASE_URL", without_schema, "run `gridlined migrate`"),
    (WORKER, "DATABASE_URL", without_schema, "run `gridlined migrate`"),
    (GRANT, "DATABASE_URL", without_schema, "run `gridlined migrate`"),
    (VERIFY, "DATABASE_URL", without_schema, "run `gridlined migrate`"),
    (API, "DATABASE_URL", of_another_release, "another 0001_pre_initial.sql"),
    (WORKER, "DATABASE_URL", that_forgets, "synchronous_commit = off"),
    (MIGRATE, "DATABASE_URL", unmigrated, "as the database's owner"),
    (API, "OBJECT_STORE_URL", a_file, "Not a directory"),
    (WORKER, "OBJECT_STORE_URL", a_file, "Not a directory"),
    (RUNNER, "OBJECT_STORE_URL", a_file, "Not a directory"),
    (API, "PORT", the_taken_port, "in use"),
    (WORKER, "METRICS_PORT", the_taken_port, "in use"),
    (RUNNER, "METRICS_PORT", the_taken_port, "in use"),
    (API, "HOST", "203.0.113.1", "Cannot assign"),
    (API, "CLOCK_FILE", "/nonexistent", "No such file"),
    (API, "CLOCK_FILE", in_directory("clock", "noon"), "Invalid isoformat"),
    (WORKER, "KAFKA_PARTITIONS", "3", "has 4 partitions"),
    (RUNNER, "KAFKA_PARTITIONS", "3", "has 4 partitions"),
    (RUNNER, "ENGINES_PYTHON", "/nonexistent/python", "is no program"),
    (RUNNER, "ENGINE", "vllm", "needs GRIDLINE_ENGINES_PYTHON"),
    (RUNNER, "ENGINE", "echo", "GRIDLINE_ALLOW_ECHO=1"),
]


@pytest.mark.parametrize(("program", "name", "value", "expected"), ROWS)
async def test_one_line_names_the_setting_that_is_wrong(
    right: Environment,
    place: Place,
    topics: None,
    program: tuple[str, ...],
    name: str,
    value: str | Callable[[Place], str],
    expected: str,
) -> None:
    wrong = value if isinstance(value, str) else value(place)
    told = line_of(program, right | {f"GRIDLINE_{name}": wrong})
    assert f"GRIDLINE_{name}" in told
    assert expected in told


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("none.json", "No such file"),
        ("bad.json", "Invalid JSON"),
        ("old.json", "machine_hour_usd"),
    ],
)
def test_a_price_file_that_cannot_be_published_is_told_by_its_name(
    right: Environment, tmp_path: Path, file: str, expected: str
) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "old.json").write_text(NO_BASES)
    path = tmp_path / file
    for program, also in (
        ((*PUBLISH, str(path)), {}),
        ((*GRIDLINED, "up", f"--data={tmp_path}"), {"GRIDLINE_PRICES_FILE": str(path)}),
    ):
        told = line_of(program, right | also)
        assert str(path) in told
        assert expected in told


@pytest.mark.parametrize("command", [["api"], ["worker"], ["keys", "revoke", "key_1"]])
def test_a_runners_installation_says_what_the_rest_needs(
    right: Environment, command: list[str]
) -> None:
    """As where the extra `server` was not installed; its `runner` needs none of it."""
    without = f"""
import sys
sys.modules.update(dict.fromkeys(("psycopg", "psycopg_pool", "starlette", "uvicorn")))
from adapters.operators.cli import main
main({command!r})
"""
    assert "has no psycopg: install" in line_of(("-c", without), right)


def test_a_directory_that_is_no_instances_is_told(right: Environment, tmp_path: Path) -> None:
    assert f"--data {tmp_path}" in line_of((*VERIFY, f"--data={tmp_path}"), right)


def line_of(program: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """The one line that a process says, beside its log, before it ends with status 2."""
    ended = subprocess.run(
        [sys.executable, *program],
        env=process_environment() | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    *logged, line = ended.stderr.splitlines()
    assert all(json.loads(entry)["level"] != "error" for entry in logged)
    assert line.startswith("gridlined"), line
    assert "SECRET" not in line
    return line
