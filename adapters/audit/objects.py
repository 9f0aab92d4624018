"""`gridlined audit verify --objects`: every stored file and adapter is read, and its bytes compared
with the size and digest that the log has of them.

It reads whole objects, one at a time, so that it takes as long as the store takes to give them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from adapters.audit.book import Finding
from adapters.event_log.postgres import Connection
from domain.ports import ObjectMissing, Objects

OBJECTS = "objects are what the log says"

_REFERENCES = """
    SELECT id, object_key AS key, bytes, sha256 FROM files WHERE deleted_at IS NULL
    UNION ALL
    SELECT id, ref ->> 'key', (ref ->> 'bytes')::bigint, ref ->> 'sha256'
    FROM models CROSS JOIN LATERAL (VALUES (config), (weights)) AS refs (ref)
    WHERE deleted_at IS NULL
    ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class _Reference:
    subject: str
    key: str
    bytes: int
    sha256: str


async def compare_objects(connection: Connection, objects: Objects, find: Finding) -> int:
    """Returns how many objects were read. Deleted files and models have none; those that batches
    and jobs in progress wrote are no file yet."""
    count = 0
    for reference in list(_references(connection)):
        count += 1
        try:
            size, sha256 = await _measured(objects, reference.key)
        except ObjectMissing:
            find(OBJECTS, reference.subject, f"the store does not have {reference.key}")
            continue
        if (size, sha256) != (reference.bytes, reference.sha256):
            find(OBJECTS, reference.subject, f"{reference.key} holds other bytes")
    return count


def _references(connection: Connection) -> Iterator[_Reference]:
    for row in connection.execute(_REFERENCES).fetchall():
        yield _Reference(
            subject=row["id"], key=row["key"], bytes=row["bytes"], sha256=row["sha256"]
        )


async def _measured(objects: Objects, key: str) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    async for piece in objects.get(key):
        size += len(piece)
        digest.update(piece)
    return size, digest.hexdigest()
