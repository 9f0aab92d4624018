"""What the writer remembers: bounded by bytes, the longest unused forgotten first; and which
streams are read from a snapshot."""

from __future__ import annotations

from datetime import UTC, datetime

from adapters.event_log import snapshots
from adapters.event_log.aggregates import AGGREGATES
from adapters.event_log.command_unit import AggregateCache
from domain.assets.file import File
from domain.log.aggregate import Aggregate, Envelope
from domain.log.idempotent_request import IdempotentRequest
from domain.log.stored import StoredObject

BOUNDED = {
    "gridline.credit_hold": "two events",
    "gridline.idempotent_request": "one event",
    "gridline.price_book": "one event for each price list",
}
"""Streams that stay short, and why."""


def test_every_stream_that_grows_without_bound_has_snapshots() -> None:
    without = {cls.TOPIC for cls in AGGREGATES if snapshots.interval(cls) is None}

    assert without == BOUNDED.keys()


def envelope() -> Envelope:
    return Envelope(
        at=datetime(2027, 1, 1, tzinfo=UTC),
        actor="test",
        command_id="c",
        correlation_id="c",
        causation="c",
    )


def small(name: str) -> Aggregate:
    made = IdempotentRequest(id=name, envelope=envelope(), body_sha256="0" * 64, result_id="r")
    made.collect_events()
    return made


def large(name: str, *, pins: int) -> File:
    file = File(
        id=name,
        envelope=envelope(),
        account_id="a",
        purpose="batch",
        object=StoredObject(key="files/x", bytes=1, sha256="0" * 64),
        expires_at=None,
        training=None,
    )
    for number in range(pins):
        file.pin(f"batch_{number}", envelope=envelope())
    file.collect_events()
    return file


def cache_of(loaded: list[str], *, bytes_max: int) -> AggregateCache:
    def load(_cls: type[Aggregate], id: str) -> Aggregate:
        loaded.append(id)
        return small(id)

    return AggregateCache(load, bytes_max=bytes_max)


def test_the_longest_unused_is_forgotten_first() -> None:
    loaded: list[str] = []
    cache = cache_of(loaded, bytes_max=10_000)
    for name in ("a", "b", "a", "c"):
        cache.find(IdempotentRequest, name)
    cache.trim()
    for name in ("a", "c", "b"):
        cache.find(IdempotentRequest, name)
    assert loaded == ["a", "b", "c", "b"]


def test_what_grows_weighs_more() -> None:
    loaded: list[str] = []
    cache = cache_of(loaded, bytes_max=100_000)
    for number in range(10):
        cache.find(IdempotentRequest, str(number))
    cache.trim()
    file = large("file", pins=0)
    cache.add(file)
    cache.trim()
    for number in range(15):
        file.pin(f"batch_{number}", envelope=envelope())
    file.collect_events()
    cache.find(File, "file")
    cache.trim()
    for number in range(10):
        cache.find(IdempotentRequest, str(number))
    assert loaded == [*map(str, range(10)), *map(str, range(6))]


def test_one_too_large_for_the_whole_bound_is_not_kept() -> None:
    loaded: list[str] = []
    cache = cache_of(loaded, bytes_max=50_000)
    cache.add(large("file", pins=20))
    cache.trim()
    cache.find(IdempotentRequest, "file")
    assert loaded == ["file"]
    cache.clear()
    cache.trim()
