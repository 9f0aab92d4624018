"""What a child says arrives whole, in lines of bounded length, whatever its size."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from gpu_runners.child_pipes import (
    LINE_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    MessageTooLong,
    pack_vector,
    unpack_vector,
    write_message,
)
from gpu_runners.parent.child import Child, ChildGone

SPEAK = """
import sys
from gpu_runners.child_pipes import write_message
for size in map(int, sys.argv[1:]):
    write_message(sys.stdout, {"type": "long", "text": "+é" * size})
"""
ENDLESS = "import sys\nwhile True: sys.stdout.write('+' + 1000 * 'x' + chr(10))"
ONE_LINE = f"import sys\nsys.stdout.write({2 * LINE_BYTES_MAX} * 'x' + chr(10)); sys.stdin.read()"


async def said(*command: str) -> dict[str, Any]:
    child = await Child.start([sys.executable, "-c", *command])
    try:
        return await child.receive(silence_seconds_max=60)
    finally:
        await child.stop(grace_seconds=0)


async def test_a_message_of_many_lines_arrives_whole_and_the_next_one_too() -> None:
    sizes = [1, LINE_BYTES_MAX, 2]
    child = await Child.start([sys.executable, "-c", SPEAK, *map(str, sizes)])
    try:
        texts = [(await child.receive(silence_seconds_max=60))["text"] for _ in sizes]
    finally:
        await child.stop()
    assert texts == ["+é" * size for size in sizes]


def test_no_line_is_longer_than_the_bound() -> None:
    out = io.StringIO()
    write_message(out, {"text": "x" * (3 * LINE_BYTES_MAX)})
    lines = out.getvalue().split("\n")
    assert max(map(len, lines)) <= LINE_BYTES_MAX
    assert json.loads("".join(line.removeprefix("+") for line in lines))["text"].count("x") > 0


def test_what_is_too_long_for_any_message_is_not_begun() -> None:
    out = io.StringIO()
    with pytest.raises(MessageTooLong):
        write_message(out, {"text": "x" * MESSAGE_BYTES_MAX})
    assert out.getvalue() == ""


@pytest.mark.parametrize("program", [ENDLESS, ONE_LINE], ids=["no end", "one line"])
async def test_a_child_that_passes_the_bounds_is_ended(program: str) -> None:
    with pytest.raises(ChildGone):
        await said(program)


def test_a_vector_arrives_as_it_was_sent() -> None:
    assert unpack_vector(pack_vector([0.5, -1.25, 0.1])) == pytest.approx([0.5, -1.25, 0.1])
