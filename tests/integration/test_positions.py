"""Where ingest goes on in a partition, whatever became of its broker, topic and deployment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from adapters.event_log.positions import go_on
from adapters.event_log.postgres import Connection, connect
from tests.conftest import Database

TOPIC = "gridline.progress"
NOTE = """
    INSERT INTO gridline_tracking (application_name, notification_id) VALUES (%s, %s)
"""


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    with connect(database.application_url, name="test") as opened:
        yield opened


def ask(
    connection: Connection, *, cluster: str = "c", topic: str = TOPIC, partition: int = 1, end: int
) -> tuple[str, int | None]:
    return go_on(connection, cluster_id=cluster, topic=topic, partition=partition, end=end)


def handle(connection: Connection, name: str, offset: int) -> None:
    connection.execute(NOTE, (name, offset))


def test_reading_goes_on_after_what_was_handled(connection: Connection) -> None:
    name, handled = ask(connection, end=0)
    assert handled is None
    handle(connection, name, 41)
    assert ask(connection, end=42) == (name, 41)
    assert ask(connection, end=99) == (name, 41)


@pytest.mark.parametrize(
    "other",
    [{"cluster": "d"}, {"topic": "restored.progress"}, {"partition": 11}],
    ids=["broker", "prefix", "partition"],
)
def test_another_broker_prefix_or_partition_has_positions_of_its_own(
    connection: Connection, other: dict[str, object]
) -> None:
    name, _ = ask(connection, end=0)
    handle(connection, name, 41)
    another, handled = ask(connection, end=50, **other)  # type: ignore[arg-type]
    assert another != name
    assert handled is None


def test_a_partition_shorter_than_what_was_handled_begins_a_new_life_each_time(
    connection: Connection,
) -> None:
    names = []
    for _ in range(3):
        name, handled = ask(connection, end=5)
        assert handled is None
        # As long as nothing of it was handled, the new life is the same one.
        assert ask(connection, end=5) == (name, None)
        handle(connection, name, 41)
        names.append(name)
    assert len(set(names)) == 3
    assert ask(connection, end=42) == (names[-1], 41)
