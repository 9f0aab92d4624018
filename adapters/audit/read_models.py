"""The audit's proof of every read model: it is derived from the log again, by the product's own
projections, into temporary tables, and compared with what is stored, whole rows, table by table.

The temporary tables have the names of the real ones and stand before them in the search path, so
that a projection's constant SQL writes to them; they go with the audit's transaction. What money
shows is compared once more with the book's independent sums (`rows.py`), since here a fault of a
projection would be on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from adapters.audit.book import Finding
from adapters.event_log.postgres import Connection
from domain.log.aggregate import Aggregate
from projections.projection import Projection, Statement, run_statements
from projections.registry import FOLLOWING, INLINE

ROWS = "the rows are what the log says"
DERIVED = "18 read models follow from the log"
DIFFERENCES_NAMED_MAX = 100
"""Of one table; the others are counted."""

_STORED = "SELECT current_schema() AS name"
_POSITIONS = """
    SELECT application_name, notification_id FROM gridline_tracking
    WHERE application_name = ANY(%s)
"""
_PRIMARY_KEY = """
    SELECT a.attname AS name FROM pg_index i
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey)
    WHERE i.indrelid = %s::regclass AND i.indisprimary ORDER BY a.attnum
"""
_CREATE = "CREATE TEMPORARY TABLE {table} (LIKE {stored} INCLUDING ALL) ON COMMIT DROP"
_DIFFERING = """
    SELECT to_jsonb(derived) AS derived, to_jsonb(stored) AS stored
    FROM pg_temp.{table} AS derived FULL JOIN {stored} AS stored USING ({key})
    WHERE ROW(derived.*) IS DISTINCT FROM ROW(stored.*)
    ORDER BY {key}
"""


def follower_positions(connection: Connection) -> dict[str, int]:
    """How far each read model that follows the log has come; 0 for one that never started."""
    names = [model.name for model in FOLLOWING]
    rows = connection.execute(_POSITIONS, (names,)).fetchall()
    found = {row["application_name"]: int(row["notification_id"]) for row in rows}
    return {name: found.get(name, 0) for name in names}


class DerivedReadModels:
    """Fed with every event in order, inside the audit's one transaction. `through` is how far each
    follower is compared."""

    def __init__(self, connection: Connection, *, through: dict[str, int], find: Finding) -> None:
        self._connection = connection
        self._through = through
        self._find = find
        self._models: tuple[Projection, ...] = (*INLINE, *FOLLOWING)
        self._waiting: list[Statement] = []
        self._failed = False
        row = connection.execute(_STORED).fetchone()
        assert row is not None
        self._stored = str(row["name"])
        for table in self._tables():
            create = sql.SQL(_CREATE).format(
                table=sql.Identifier(table), stored=sql.Identifier(self._stored, table)
            )
            connection.execute(create)
        self._shadow(True)

    def take(self, event: Aggregate.Event, position: int) -> None:
        """One event; `flush` runs what it asks for."""
        for model in self._models:
            if position <= self._through.get(model.name, position):
                try:
                    self._waiting += model.apply(event, position)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                    self._find(DERIVED, event.originator_id, f"{model.name}: {_kind(error)}")

    def flush(self) -> None:
        """Runs what the events since the last call asked for."""
        statements, self._waiting = self._waiting, []
        if self._failed:
            return
        try:
            with self._connection.transaction():
                run_statements(self._connection, statements)
        except psycopg.Error as error:
            # Its text can quote a row.
            self._find(DERIVED, "the log", f"its rows cannot be written: {_kind(error)}")
            self._failed = True

    def compare(self) -> None:
        """Names every row that is not the derived one. The stored tables are seen again after."""
        self.flush()
        self._shadow(False)
        if not self._failed:
            for table in self._tables():
                self._compare(table)

    def _compare(self, table: str) -> None:
        stored = sql.Identifier(self._stored, table)
        name = stored.as_string(self._connection)
        key = [row["name"] for row in self._connection.execute(_PRIMARY_KEY, (name,)).fetchall()]
        query = sql.SQL(_DIFFERING).format(
            table=sql.Identifier(table),
            stored=stored,
            key=sql.SQL(", ").join(map(sql.Identifier, key)),
        )
        rows = self._connection.execute(query).fetchall()
        for row in rows[:DIFFERENCES_NAMED_MAX]:
            self._find(ROWS, *_difference(table, key, row["derived"], row["stored"]))
        if len(rows) > DIFFERENCES_NAMED_MAX:
            self._find(ROWS, table, f"{len(rows) - DIFFERENCES_NAMED_MAX} more rows differ")

    def _shadow(self, on: bool) -> None:
        """Whether names of tables mean the temporary ones."""
        order = ["pg_temp", self._stored] if on else [self._stored, "pg_temp"]
        path = sql.SQL(", ").join(map(sql.Identifier, order))
        self._connection.execute(sql.SQL("SET LOCAL search_path = {}").format(path))

    def _tables(self) -> list[str]:
        return [table for model in self._models for table in model.tables]


def _difference(
    table: str, key: Sequence[str], derived: dict[str, Any] | None, stored: dict[str, Any] | None
) -> tuple[str, str]:
    """(subject, message) of a differing row."""
    row = stored or derived
    assert row is not None
    subject = f"{table} {' '.join(str(row[name]) for name in key)}"
    if derived is None:
        return subject, "the log knows no such thing"
    if stored is None:
        return subject, "the row is missing"
    differing = [name for name in derived if derived[name] != stored[name]]
    return subject, f"differs in {', '.join(differing)}"


def _kind(error: Exception) -> str:
    return type(error).__name__
