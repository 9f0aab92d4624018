"""The peer of the log's figures: the `eventsourcing` library as it comes, on the same tables, with
the product's events."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

from eventsourcing.application import AggregateNotFoundError, Application
from eventsourcing.persistence import Mapper
from psycopg.conninfo import conninfo_to_dict

from adapters.event_log.event_store import EventMapper
from domain.errors import NotFound
from domain.log.aggregate import Aggregate, Envelope
from domain.log.unit_of_work import A, CommandContext, PersonalRow
from domain.ports import Clock, IdSource

CACHED_AGGREGATES = 10_000


class StockApplication(Application[str]):
    """The library's application, recorder, repository and cache."""

    name = "gridline"

    def construct_mapper(self) -> Mapper[str]:
        return EventMapper()


def stock_environment(
    database_url: str, *, connections: int, settings: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The library's settings: everything at its default but the text ids and the pool."""
    info = conninfo_to_dict(database_url)
    return {
        "PERSISTENCE_MODULE": "eventsourcing.postgres",
        "ORIGINATOR_ID_TYPE": "text",
        "CREATE_TABLE": "n",
        "POSTGRES_DBNAME": str(info["dbname"]),
        "POSTGRES_HOST": str(info["host"]),
        "POSTGRES_USER": str(info["user"]),
        "POSTGRES_PASSWORD": str(info["password"]),
        "POSTGRES_POOL_SIZE": str(connections),
        "POSTGRES_MAX_OVERFLOW": "4",
        **(settings or {}),
    }


class StockUnit:
    """Implements the domain's `UnitOfWork` with the library's repository; `save` saves."""

    def __init__(
        self, application: StockApplication, *, context: CommandContext, clock: Clock, ids: IdSource
    ) -> None:
        self.now: datetime = clock.now()
        self.envelope = Envelope(
            at=self.now,
            actor=context.actor,
            command_id=context.command_id,
            correlation_id=context.correlation_id,
            causation=context.causation,
        )
        self._application = application
        self._ids = ids
        self._touched: dict[str, Aggregate] = {}

    def new_id(self, prefix: str) -> str:
        return self._ids.new(prefix)

    def find(self, cls: type[A], id: str) -> A | None:
        known = self._touched.get(id)
        if known is None:
            try:
                known = cast(Any, self._application.repository).get(id)
            except AggregateNotFoundError:
                return None
            self._touched[id] = cast(Aggregate, known)
        return known if isinstance(known, cls) else None

    def get(self, cls: type[A], id: str) -> A:
        found = self.find(cls, id)
        if found is None:
            raise NotFound(id)
        return found

    def add(self, aggregate: Aggregate) -> None:
        self._touched[aggregate.id] = aggregate

    def personal(self, row: PersonalRow) -> None:
        """The peer saves events alone."""

    def tracking(self, name: str, position: int) -> None:
        """No figure's command records positions."""
        raise AssertionError(f"{name} {position}")

    def save(self) -> None:
        """One save of all that was touched."""
        self._application.save(*self._touched.values())
