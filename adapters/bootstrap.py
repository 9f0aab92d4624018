"""The composition root: the one place where real things are chosen for a process.

The API, the worker and the operator's commands open a plane here and close it at their end;
settings come in as a value. Nothing else in the product names an implementation of a port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar

import psycopg
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

from adapters.event_log.event_store import EventStore, decode
from adapters.event_log.migrate import refuse_other_schema
from adapters.event_log.postgres import Connection, connect, reach, refuse_unsafe_server
from adapters.event_log.writer import Writer
from adapters.objects import open_store
from adapters.process.clock import RandomIds, clock_of
from adapters.process.settings import Settings
from domain.errors import Overloaded
from domain.ports import Clock, IdSource, Objects
from projections.follower import Follower
from projections.registry import FOLLOWING, INLINE

P = ParamSpec("P")
T = TypeVar("T")

READ_CONNECTIONS_MAX = 16
READ_WAIT_SECONDS_MAX = 10.0


@dataclass(frozen=True)
class ControlPlane:
    """What a process that changes and reads things works with."""

    settings: Settings
    writer: Writer
    reads: ConnectionPool[Connection]
    clock: Clock
    ids: IdSource
    clients_wait: bool

    @cached_property
    def objects(self) -> Objects:
        """Opened at first use: an operator's command needs none. Raises ValueError."""
        return open_store(self.settings.object_store_url, clients_wait=self.clients_wait)

    async def read(
        self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs a read function in a thread, on a connection of the pool. Raises Overloaded while
        the database is away."""

        def on_connection() -> T:
            with self.reads.connection() as connection:
                return function(connection, *args, **kwargs)

        try:
            return await asyncio.to_thread(on_connection)
        except psycopg.OperationalError as error:
            raise Overloaded("The database is away. Send the request again.") from error


@contextmanager
def control_plane(settings: Settings, *, clients_wait: bool = False) -> Iterator[ControlPlane]:
    """Opens and closes it; `clients_wait` in a process that answers them. Raises Unusable, of which
    DatabaseAway may pass by itself."""
    settings.require("database_url")
    with reach(settings.database_url, name="gridline-start") as connection:
        refuse_unsafe_server(connection)
        refuse_other_schema(connection)
    clock, ids = clock_of(settings), RandomIds()
    store = EventStore(settings.database_url, projections=INLINE)
    writer = Writer(store, clock=clock, ids=ids)
    try:
        with _read_pool(settings.database_url) as reads:
            yield ControlPlane(
                settings=settings,
                writer=writer,
                reads=reads,
                clock=clock,
                ids=ids,
                clients_wait=clients_wait,
            )
    finally:
        writer.close()


@contextmanager
def worker_plane(settings: Settings) -> Iterator[ControlPlane]:
    """A control plane, and the read models that follow the log, kept up by a thread."""
    following = Follower(
        lambda: connect(settings.database_url, name="gridline-projections"), decode, FOLLOWING
    )
    with control_plane(settings) as plane:
        following.start()
        try:
            yield plane
        finally:
            following.close()


def _read_pool(database_url: str) -> ConnectionPool[Connection]:
    """Connections are tried before each use: the database may have been restarted."""
    kwargs: dict[str, Any] = {
        "autocommit": True,
        "row_factory": dict_row,
        "application_name": "gridline-reads",
        "connect_timeout": 5,
    }
    return ConnectionPool(
        database_url,
        kwargs=kwargs,
        min_size=1,
        max_size=READ_CONNECTIONS_MAX,
        timeout=READ_WAIT_SECONDS_MAX,
        check=ConnectionPool.check_connection,
        open=False,
    )
