"""Whether the store has an object as the log or a report says: its bytes are read for it.

Ingest asks before an adapter is registered, the finaliser while it copies a chunk's lines: what was
reported of an object is believed of none.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from domain.log.stored import StoredObject
from domain.ports import ObjectMissing, Objects


class OtherBytes(Exception):
    """The object under that key is not the one that was reported."""


async def is_stored(objects: Objects, claimed: StoredObject) -> bool:
    """Whether it is there with these bytes. It is read only where its size is right."""
    try:
        if await objects.size_bytes(claimed.key) != claimed.bytes:
            return False
        async for _ in as_stored(objects, claimed):
            pass
    except (ObjectMissing, OtherBytes):
        return False
    return True


async def as_stored(objects: Objects, ref: StoredObject) -> AsyncIterator[bytes]:
    """The object's bytes. Raises OtherBytes, at its end, if they are not what was stored; and
    ObjectMissing."""
    digest, size = hashlib.sha256(), 0
    async for piece in objects.get(ref.key):
        digest.update(piece)
        size += len(piece)
        yield piece
    if (size, digest.hexdigest()) != (ref.bytes, ref.sha256):
        raise OtherBytes(ref.key)
