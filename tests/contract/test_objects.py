"""What the product relies on in an object store, on every kind that can be had here.

`GRIDLINE_TEST_S3` names a bucket (`s3://bucket/prefix`) to run it on as well; its endpoint and keys
come from the usual AWS_ variables.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from adapters.embedded.process import free_port
from adapters.objects import open_store
from domain.errors import FileTooLarge, StoreAway
from domain.ports import ObjectMissing, Objects
from tests.fakes import FakeObjects

S3_URL = os.environ.get("GRIDLINE_TEST_S3", "")
DURABLE_STORES = ["disk", *(["s3"] if S3_URL else [])]
STORES = [*DURABLE_STORES, "memory"]


@pytest.fixture(params=STORES)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "s3":
        return open_store(f"{S3_URL}/{uuid.uuid4().hex}")
    if request.param == "memory":
        return FakeObjects()
    return open_store(f"file://{tmp_path}/a%20store")


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def content(
    objects: Objects, key: str, *, start_byte: int = 0, end_byte: int | None = None
) -> bytes:
    pieces = objects.get(key, start_byte=start_byte, end_byte=end_byte)
    return b"".join([piece async for piece in pieces])


async def keys(objects: Objects, prefix: str) -> list[str]:
    return sorted([key async for key in objects.list_keys(prefix)])


async def test_what_is_put_comes_back_with_its_size_and_digest(objects: Objects) -> None:
    ref = await objects.put("files/file-1", stream(b"first\n", b"", b"second\n"))
    assert (ref.key, ref.bytes) == ("files/file-1", 13)
    assert ref.sha256 == hashlib.sha256(b"first\nsecond\n").hexdigest()
    assert await content(objects, "files/file-1") == b"first\nsecond\n"
    assert await objects.size_bytes("files/file-1") == 13


async def test_an_empty_object_is_an_object(objects: Objects) -> None:
    ref = await objects.put("files/empty", stream())
    assert ref.bytes == 0
    assert await objects.size_bytes("files/empty") == 0
    assert await content(objects, "files/empty") == b""


async def test_a_local_file_is_put_whole(objects: Objects, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "weights").write_bytes(data)
    ref = await objects.put_file("adapters/job/1/weights", tmp_path / "weights")
    assert (ref.bytes, ref.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert await content(objects, ref.key) == data


@pytest.mark.parametrize(
    ("start_byte", "end_byte", "expected"),
    [
        (0, 4, b"0123"),
        (4, None, b"456789"),
        (2, 5, b"234"),
        (8, 100, b"89"),
        (3, 3, b""),
        (10, None, b""),
        (99, 100, b""),
    ],
)
async def test_a_range_is_half_open_and_ends_with_the_object(
    objects: Objects, start_byte: int, end_byte: int | None, expected: bytes
) -> None:
    await objects.put("files/digits", stream(b"0123456789"))
    found = await content(objects, "files/digits", start_byte=start_byte, end_byte=end_byte)
    assert found == expected


async def test_a_missing_object_is_missing_to_every_read(objects: Objects) -> None:
    with pytest.raises(ObjectMissing):
        await content(objects, "files/none")
    with pytest.raises(ObjectMissing):
        await content(objects, "files/none", start_byte=1, end_byte=1)
    with pytest.raises(ObjectMissing):
        await objects.size_bytes("files/none")
    await objects.delete("files/none")


async def test_a_stream_that_breaks_leaves_nothing(objects: Objects) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * 20_000_000
        raise ConnectionResetError("client gone")

    with pytest.raises(ConnectionResetError):
        await objects.put("files/broken", broken())
    assert await keys(objects, "") == []


async def test_putting_equal_bytes_again_changes_nothing(objects: Objects) -> None:
    first = await objects.put("chunks/b/0/1/output.jsonl", stream(b"line\n"))
    assert await objects.put("chunks/b/0/1/output.jsonl", stream(b"line\n")) == first


async def test_deleting_one_object_leaves_its_neighbours(objects: Objects) -> None:
    for name in ("chunks/b/0/1", "chunks/b/0/2", "chunks/b/1/1", "chunks/bb/0/1"):
        await objects.put(name, stream(name.encode()))
    await objects.delete("chunks/b/0/1")
    assert await keys(objects, "chunks/b/") == ["chunks/b/0/2", "chunks/b/1/1"]
    assert await keys(objects, "chunks/b") == ["chunks/b/0/2", "chunks/b/1/1", "chunks/bb/0/1"]
    assert await keys(objects, "exports/") == []


@pytest.mark.parametrize("objects", DURABLE_STORES, indirect=True)
async def test_a_large_stream_does_not_grow_the_process(objects: Objects) -> None:
    chunk = bytes(1 << 16)
    process = psutil.Process()
    before = process.memory_info().rss
    seen: list[int] = []

    async def large() -> AsyncIterator[bytes]:
        for number in range(200_000_000 // len(chunk)):
            if number % 100 == 0:
                seen.append(process.memory_info().rss)
            yield chunk

    ref = await objects.put("files/large", large())
    size = 0
    async for piece in objects.get("files/large"):
        size += len(piece)
        seen.append(process.memory_info().rss)
    assert size == ref.bytes
    assert max(seen) - before < 64 * 1024 * 1024


@pytest.mark.parametrize("key", ["", "/etc/passwd", "files/../../x", "files//x", ".unfinished/x"])
async def test_a_key_cannot_leave_the_directory(tmp_path: Path, key: str) -> None:
    objects = open_store(f"file://{tmp_path}")
    with pytest.raises(ValueError, match="no object key"):
        await objects.put(key, stream(b"x"))


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="GRIDLINE_OBJECT_STORE_URL"):
        open_store("ftp://somewhere/x")


async def test_what_a_stream_raises_comes_out_of_put_as_it_is_and_nothing_is_stored(
    objects: Objects,
) -> None:
    mistake = FileTooLarge("Too large.")

    async def too_large() -> AsyncIterator[bytes]:
        yield b"x" * 3_000_000
        raise mistake

    with pytest.raises(FileTooLarge) as raised:
        await objects.put("files/file-1", too_large())
    assert raised.value is mistake
    with pytest.raises(ObjectMissing):
        await objects.size_bytes("files/file-1")
    await objects.check()


async def test_a_disk_that_is_not_mounted_is_away_and_has_lost_nothing(tmp_path: Path) -> None:
    objects = open_store(f"file://{tmp_path}/store")
    await objects.put("files/file-1", stream(b"x"))
    (tmp_path / "store").rename(tmp_path / "unmounted")
    await _is_away(objects)
    (tmp_path / "unmounted").rename(tmp_path / "store")
    assert await content(objects, "files/file-1") == b"x"


async def test_a_remote_store_that_does_not_answer_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    await _is_away(open_store("s3://bucket/prefix", clients_wait=True))


async def _is_away(objects: Objects) -> None:
    for asked in (
        objects.put("files/file-2", stream(b"y")),
        content(objects, "files/file-1"),
        objects.size_bytes("files/file-1"),
        objects.delete("files/file-1"),
        keys(objects, "files/"),
        objects.check(),
    ):
        with pytest.raises(StoreAway):
            await asked
