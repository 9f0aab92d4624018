"""In-memory stand-ins for the broker and the object store, for tests of one process.

They keep the ports' contracts (order within a topic, immutable keys) and nothing more; the real
ones are tested in `contract/` and `integration/`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from domain.errors import StoreAway
from domain.log.stored import StoredObject
from domain.ports import ObjectMissing, Record


class BrokerDown(Exception):
    """What a refused send raises."""


class FakeBroker:
    """Topics of one partition. The next `refuse_next` sends are refused; what was sent can be
    awaited."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Record]] = defaultdict(list)
        self.refuse_next = 0
        self._changed = asyncio.Condition()

    async def send(self, topic: str, *, key: str, value: bytes) -> None:
        """The Producer port."""
        if self.refuse_next:
            self.refuse_next -= 1
            raise BrokerDown
        async with self._changed:
            offset = len(self.topics[topic])
            self.topics[topic].append(Record(topic, 0, offset, key, value))
            self._changed.notify_all()

    async def stop(self) -> None:
        """The Producer port."""

    def consumer(self, topic: str) -> FakeConsumer:
        """A consumer that stands at the topic's end."""
        return FakeConsumer(self, topic)

    async def wait_for(
        self, topic: str, wanted: Callable[[list[Record]], bool], *, seconds: float = 5.0
    ) -> list[Record]:
        """The topic's records once they are as wanted; fails after some seconds."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: wanted(self.topics[topic]))
        return list(self.topics[topic])

    async def _more_than(self, topic: str, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.topics[topic]) > count)


class FakeConsumer:
    """The Consumer port over one topic of a FakeBroker."""

    def __init__(self, broker: FakeBroker, topic: str) -> None:
        self._broker = broker
        self._topic = topic
        self._position = len(broker.topics[topic])

    async def poll(self, *, timeout_seconds: float) -> Sequence[Record]:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._broker._more_than(self._topic, self._position)
        except TimeoutError:
            return []
        records = self._broker.topics[self._topic][self._position :]
        self._position += len(records)
        return records

    async def stop(self) -> None:
        """Nothing to close."""


class FakeObjects:
    """The Objects port over a dictionary."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.failures = 0
        """How many of the next operations raise StoreAway."""

    async def put(self, key: str, chunks: AsyncIterator[bytes]) -> StoredObject:
        return self.add(key, b"".join([chunk async for chunk in chunks]))

    async def put_file(self, key: str, path: Path) -> StoredObject:
        self._fail()
        return self.add(key, await asyncio.to_thread(path.read_bytes))

    async def get(
        self, key: str, *, start_byte: int = 0, end_byte: int | None = None
    ) -> AsyncIterator[bytes]:
        self._fail()
        if key not in self.stored:
            raise ObjectMissing(key)
        yield self.stored[key][start_byte:end_byte]

    async def size_bytes(self, key: str) -> int:
        if key not in self.stored:
            raise ObjectMissing(key)
        return len(self.stored[key])

    async def delete(self, key: str) -> None:
        self.stored.pop(key, None)

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        for key in sorted(self.stored):
            if key.startswith(prefix):
                yield key

    async def check(self) -> None:
        self._fail()

    def add(self, key: str, content: bytes) -> StoredObject:
        """Stores bytes; other bytes under a used key are a mistake of the caller's."""
        assert self.stored.get(key, content) == content
        self.stored[key] = content
        return StoredObject(key=key, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreAway


class FakeClock:
    """Time that stands still until a test moves it."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start

    def now(self) -> datetime:
        return self._now

    def advance(self, by: timedelta) -> None:
        self._now += by
