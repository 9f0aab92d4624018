"""What a child says arrives whole: short lines, and long payloads piece by piece."""

from __future__ import annotations

import io
import sys

import pytest

from gpu_runners.child_pipes import (
    LINE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    MessageTooLong,
    pack_vector,
    unpack_vector,
    write_message,
)
from gpu_runners.parent.child import Child, ChildGone

SPEAK = """
import sys
from gpu_runners.child_pipes import take_standard_output, write_message
out = take_standard_output()
for size in map(int, sys.argv[1:]):
    write_message(out, {"type": "told", "size": size}, b"x" * size)
    print("noise")
"""
ENDS_EARLY = "print('{\"payload_bytes\": 100}\\n' + 60 * 'x', end='', flush=True)"
HALF_A_LINE = "print('{\"type\":', end='', flush=True)"
NO_JSON = "print('{', flush=True); import sys; sys.stdin.read()"
ONE_LINE = f"import sys; sys.stdout.write({2 * LINE_BYTES_MAX} * 'x' + chr(10)); sys.stdin.read()"
SILENT = "import sys; sys.stdin.read()"
SECONDS = 60.0


async def started(program: str, *arguments: str) -> Child:
    return await Child.start([sys.executable, "-c", program, *arguments])


async def all_of(child: Child) -> None:
    while True:
        await child.receive(silence_seconds_max=2.0)
        await payload(child)


async def payload(child: Child) -> bytes:
    pieces = [piece async for piece in child.payload(silence_seconds_max=SECONDS)]
    assert all(len(piece) <= LINE_BYTES_MAX for piece in pieces)
    return b"".join(pieces)


async def test_a_long_payload_arrives_whole_in_short_pieces_and_so_does_the_next_message() -> None:
    sizes = [0, 1, 5 * LINE_BYTES_MAX, 2]
    child = await started(SPEAK, *map(str, sizes))
    for size in sizes:
        assert (await child.receive(silence_seconds_max=SECONDS))["size"] == size
        assert await payload(child) == b"x" * size
    await child.stop()


async def test_a_payload_that_nobody_read_is_passed_over() -> None:
    child = await started(SPEAK, str(3 * LINE_BYTES_MAX), "7")
    assert (await child.receive(silence_seconds_max=SECONDS))["size"] == 3 * LINE_BYTES_MAX
    async for _ in child.payload(silence_seconds_max=SECONDS):
        break
    assert (await child.receive(silence_seconds_max=SECONDS))["size"] == 7
    await child.stop()


def test_what_is_too_long_for_any_message_is_not_begun() -> None:
    out = io.BytesIO()
    for message, following in (({"text": "x" * LINE_BYTES_MAX}, 0), ({}, PAYLOAD_BYTES_MAX + 1)):
        with pytest.raises(MessageTooLong):
            write_message(out, message, bytes(following))
    assert out.getvalue() == b""


@pytest.mark.parametrize(
    "program",
    [ENDS_EARLY, HALF_A_LINE, NO_JSON, ONE_LINE, SILENT],
    ids=["ends early", "half a line", "no json", "one long line", "silent"],
)
async def test_a_child_that_does_not_speak_as_agreed_is_gone(program: str) -> None:
    child = await started(program)
    with pytest.raises(ChildGone):
        await all_of(child)
    await child.stop(grace_seconds=0)


def test_vectors_keep_every_bit_of_a_float32() -> None:
    values = [0.1, -1.5, 3.0e-8, 1.0]
    assert unpack_vector(pack_vector(values)) == pytest.approx(values, rel=1e-8)
    assert pack_vector(unpack_vector(pack_vector(values))) == pack_vector(values)
