"""A line is skimmed as a JSON reader would read it, in little memory, whatever it holds."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from domain.messages import BatchChunkTask
from gpu_runners.parent.chunk_input import InputDamaged, RequestLine, fetch, members, read_lines
from tests.fakes import FakeObjects

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | st.sampled_from(['"', "\\", "\\\"", "}]{[,:", "\u2028", "\U0001f600"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=5)
LAYOUTS = st.sampled_from(
    [{}, {"separators": (",", ":")}, {"ensure_ascii": False}, {"separators": (" ,\t", " :\r ")}]
)


@given(OBJECTS, LAYOUTS)
@example({}, {})
@example({'a"b\\': ['"', "\\", {"]": "}"}]}, {})
def test_members_are_those_that_a_json_reader_finds(
    value: dict[str, Any], layout: dict[str, Any]
) -> None:
    text = f" \t{json.dumps(value, **layout)}\r".encode()
    found = {key: json.loads(text[start:end]) for key, start, end in members(text)}
    assert found == value


@pytest.mark.parametrize(
    "text",
    ["", "[]", "1", "{", '{"a"', '{"a":', '{"a":}', '{"a":[}', '{"a":"', "{a:1}", '{"a" 1}'],
)
def test_what_is_no_object_is_an_error_and_no_endless_search(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever the reason
        list(members(text.encode()))


def digest_of(content: bytes) -> str:
    """As batch validation makes it: of the lines that are no blank ones."""
    lines = [line.removesuffix(b"\r") for line in content.split(b"\n")]
    kept = [line + b"\n" for line in lines if line.strip()]
    return hashlib.sha256(b"".join(kept)).hexdigest()


def chunk(content: bytes, **fields: Any) -> tuple[FakeObjects, BatchChunkTask]:
    objects = FakeObjects()
    ref = objects.add("files/1", b"before\n" + content + b"after")
    task = {
        "input_key": ref.key,
        "start_byte": 7,
        "end_byte": 7 + len(content),
        "first_line": 2,
        "requests": 2,
        "sha256": digest_of(content),
        "endpoint": "/v1/chat/completions",
        "base": "b",
        "output_prefix": "chunks/1/",
    }
    return objects, BatchChunkTask.model_validate({**task, **fields})


async def lines_of(tmp_path: Path, content: bytes, **fields: Any) -> tuple[RequestLine, ...]:
    objects, task = chunk(content, **fields)
    path = tmp_path / "input"
    await fetch(objects, task, path)
    with path.open("rb") as file:
        return read_lines(file, task)


LINE = b'{"custom_id":"\\u00e9\\"1","body": {"x":[1], "model":"m"} ,"url":"u"}'


async def test_lines_are_known_by_name_and_by_where_their_body_stands(tmp_path: Path) -> None:
    content = LINE + b"\r\n\n \n" + LINE.replace(b'"m"', b'"ft:m"') + b"\n"
    one, two = await lines_of(tmp_path, content)
    assert (one.number, one.custom_id, one.model) == (2, '\u00e9"1', "m")
    assert (two.number, two.custom_id, two.model) == (5, '\u00e9"1', "ft:m")
    assert content[one.body_start : one.body_end] == b'{"x":[1], "model":"m"}'
    assert content[two.body_start : two.body_end] == b'{"x":[1], "model":"ft:m"}'


@pytest.mark.parametrize(
    "content",
    [LINE + b"\n", LINE + b"\n" + LINE + b"\n" + LINE, LINE + b"\n{}\n", LINE + b"\nnull\n"],
    ids=["too few", "too many", "no body", "no object"],
)
async def test_other_lines_than_those_that_were_checked_are_an_error(
    tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(InputDamaged):
        await lines_of(tmp_path, content)


async def test_lines_of_other_bytes_than_those_that_were_checked_are_an_error(
    tmp_path: Path,
) -> None:
    content = LINE + b"\n" + LINE + b"\n"
    assert len(await lines_of(tmp_path, content)) == 2
    with pytest.raises(InputDamaged):
        await lines_of(tmp_path, content, sha256=digest_of(content.replace(b"1]", b"2]")))


SKIM = """
import resource, sys
from gpu_runners.parent.chunk_input import members
def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
begin, filler, end = (argument.encode() for argument in sys.argv[1:])
text = b'{"body":' + begin + filler * (15 * 2**20 // len(filler)) + end + b"}"
before = most()
(found,) = members(text)
assert text[found[1] : found[2]].endswith(end) and found[2] == len(text) - 1
print(most() - before)
"""


@pytest.mark.parametrize(
    ("begin", "filler", "end"),
    [("[", "[],", "0]"), ('"', "\\u0000", '"'), ('"', "é\\n", '"'), ("[", "1,", "1]")],
    ids=["nested arrays", "escapes", "long text", "numbers"],
)
def test_skimming_takes_no_memory_of_its_own(begin: str, filler: str, end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SKIM, begin, filler, end],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20 * 2**20
