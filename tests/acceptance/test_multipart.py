"""The multipart reader: any cut of the stream, and the forms that clients really send."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.multipart import MultipartReader, bare_filename, boundary_of
from domain.errors import FileTooLarge, InvalidRequest

BOUNDARY = b"B"
BYTES_MAX = 100_000
Parts = list[tuple[str, str | None, bytes]]


async def _in_pieces(body: bytes, sizes: list[int]) -> AsyncIterator[bytes]:
    at = 0
    for size in sizes:
        yield body[at : at + size]
        at += size
    yield body[at:]


async def _read(body: bytes, sizes: list[int] | None = None) -> Parts:
    reader = MultipartReader(_in_pieces(body, sizes or []), boundary=BOUNDARY, bytes_max=BYTES_MAX)
    found: Parts = []
    while (head := await reader.next_part()) is not None:
        data = b"".join([piece async for piece in reader.data()])
        found.append((head.name, head.filename, data))
    return found


def _body(parts: list[tuple[bytes, bytes]]) -> bytes:
    return (
        b"".join(
            b"--B\r\nContent-Disposition: form-data; " + disposition + b"\r\n\r\n" + data + b"\r\n"
            for disposition, data in parts
        )
        + b"--B--\r\n"
    )


@given(
    data=st.lists(
        st.lists(st.sampled_from([b"\r", b"\n", b"-", b"B", b"\r\n--", b"x"]))
        .map(b"".join)
        .filter(lambda data: b"\r\n--B" not in data),
        min_size=1,
        max_size=3,
    ),
    sizes=st.lists(st.integers(min_value=0, max_value=7), max_size=60),
)
async def test_parts_come_back_whatever_they_hold_and_however_the_stream_is_cut(
    data: list[bytes], sizes: list[int]
) -> None:
    body = _body([(b'name="file"', each) for each in data])
    assert await _read(body, sizes) == [("file", None, each) for each in data]


async def test_what_stands_before_the_first_and_after_the_last_boundary_is_no_part() -> None:
    body = b"hello\r\n" + _body([(b'name="purpose"', b"batch")]) + b"bye"
    assert await _read(body) == [("purpose", None, b"batch")]


async def test_a_part_that_is_skipped_does_not_hide_the_next() -> None:
    body = _body([(b'name="file"', b"x" * 1000), (b'name="purpose"', b"batch")])
    reader = MultipartReader(_in_pieces(body, [10] * 50), boundary=BOUNDARY, bytes_max=BYTES_MAX)
    names = []
    while (head := await reader.next_part()) is not None:
        names.append(head.name)
    assert names == ["file", "purpose"]


@pytest.mark.parametrize(
    ("disposition", "filename"),
    [
        (b'name="file"; filename="t.jsonl"', "t.jsonl"),
        (b"name=file; filename=t.jsonl", "t.jsonl"),
        (b"name=\"file\"; filename*=utf-8''%E8%A8%93%E7%B7%B4%20data.jsonl", "訓練 data.jsonl"),
        (b'name="file"; filename="x"; filename*=iso-8859-1\'en\'%e9.jsonl', "é.jsonl"),
        ('name="file"; filename="訓練.jsonl"'.encode(), "訓練.jsonl"),
        (b'name="file"; filename="../../etc/x\\"y.jsonl"', 'x"y.jsonl'),
        (b'name="file"; filename="C:\\Users\\kim\\train.jsonl"', "train.jsonl"),
        (b'name="file"; filename="a%22b.jsonl"', 'a"b.jsonl'),
        (b'name="file"; filename="x; filename*=utf-8\'\'y"', "x; filename*=utf-8''y"),
        (b'name="file"; filename=""', "upload"),
        (b'name="file"; filename=".."', "upload"),
        (b'name="file"', "upload"),
        (b'name="file"; filename="a\x01b;c.jsonl"', "ab;c.jsonl"),
    ],
)
async def test_filenames_are_decoded_and_bare(disposition: bytes, filename: str) -> None:
    [(_, sent, _)] = await _read(_body([(disposition, b"x")]))
    assert bare_filename(sent) == filename


async def test_a_body_without_end_is_refused_wherever_its_bytes_are() -> None:
    for endless in (b"hello\r\n" * 20_000, _body([(b'name="file"', b"x")]) + b"bye" * 40_000):
        with pytest.raises(FileTooLarge):
            await _read(endless, [1_000] * 200)


def test_a_long_filename_is_cut_at_a_whole_character() -> None:
    cut = bare_filename("é" * 4000)
    assert len(cut.encode()) == 254


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--B",
        b"--B\r\n",
        b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\nhalf',
        b"--B\r\n\r\nno headers\r\n--B--",
        b'--Bx\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--B--',
        b"--B\r\nContent-Disposition: form-data\r\n\r\nno name\r\n--B--",
        b"--B\r\nX: " + b"y" * 20_000 + b"\r\n\r\nx\r\n--B--",
        b'--B\r\nContent-Disposition: form-data; name="file"\r\nX: '
        + b"y" * 20_000
        + b"\r\n\r\nx\r\n--B--",
    ],
)
async def test_what_is_not_multipart_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        await _read(body)


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=B", b"B"),
        ('Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
    ],
)
def test_boundaries_may_be_quoted(content_type: str, boundary: bytes) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data"])
def test_another_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidRequest):
        boundary_of(content_type)
