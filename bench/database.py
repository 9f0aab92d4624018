"""A PostgreSQL of its own, durable and on the real disk, for the figures that measure the log."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from adapters.embedded.postgres import APPLICATION, OWNER, SUPERUSER, Postgres
from adapters.event_log.migrate import migrate
from bench.report import machine, syncs_per_second


class Cluster:
    """The running server; `conditions` says what it runs on."""

    def __init__(self, server: Postgres, conditions: str) -> None:
        self.conditions = conditions
        self._server = server

    def database(self, name: str) -> str:
        """A new, migrated database; returns the application's URL."""
        superuser_url = self._server.url(SUPERUSER, database="postgres")
        with psycopg.connect(superuser_url, autocommit=True) as superuser:
            superuser.execute(
                sql.SQL("CREATE DATABASE {} OWNER {}").format(
                    sql.Identifier(name), sql.Identifier(OWNER)
                )
            )
        migrate(self._server.url(OWNER, database=name))
        return self._server.url(APPLICATION, database=name)

    def owner_url(self, application_url: str) -> str:
        """The owner's URL of the same database."""
        name = urlsplit(application_url).path.removeprefix("/")
        return self._server.url(OWNER, database=name)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Starts a server in a temporary directory and removes it afterwards."""
    with tempfile.TemporaryDirectory(prefix="gridline-bench-") as name:
        directory = Path(name)
        conditions = f"{machine()}, {syncs_per_second(directory)} fdatasync/s"
        server = Postgres(directory)
        server.start()
        try:
            yield Cluster(server, conditions)
        finally:
            server.stop()
