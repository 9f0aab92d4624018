"""What counts as JSON."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.inputs.strict_json import InvalidJson, parse_json

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(JSON_VALUES, st.booleans())
def test_what_json_writes_reads_back(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{} {}",
        b"{},",
        b'{"a": 1, "a": 1}',
        b'[{"b": {"a": 1, "a": 2}}]',
        b"NaN",
        b'{"a": Infinity}',
        b"[-Infinity]",
        b"1e999",
        b"-1e999",
        b'"\\ud800"',
        b'{"\\uDC00": 1}',
        b'"\\ude00\\ud83d"',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\x00"',
        b'"tab\there"',
        b"\xef\xbb\xbf{}",
        b"{'a': 1}",
        b"[1,]",
        b"01",
        b"1" * 5_000,
        b"[" * 65 + b"]" * 65,
        b'{"a":' * 65 + b"1" + b"}" * 65,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
    ],
)
def test_what_readers_disagree_on_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidJson):
        parse_json(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 64 + b"]" * 64,
        json.dumps(["[" * 100, "{" * 100]).encode(),
        json.dumps([[]] * 200).encode(),
        b'"\\ud83d\\ude00"',
        b'"\\\\ud800"',
        b" \t[1]\r",
        b"1e308",
    ],
)
def test_what_only_looks_wrong_is_accepted(raw: bytes) -> None:
    parse_json(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"secretword": "secretword", "secretword": 1}',
        b"secretword",
        b'"secretword\xff"',
        b'"secretword" "secretword"',
    ],
)
def test_no_refusal_quotes_what_it_read(raw: bytes) -> None:
    with pytest.raises(InvalidJson) as refused:
        parse_json(raw)
    assert "secretword" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"\x1f\x8b\x08\x00\xff", "gzip"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
    ],
)
def test_files_of_another_format_are_recognised(raw: bytes, word: str) -> None:
    with pytest.raises(InvalidJson, match=word):
        parse_json(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" + b"[]," * 250_000 + b"[]]",
        b'{"a": [' + b"{}," * 250_000 + b"{}]}",
        b"[" + b'{"a":""},' * 250_000 + b"1]",
    ],
)
def test_millions_of_nothings_are_refused_before_they_are_read(raw: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(InvalidJson, match="more than 250,000 objects and arrays"):
        parse_json(raw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1024 * 1024


def test_brackets_in_text_are_text() -> None:
    text = '[{"' * 200_000 + "\\"
    assert parse_json(json.dumps([text, {}]).encode()) == [text, {}]
    with pytest.raises(InvalidJson, match="cannot be read"):
        parse_json(b'["' + b'\\"[' * 300_000)
