"""What tests share: one embedded PostgreSQL a session with a database for each test, and brokers.

Everything is real and started on first use. The Kafka tests run on the embedded broker, and on
Apache Kafka too where `GRIDLINE_TEST_KAFKA` (an address) or `GRIDLINE_KAFKA_HOME` (a folder with
`kafka.sh start DIR PORT`) says where one is.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from adapters.embedded.broker import Broker
from adapters.embedded.postgres import OWNER, SUPERUSER, Postgres
from adapters.embedded.process import free_port
from adapters.event_log.migrate import migrate
from adapters.process.settings import Settings
from adapters.process.telemetry import speak_through_logging

KAFKA_ADDRESS = os.environ.get("GRIDLINE_TEST_KAFKA", "")
KAFKA_HOME = os.environ.get("GRIDLINE_KAFKA_HOME", "")
BROKERS = ["embedded"]
BROKERS += [pytest.param("kafka", marks=pytest.mark.kafka)] if KAFKA_ADDRESS or KAFKA_HOME else []
TEMPLATE = "gridline_template"
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Database:
    """A migrated, empty database for one test."""

    owner_url: str
    application_url: str
    superuser_url: str


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A broker that several tests share, each under topic names of its own."""

    bootstrap: str
    is_apache: bool


def pytest_configure() -> None:
    """Puts what the product logs where pytest shows it."""
    speak_through_logging()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One cluster for the whole session, in memory where there is room: the product refuses a
    server without fsync, and there fsync costs nothing."""
    with tempfile.TemporaryDirectory(dir=_memory_directory()) as directory:
        server = Postgres(Path(directory))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """Like `tmp_path`, in memory where there is room: for tests that start PostgreSQL afresh."""
    with tempfile.TemporaryDirectory(dir=_memory_directory()) as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def weights_root() -> Path:
    """Where the small models are unpacked: kept between sessions, since every use checks them."""
    return Path(__file__).parent.parent / ".gridline" / "test-weights"


@pytest.fixture(scope="session")
def template_database(postgres: Postgres) -> str:
    """The name of a migrated database that nobody connects to."""
    with _as_superuser(postgres) as connection:
        connection.execute(f"CREATE DATABASE {TEMPLATE} OWNER {OWNER}")
    migrate(postgres.url(OWNER, database=TEMPLATE))
    return TEMPLATE


@pytest.fixture
def database(postgres: Postgres, template_database: str) -> Iterator[Database]:
    """A clone of the template, dropped after the test whoever is still connected."""
    with cloned_database(postgres, template_database) as clone:
        yield clone


@contextmanager
def cloned_database(postgres: Postgres, template_database: str) -> Iterator[Database]:
    """The same for as long as it is wanted."""
    name = f"test_{uuid.uuid4().hex}"
    with _as_superuser(postgres) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template_database} OWNER {OWNER}")
        yield Database(
            owner_url=postgres.url(OWNER, database=name),
            application_url=postgres.url("gridline", database=name),
            superuser_url=postgres.url(SUPERUSER, database=name),
        )
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session", params=BROKERS)
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningBroker]:
    """The embedded broker, then Apache Kafka where there is one."""
    directory = tmp_path_factory.mktemp("broker")
    if request.param == "embedded":
        embedded = Broker(directory)
        embedded.start()
        yield RunningBroker(embedded.bootstrap, is_apache=False)
        embedded.stop()
    elif KAFKA_ADDRESS:
        yield RunningBroker(KAFKA_ADDRESS, is_apache=True)
    else:
        bootstrap = _kafka("start", directory, kafka_port())
        yield RunningBroker(bootstrap, is_apache=True)
        _kafka("stop", directory)


@pytest.fixture
def broker_settings(broker: RunningBroker) -> Settings:
    """Settings with the broker, under a topic prefix of the test's own."""
    return Settings(
        kafka_bootstrap=broker.bootstrap,
        kafka_idempotent=broker.is_apache,
        kafka_groups=broker.is_apache,
        topic_prefix=f"test-{uuid.uuid4().hex}.",
    )


def _memory_directory() -> Path | None:
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES_MIN:
        return MEMORY
    return None


def kafka_port() -> str:
    """A free one whose next is free too, which the controller takes."""
    while True:
        port = free_port()
        with socket.socket() as probe, suppress(OSError, OverflowError):
            probe.bind(("127.0.0.1", port + 1))
            return str(port)


def _kafka(command: str, directory: Path, *arguments: str) -> str:
    script = Path(KAFKA_HOME) / "kafka.sh"
    done = subprocess.run(
        [script, command, directory, *arguments],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.strip()


def _as_superuser(postgres: Postgres) -> psycopg.Connection:
    return psycopg.connect(postgres.url(SUPERUSER, database="postgres"), autocommit=True)
