"""The object store: a local directory, or S3, Google Cloud Storage and Azure through obstore.

The API stores uploads here, runners read inputs and write results. Keys are immutable and hold no
customer text. Streams are never held in memory as a whole, and an object that a method returned for
is durable: on a local disk the file and its directory are synced first.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.store import from_url

from domain.errors import StoreAway
from domain.log.stored import StoredObject
from domain.ports import ObjectMissing, Objects

if TYPE_CHECKING:
    from obstore.store import RetryConfig

PIECE_BYTES = 1 << 20
"""How much is read or written at a time."""
PART_BYTES = 8 << 20
"""A part of a multipart upload; at 10,000 parts this allows 80 GB."""
PARTS_AT_ONCE = 4
UNFINISHED = ".unfinished"
UNFINISHED_SECONDS_MAX = 86_400
"""What a killed process left behind is removed after this."""
PUT_TRIES = 5


_MISSING = (FileNotFoundError, obstore.exceptions.NotFoundError)
_PATIENT: RetryConfig = {"max_retries": 10, "retry_timeout": timedelta(minutes=3)}
_WHILE_CLIENTS_WAIT: RetryConfig = {"max_retries": 3, "retry_timeout": timedelta(seconds=15)}
"""Enough for a lost connection: a store that is away is told to whoever asked while they listen."""
_REMOTE = (OSError, obstore.exceptions.BaseError)


def open_store(url: str, *, clients_wait: bool = False) -> Objects:
    """`file:///directory`, `s3://bucket/prefix`, `gs://…` or `az://…`; credentials and endpoints of
    the remote ones come from their usual environment variables. A remote one that is away is tried
    for minutes, unless `clients_wait` for the answer. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return DiskObjects(Path(unquote(parts.path)))
    if parts.scheme in ("s3", "gs", "az"):
        return RemoteObjects(url, retry=_WHILE_CLIENTS_WAIT if clients_wait else _PATIENT)
    raise ValueError(f"GRIDLINE_OBJECT_STORE_URL={url!r} is none of file://, s3://, gs://, az://")


class DiskObjects:
    """`domain.ports.Objects` in a local directory; several processes may share it."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._unfinished = self._root / UNFINISHED
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._unfinished.mkdir(mode=0o700, exist_ok=True)
        _remove_older_than(self._unfinished, seconds=UNFINISHED_SECONDS_MAX)

    async def put(self, key: str, chunks: AsyncIterator[bytes]) -> StoredObject:
        target = self._path(key)
        unfinished = self._unfinished / secrets.token_hex(16)
        digest, size = hashlib.sha256(), 0
        try:
            with _answering(OSError):
                output = unfinished.open("xb", buffering=0)
            with output:
                async for piece in _pieces(chunks):
                    with _answering(OSError):
                        await asyncio.to_thread(_append, output, digest, piece)
                    size += len(piece)
                with _answering(OSError):
                    await asyncio.to_thread(os.fsync, output.fileno())
                    await asyncio.to_thread(self._move_durably, unfinished, target)
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        return StoredObject(key=key, bytes=size, sha256=digest.hexdigest())

    async def put_file(self, key: str, path: Path) -> StoredObject:
        return await self.put(key, _read_file(path, start_byte=0, end_byte=None))

    async def get(
        self, key: str, *, start_byte: int = 0, end_byte: int | None = None
    ) -> AsyncIterator[bytes]:
        path = self._path(key)
        with _answering(OSError):
            if not path.is_file():
                self._must_be_there()
                raise ObjectMissing(key)
            async for piece in _read_file(path, start_byte=start_byte, end_byte=end_byte):
                yield piece

    async def size_bytes(self, key: str) -> int:
        path = self._path(key)
        with _answering(OSError):
            if not path.is_file():
                self._must_be_there()
                raise ObjectMissing(key)
            return path.stat().st_size

    async def delete(self, key: str) -> None:
        with _answering(OSError):
            self._must_be_there()
            await asyncio.to_thread(self._remove, self._path(key))

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        with _answering(OSError):
            self._must_be_there()
            keys = await asyncio.to_thread(lambda: sorted(self._keys(prefix)))
        for key in keys:
            yield key

    async def check(self) -> None:
        probe = self._unfinished / secrets.token_hex(16)
        with _answering(OSError):
            await asyncio.to_thread(probe.touch)
            await asyncio.to_thread(probe.unlink)

    def _must_be_there(self) -> None:
        """A disk that is not mounted has lost nothing."""
        self._unfinished.stat()

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts) or parts[0] == UNFINISHED:
            raise ValueError(f"{key!r} is no object key")
        return self._root.joinpath(*parts)

    def _move_durably(self, source: Path, target: Path) -> None:
        for attempt in range(PUT_TRIES):
            created = [p for p in target.parents if p != self._root and not p.exists()]
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                source.replace(target)
            except FileNotFoundError:
                # A delete has just removed the directory, because it was empty.
                if attempt == PUT_TRIES - 1:
                    raise
                continue
            for directory in {target.parent, *(path.parent for path in created)}:
                _sync_directory(directory)
            return

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or gone
            for parent in path.parents:
                if parent == self._root:
                    break
                parent.rmdir()

    def _keys(self, prefix: str) -> Iterator[str]:
        top = self._root / prefix if prefix.endswith("/") else (self._root / prefix).parent
        for directory, folders, files in os.walk(top):
            if UNFINISHED in folders:
                folders.remove(UNFINISHED)
            for name in files:
                key = str((Path(directory) / name).relative_to(self._root))
                if key.startswith(prefix):
                    yield key


class RemoteObjects:
    """`domain.ports.Objects` in a bucket."""

    def __init__(self, url: str, *, retry: RetryConfig) -> None:
        self._store = from_url(url, retry_config=retry)

    async def put(self, key: str, chunks: AsyncIterator[bytes]) -> StoredObject:
        measured = _Measured(chunks)
        try:
            await obstore.put_async(
                self._store,
                key,
                measured.pieces(),
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )
        except Exception as error:
            if measured.failure is not None:
                raise measured.failure from error
            raise StoreAway from error
        return StoredObject(key=key, bytes=measured.bytes, sha256=measured.digest.hexdigest())

    async def put_file(self, key: str, path: Path) -> StoredObject:
        return await self.put(key, _read_file(path, start_byte=0, end_byte=None))

    async def get(
        self, key: str, *, start_byte: int = 0, end_byte: int | None = None
    ) -> AsyncIterator[bytes]:
        options: dict[str, Any] = {}
        if start_byte or end_byte is not None:
            size = await self.size_bytes(key)
            end_byte = size if end_byte is None else min(end_byte, size)
            if start_byte >= end_byte:
                return
            options["range"] = (start_byte, end_byte)
        with _answering(*_REMOTE):
            try:
                result = await obstore.get_async(self._store, key, options=options)  # type: ignore[arg-type]
            except _MISSING:
                raise ObjectMissing(key) from None
            async for piece in result.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    async def size_bytes(self, key: str) -> int:
        with _answering(*_REMOTE):
            try:
                return int((await obstore.head_async(self._store, key))["size"])
            except _MISSING:
                raise ObjectMissing(key) from None

    async def delete(self, key: str) -> None:
        with _answering(*_REMOTE), suppress(*_MISSING):
            await obstore.delete_async(self._store, key)

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        # Stores match a prefix by whole path segments; the rest of it is compared here.
        folder = prefix.rpartition("/")[0]
        with _answering(*_REMOTE):
            async for page in obstore.list(self._store, folder or None):
                for entry in page:
                    if entry["path"].startswith(prefix):
                        yield entry["path"]

    async def check(self) -> None:
        async for _ in self.list_keys(f"{UNFINISHED}/"):
            break


class _Measured:
    """A stream that is being stored, with what was seen of it. The client of remote stores wraps
    what its stream raises: it is kept here."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.failure: Exception | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in _pieces(self._chunks):
                await asyncio.to_thread(self.digest.update, piece)
                self.bytes += len(piece)
                yield piece
        except Exception as error:
            self.failure = error
            raise


@contextmanager
def _answering(*failures: type[Exception]) -> Iterator[None]:
    try:
        yield
    except failures as error:
        raise StoreAway from error


async def _pieces(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in pieces that are worth a hop to another thread."""
    gathered = bytearray()
    async for chunk in chunks:
        gathered += chunk
        if len(gathered) >= PIECE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)


async def _read_file(path: Path, *, start_byte: int, end_byte: int | None) -> AsyncIterator[bytes]:
    with path.open("rb", buffering=0) as source:
        source.seek(start_byte)
        position = start_byte
        while end_byte is None or position < end_byte:
            wanted = PIECE_BYTES if end_byte is None else min(PIECE_BYTES, end_byte - position)
            piece = await asyncio.to_thread(source.read, wanted)
            if not piece:
                return
            position += len(piece)
            yield piece


def _append(output: IO[bytes], digest: Any, piece: bytes) -> None:
    digest.update(piece)
    rest = memoryview(piece)
    while rest:
        rest = rest[output.write(rest) :]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_older_than(directory: Path, *, seconds: float) -> None:
    oldest = time.time() - seconds
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest:
                path.unlink()
