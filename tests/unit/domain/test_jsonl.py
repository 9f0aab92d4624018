"""Lines out of bytes."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from domain.inputs.jsonl import Line, LineSplitter


def split(content: bytes, *, cuts: list[int] | None = None, limit: int = 50) -> list[Line]:
    splitter = LineSplitter(line_bytes_max=limit)
    edges = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts or [])})
    lines = [line for start, end in pairwise(edges) for line in splitter.feed(content[start:end])]
    return [*lines, *splitter.finish()]


FILES = st.lists(
    st.sampled_from([b"\n", b"\r\n", b"\r", b" ", b"\xef\xbb\xbf", b"{}", b"x" * 51, b"abc"])
).map(b"".join)


@given(FILES, st.lists(st.integers(min_value=0)))
def test_how_the_bytes_arrive_changes_nothing(content: bytes, cuts: list[int]) -> None:
    assert split(content, cuts=cuts) == split(content)


@given(FILES)
def test_lines_are_those_of_a_plain_split(content: bytes) -> None:
    plain = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [
        (number, None if len(text) > 50 else text)
        for number, text in enumerate((each.removesuffix(b"\r") for each in plain), start=1)
        if len(text) > 50 or text.strip(b" \t\r")
    ]
    assert [(line.number, line.content) for line in split(content)] == expected


@given(FILES)
def test_byte_ranges_hold_the_lines(content: bytes) -> None:
    for line in split(content):
        there = content[line.start_byte : line.end_byte]
        assert there.count(b"\n") <= 1
        if line.content is not None:
            assert there.removesuffix(b"\n").removesuffix(b"\r") == line.content


@given(FILES, st.integers(min_value=0))
def test_a_part_of_a_file_reads_as_it_does_within_the_whole(content: bytes, choice: int) -> None:
    whole = split(content)
    if not whole:
        return
    first = choice % len(whole)
    number, byte = whole[first].number, whole[first].start_byte
    part = LineSplitter(line_bytes_max=50, first_line=number, start_byte=byte)
    assert [*part.feed(content[byte:]), *part.finish()] == whole[first:]


def test_only_a_line_feed_ends_a_line() -> None:
    text = "a\u2028b\u0085c\x0bd\x0ce".encode()
    assert [line.content for line in split(text)] == [text]


def test_the_line_end_is_not_part_of_the_limit() -> None:
    for end in (b"\n", b"\r\n", b""):
        assert split(b"x" * 50 + end)[0].content == b"x" * 50
        assert split(b"x" * 51 + end)[0].content is None


def test_an_endless_line_takes_no_memory() -> None:
    splitter = LineSplitter(line_bytes_max=1024 * 1024)
    chunk = b"y" * 65_536
    tracemalloc.start()
    for _ in range(1_000):
        splitter.feed(chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 1024 * 1024
    assert [line.content for line in splitter.finish()] == [None]
