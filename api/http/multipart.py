"""Reads multipart/form-data as it arrives, part by part, without holding a file in memory.

Called by the upload route alone. Starlette's own way turns a file part without a filename into a
text field and fails it at 1 MiB, and spools before anything can be checked; here each part is a
stream, whatever its name or order. The `multipart` package finds the parts; this module gives it
the body's pieces and bounds them. It never looks at what a part holds.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    content_disposition_unquote,
    parse_options_header,
)

from domain.errors import FileTooLarge, InvalidRequest, RequestTimeout

HEADER_BYTES_MAX = 16 * 1024
"""Of one header of a part. A filename of 4 KB fits, an endless header does not."""
HEADERS_MAX = 16
"""Of one part."""
FIELD_BYTES_MAX = 64 * 1024
"""Of a text field."""
BOUNDARY_CHARACTERS_MAX = 200
"""RFC 2046 allows 70; some clients make longer ones."""
FILENAME_BYTES_MAX = 255
"""What file systems take."""
DEFAULT_FILENAME = "upload"
IDLE_SECONDS_MAX = 600.0
"""Between two pieces; the SDKs give up a write after as long. The whole may take hours."""

_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"')
_EXTENDED_FILENAME = re.compile(r";\s*filename\*\s*=\s*([^;\s]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartHead:
    """The headers of a part, as far as they matter. `filename` is what was sent, or None."""

    name: str
    filename: str | None
    transfer_encoding: str


def boundary_of(content_type: str) -> bytes:
    """The boundary in a Content-Type header. Raises InvalidRequest."""
    kind, parameters = parse_options_header(content_type)
    if kind != "multipart/form-data":
        raise InvalidRequest("Send the upload as multipart/form-data.")
    boundary: str = parameters.get("boundary", "")
    if not 1 <= len(boundary) <= BOUNDARY_CHARACTERS_MAX:
        raise InvalidRequest("The Content-Type header has no usable boundary.")
    return boundary.encode("latin-1", "replace")


def bare_filename(sent: str | None) -> str:
    """A name to show: without path, control characters and bytes past the limit."""
    last = (sent or "").replace("\\", "/").rpartition("/")[2]
    shown = "".join(each for each in last if each.isprintable()).strip()
    cut = shown.encode("utf-8", "replace")[:FILENAME_BYTES_MAX].decode("utf-8", "ignore")
    return DEFAULT_FILENAME if cut in ("", ".", "..") else cut


class MultipartReader:
    """Walks a body: `next_part`, then that part's `data` or `text` to its end, and again.

    Raises InvalidRequest where the body is not multipart or ends early, FileTooLarge where it is
    larger than `bytes_max`, RequestTimeout where it stops coming.
    """

    def __init__(self, stream: AsyncIterator[bytes], *, boundary: bytes, bytes_max: int) -> None:
        self._stream = stream
        self._bytes_max = bytes_max
        self._bytes = 0
        self._parser = PushMultipartParser(
            boundary,
            max_header_size=HEADER_BYTES_MAX,
            max_header_count=HEADERS_MAX,
            header_charset="latin-1",
        )
        self._events: Iterator[MultipartSegment | bytes | None] = iter(())
        self._in_part = False
        self._ended = False

    async def next_part(self) -> PartHead | None:
        """The next part's head, or None after the last. What is left of the current part is
        skipped."""
        async for _ in self.data():
            pass
        segment = await self._next_event()
        if segment is None:
            return None
        self._in_part = True
        return _part_head(segment)

    async def data(self) -> AsyncIterator[bytes]:
        """What is left of the current part."""
        while self._in_part:
            piece = await self._next_event()
            if piece is None:
                self._in_part = False
            else:
                yield piece

    async def text(self, name: str) -> str:
        """A text field. Raises InvalidRequest naming it if it is too long or no UTF-8."""
        gathered = bytearray()
        async for piece in self.data():
            gathered += piece
            if len(gathered) > FIELD_BYTES_MAX:
                raise InvalidRequest(f"{name} is too long.", param=name)
        try:
            return gathered.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"{name} must be UTF-8 text.", param=name) from None

    async def drain(self, *, bytes_max: int) -> bool:
        """Reads and drops what is left of the body, so that the client has sent all before it is
        answered; whether the end was reached within the bound."""
        dropped = 0
        while not self._ended and dropped <= bytes_max:
            dropped += len(await self._next_chunk())
        return self._ended

    async def _next_event(self) -> Any:
        """What the parser finds next: a part's head, a piece of it, or None at its end and at that
        of the body."""
        try:
            while True:
                for event in self._events:
                    return event
                chunk = await self._next_chunk()
                if self._ended:
                    return self._parser.close()
                self._count(len(chunk))
                # The parser takes an empty chunk for the end.
                self._events = iter(self._parser.parse(chunk) if chunk else ())
        except ParserLimitReached:
            raise InvalidRequest("The headers of a part are too long.") from None
        except MultipartError as error:
            raise InvalidRequest(f"The multipart body cannot be read: {error.args[0]}.") from None

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._bytes_max:
            raise FileTooLarge(
                f"The multipart body is larger than {self._bytes_max:,} bytes.", param="file"
            )

    async def _next_chunk(self) -> bytes:
        if self._ended:
            return b""
        try:
            async with asyncio.timeout(IDLE_SECONDS_MAX):
                return await anext(self._stream)
        except StopAsyncIteration:
            self._ended = True
            return b""
        except TimeoutError:
            raise RequestTimeout(
                f"Nothing of the upload came for {IDLE_SECONDS_MAX:g} seconds. Send it again."
            ) from None


def _part_head(segment: MultipartSegment) -> PartHead:
    header = _decoded(segment["Content-Disposition"])
    _, parameters = parse_options_header(header, unquote=content_disposition_unquote)
    if "name" not in parameters:
        raise InvalidRequest("A part has no Content-Disposition: form-data header with a name.")
    extended = _EXTENDED_FILENAME.search(_QUOTED.sub('""', header))
    return PartHead(
        name=parameters["name"],
        filename=_extended(extended.group(1)) if extended else parameters.get("filename"),
        transfer_encoding=segment.header("Content-Transfer-Encoding", "binary").strip().lower(),
    )


def _decoded(header: str) -> str:
    """The parser is told Latin-1, which takes any bytes; most clients send UTF-8."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeDecodeError:
        return header


def _extended(value: str) -> str:
    """RFC 5987's form: charset, language, percent-encoded text."""
    charset, _, rest = value.partition("'")
    raw = unquote_to_bytes(rest.partition("'")[2])
    encoding = "latin-1" if charset.lower() == "iso-8859-1" else "utf-8"
    return raw.decode(encoding, "replace")
