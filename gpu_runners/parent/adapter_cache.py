"""Adapters' files on the runner's local disk, downloaded once, by content.

`chunk.py` asks for the directory that an engine loads. A directory is complete or not there; the
oldest ones that no running chunk uses go when there are too many.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path

from domain.messages import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterRef, ObjectRef
from domain.ports import Objects

ADAPTERS_MAX = 32
FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)


class DigestMismatch(Exception):
    """What the store returned is not what was recorded."""


class AdapterCache:
    """A directory of directories, each named by the digests of its two files."""

    def __init__(self, root: Path, objects: Objects) -> None:
        self._root = root
        self._objects = objects
        self._used: OrderedDict[str, int] = OrderedDict()
        self._lock = asyncio.Lock()

    async def acquire(self, adapter: AdapterRef) -> Path:
        """The adapter's directory, kept until `release`. Raises ObjectMissing, DigestMismatch."""
        name = _name(adapter)
        async with self._lock:
            directory = self._root / name
            if not directory.is_dir():
                await self._download(adapter, directory)
            self._used[name] = self._used.get(name, 0) + 1
            self._used.move_to_end(name)
            return directory

    async def release(self, adapter: AdapterRef) -> None:
        """Lets the directory go when room is needed."""
        async with self._lock:
            self._used[_name(adapter)] -= 1
            idle = [name for name, users in self._used.items() if users == 0]
            for name in idle[: max(0, len(self._used) - ADAPTERS_MAX)]:
                del self._used[name]
                await asyncio.to_thread(shutil.rmtree, self._root / name)

    async def _download(self, adapter: AdapterRef, directory: Path) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=self._root, prefix="."))
        try:
            for name, ref in zip(FILES, (adapter.config, adapter.weights), strict=True):
                await download(self._objects, ref, building / name)
            await asyncio.to_thread(building.rename, directory)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


async def download(objects: Objects, ref: ObjectRef, path: Path) -> None:
    """Streams an object to a file and checks its digest. Raises ObjectMissing, DigestMismatch."""
    digest = hashlib.sha256()
    with path.open("wb") as stream:
        async for chunk in objects.get(ref.key):
            digest.update(chunk)
            await asyncio.to_thread(stream.write, chunk)
    if digest.hexdigest() != ref.sha256:
        raise DigestMismatch(ref.key)


def _name(adapter: AdapterRef) -> str:
    both = f"{adapter.config.sha256}/{adapter.weights.sha256}"
    return hashlib.sha256(both.encode()).hexdigest()
