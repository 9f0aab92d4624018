"""What the rules and the processes need of the outside world, as protocols.

`adapters/bootstrap.py` chooses the real things; tests hand in fakes that pass the same contract
suites.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from domain.log.stored import StoredObject


class Clock(Protocol):
    """The one source of time of a process."""

    def now(self) -> datetime:
        """Timezone-aware, UTC."""
        ...


class IdSource(Protocol):
    """The one source of randomness for ids."""

    def new(self, prefix: str) -> str:
        """prefix + 32 hex digits."""
        ...


class ObjectMissing(Exception):
    """No object under that key."""


class Objects(Protocol):
    """The object store. Keys are immutable: written once, or again with equal bytes. Every method
    raises StoreAway where the store does not answer."""

    async def put(self, key: str, chunks: AsyncIterator[bytes]) -> StoredObject:
        """Stores a stream durably (fsync on a local disk) and returns its size and SHA-256. What
        the stream raises comes out as it is, and then nothing is stored under `key`."""
        ...

    async def put_file(self, key: str, path: Path) -> StoredObject:
        """Stores a local file durably."""
        ...

    def get(
        self, key: str, *, start_byte: int = 0, end_byte: int | None = None
    ) -> AsyncIterator[bytes]:
        """Streams bytes [start_byte, end_byte). Raises ObjectMissing."""
        ...

    async def size_bytes(self, key: str) -> int:
        """Raises ObjectMissing."""
        ...

    async def delete(self, key: str) -> None:
        """Deletes the object; a missing one is no error."""
        ...

    def list_keys(self, prefix: str) -> AsyncIterator[str]:
        """All keys under a prefix."""
        ...

    async def check(self) -> None:
        """Whether the store can be used at all."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """One message read from a topic. `topic` has the prefix of the deployment removed;
    `position_name` names the life of the partition in which `offset` counts, where its reader keeps
    positions."""

    topic: str
    partition: int
    offset: int
    key: str
    value: bytes
    position_name: str = ""


class Producer(Protocol):
    """Sends messages. A send returns once the broker has acknowledged it, and raises within some
    seconds where it does not."""

    async def send(self, topic: str, *, key: str, value: bytes) -> None: ...

    async def stop(self) -> None: ...


class Consumer(Protocol):
    """Reads messages, in order within a partition. `records_behind` is how many it had not read
    when it last looked, some seconds ago."""

    @property
    def records_behind(self) -> int: ...

    async def poll(self, *, timeout_seconds: float) -> Sequence[Record]:
        """The next records, or none when the time is up."""
        ...

    async def stop(self) -> None: ...
