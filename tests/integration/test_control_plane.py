"""What reads are told when the database goes away under them."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from adapters.bootstrap import control_plane
from adapters.process.settings import Settings
from domain.errors import Overloaded
from tests.conftest import Database


def end_of_connection(connection: psycopg.Connection[dict[str, Any]]) -> None:
    connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def one(connection: psycopg.Connection[dict[str, Any]]) -> int:
    row = connection.execute("SELECT 1 AS one").fetchone()
    assert row is not None
    return int(row["one"])


async def test_a_read_that_loses_the_database_may_be_tried_again_and_the_next_one_works(
    database: Database,
) -> None:
    with control_plane(Settings(database_url=database.application_url)) as plane:
        with pytest.raises(Overloaded):
            await plane.read(end_of_connection)
        assert await plane.read(one) == 1
