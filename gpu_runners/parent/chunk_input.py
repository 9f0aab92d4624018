"""A chunk's part of the batch's input: on the local disk, its lines known by where they stand.

`chunk.py` fetches it once and reads one body at a time from it. What customers wrote can be large
and of any shape, so nothing here builds a value from it: a line is skimmed for the two names that
its answer needs and for where its body is, and the body goes to the engine child as it stands.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from domain.inputs.jsonl import Line, LineSplitter
from domain.limits import BATCH_LINE_BYTES_MAX, MIB
from domain.messages import BatchChunkTask
from domain.ports import Objects

_TEXT = rb'"(?:[^"\\]++|\\.)*+"'
_STRING = re.compile(_TEXT, re.DOTALL)
_STRING_OR_BRACKET = re.compile(_TEXT + rb"|[\[\]{}]", re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
_NUMBER_OR_WORD = re.compile(rb"[^\s,\]}]++")
_QUOTE, _OPENING = ord('"'), b"[{"


class InputDamaged(Exception):
    """The bytes in the store are not those that were checked."""


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request line. `number` counts from 1 in the whole input file; bytes [body_start,
    body_end) of the local file hold its body."""

    number: int
    custom_id: str
    model: str
    body_start: int
    body_end: int

    @property
    def body_bytes(self) -> int:
        return self.body_end - self.body_start


class ChunkInput:
    """The lines of one chunk. `file` stays open as long as it is used."""

    def __init__(self, file: BinaryIO, lines: tuple[RequestLine, ...]) -> None:
        self._file = file
        self.lines = lines

    async def body(self, line: RequestLine) -> bytes:
        """JSON text, on one line."""
        return await asyncio.to_thread(
            os.pread, self._file.fileno(), line.body_bytes, line.body_start
        )


async def fetch(objects: Objects, task: BatchChunkTask, path: Path) -> None:
    """Streams the chunk's bytes to `path`. Raises ObjectMissing."""
    with path.open("wb") as file:
        async for block in objects.get(
            task.input_key, start_byte=task.start_byte, end_byte=task.end_byte
        ):
            await asyncio.to_thread(file.write, block)


def read_lines(file: BinaryIO, task: BatchChunkTask) -> tuple[RequestLine, ...]:
    """The request lines of a fetched chunk; blank ones count in the numbers. Reads all of it, so it
    belongs into a thread. Raises InputDamaged."""
    splitter = LineSplitter(
        line_bytes_max=BATCH_LINE_BYTES_MAX, first_line=task.first_line, start_byte=task.start_byte
    )
    digest = hashlib.sha256()
    found: list[RequestLine] = []
    for line in _lines(splitter, file):
        if line.content is None:
            raise InputDamaged("a line that is too long")
        digest.update(line.content)
        digest.update(b"\n")
        found.append(_request_line(line.content, line, task))
    if len(found) != task.requests or digest.hexdigest() != task.sha256:
        raise InputDamaged("other lines")
    return tuple(found)


def _lines(splitter: LineSplitter, file: BinaryIO) -> Iterator[Line]:
    while block := file.read(MIB):
        yield from splitter.feed(block)
    yield from splitter.finish()


def _request_line(content: bytes, line: Line, task: BatchChunkTask) -> RequestLine:
    try:
        fields = {key: (start, end) for key, start, end in members(content)}
        body_start, body_end = fields["body"]
        in_body = {key: (start, end) for key, start, end in members(content, body_start)}
        custom_id = json.loads(content[slice(*fields["custom_id"])])
        model = json.loads(content[slice(*in_body["model"])])
    except (ValueError, KeyError):
        raise InputDamaged("a line that is no request") from None
    at = line.start_byte - task.start_byte
    return RequestLine(line.number, custom_id, model, at + body_start, at + body_end)


def members(text: bytes, at: int = 0) -> Iterator[tuple[str, int, int]]:
    """Of the object that begins at `at` each key, and where its value begins and ends. Follows
    strings and brackets alone, which is enough in what was checked before. Raises ValueError for
    what cannot be followed."""
    at = _after(b"{", text, _after_space(text, at))
    while text[at : at + 1] != b"}":
        key = _STRING.match(text, at)
        if key is None:
            raise ValueError("no key")
        start = _after(b":", text, _after_space(text, key.end()))
        end = _end_of_value(text, start)
        yield json.loads(key[0]), start, end
        at = _after_space(text, end)
        if text[at : at + 1] == b",":
            at = _after_space(text, at + 1)


def _after(mark: bytes, text: bytes, at: int) -> int:
    if text[at : at + 1] != mark:
        raise ValueError(f"no {mark!r}")
    return _after_space(text, at + 1)


def _after_space(text: bytes, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def _end_of_value(text: bytes, start: int) -> int:
    if text[start : start + 1] in (b"[", b"{"):
        return _end_of_nesting(text, start)
    value = _STRING.match(text, start) or _NUMBER_OR_WORD.match(text, start)
    if value is None:
        raise ValueError("no value")
    return value.end()


def _end_of_nesting(text: bytes, start: int) -> int:
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text, start):
        mark = text[found.start()]
        if mark != _QUOTE:
            depth += 1 if mark in _OPENING else -1
            if depth == 0:
                return found.end()
    raise ValueError("a value without end")
