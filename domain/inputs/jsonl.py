"""Lines out of a byte stream, with flat memory: the one reader of every file of lines.

Fed by uploads, by create, by batch validation, by runners and by whoever reads results, piece by
piece. One UTF-8 mark at the start of the file is skipped; a line ends at byte LF, a CR before it is
dropped; every other byte is text, U+2028 too. Blank lines are no rows but count in line numbers. It
never decodes, and never holds more than one line.
"""

from __future__ import annotations

from dataclasses import dataclass

_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank.

    `number` is 1-based; bytes [start_byte, end_byte) of the file hold the line and its end.
    `content` is None for a line over the limit, whose bytes were not kept.
    """

    number: int
    start_byte: int
    end_byte: int
    content: bytes | None


def array_hint(content: bytes, *, line: int) -> str:
    """What the refusal of a line adds where the file is one JSON value and no lines of them, as
    `json.dump(rows)` writes it."""
    start = content.strip(b" \t\r")
    if line != 1 or not (start.startswith(b"[") or start == b"{"):
        return ""
    return (
        " (this looks like one JSON array or object for the whole file: write each row as a JSON "
        "object on one line, with no brackets around and no commas between them)"
    )


class LineSplitter:
    """Splits what it is fed. `line_bytes_max` bounds a line without its end.

    Where a part of a file is fed, `first_line` and `start_byte` say where in the file it begins.
    """

    def __init__(self, *, line_bytes_max: int, first_line: int = 1, start_byte: int = 0) -> None:
        self._line_bytes_max = line_bytes_max
        self._file_start: bytes | None = None if start_byte else b""
        self._held = bytearray()
        self._overlong = False
        self._number = first_line
        self._start_byte = start_byte
        self._byte = start_byte

    def feed(self, chunk: bytes) -> list[Line]:
        """The lines that end in this chunk."""
        if self._file_start is not None:
            start = self._file_start + chunk
            if len(start) < len(_MARK) and _MARK.startswith(start):
                self._file_start = start
                return []
            self._file_start = None
            chunk = self._after_mark(start)
        return self._split(chunk)

    def finish(self) -> list[Line]:
        """The last line, where the file does not end in LF."""
        lines = self._split(self._file_start or b"")
        last = self._take()
        return lines if last is None else [*lines, last]

    def _after_mark(self, start: bytes) -> bytes:
        if not start.startswith(_MARK):
            return start
        self._start_byte = self._byte = len(_MARK)
        return start[len(_MARK) :]

    def _split(self, chunk: bytes) -> list[Line]:
        lines: list[Line] = []
        first = 0
        while (end := chunk.find(b"\n", first)) >= 0:
            self._hold(chunk[first:end])
            self._byte += end + 1 - first
            line = self._take()
            if line is not None:
                lines.append(line)
            first = end + 1
        self._hold(chunk[first:])
        self._byte += len(chunk) - first
        return lines

    def _hold(self, part: bytes) -> None:
        # One byte more than the limit may be the CR of the line's end.
        if self._overlong or len(self._held) + len(part) > self._line_bytes_max + 1:
            self._overlong = True
            self._held.clear()
        else:
            self._held += part

    def _take(self) -> Line | None:
        content = bytes(self._held).removesuffix(b"\r")
        overlong = self._overlong or len(content) > self._line_bytes_max
        line = Line(
            number=self._number,
            start_byte=self._start_byte,
            end_byte=self._byte,
            content=None if overlong else content,
        )
        self._held.clear()
        self._overlong = False
        self._number += 1
        self._start_byte = self._byte
        return line if overlong or content.strip(b" \t\r") else None
