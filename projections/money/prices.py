"""The price lists that were ever published; quotes and receipts name theirs by its version."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from domain.ledger.prices import PriceList
from projections.projection import Statement
from projections.read_model import Connection, ReadModel

_PUBLISHED = """
    INSERT INTO price_lists (version, published_at, list) VALUES (%(version)s, %(at)s, %(list)s)
"""
_IN_FORCE = """
    SELECT list FROM price_lists, LATERAL (
        SELECT (list ->> 'effective_from')::timestamptz <= %(now)s AS effective) AS by_now
    ORDER BY effective DESC, CASE WHEN effective THEN -version ELSE version END LIMIT 1
"""
_OF_VERSION = "SELECT list FROM price_lists WHERE version = %(version)s"


def in_force(connection: Connection, now: datetime) -> PriceList | None:
    """The list that new quotes pin, as `PriceBook.in_force`; None before any is published."""
    row = connection.execute(_IN_FORCE, {"now": now}).fetchone()
    return PriceList.model_validate(row["list"]) if row is not None else None


def of_version(connection: Connection, version: int) -> PriceList | None:
    """A pinned list."""
    row = connection.execute(_OF_VERSION, {"version": version}).fetchone()
    return PriceList.model_validate(row["list"]) if row is not None else None


def _published(event: Any, _position: int) -> list[Statement]:
    parameters = {
        "version": event.prices.version,
        "at": event.envelope.at,
        "list": Jsonb(event.prices.model_dump(mode="json")),
    }
    return [(_PUBLISHED, parameters)]


PRICES = ReadModel(
    name="prices",
    tables=("price_lists",),
    handlers={
        "gridline.price_book.opened": _published,
        "gridline.price_book.published": _published,
    },
)
