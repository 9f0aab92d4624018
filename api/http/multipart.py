"""Reads multipart/form-data as it arrives, part by part, without holding a file in memory.

Called by the upload route alone. Starlette's parser turns a file part without a filename into a
text field and fails it at 1 MiB, and spools before anything can be checked; here each part is a
stream, whatever its name or order. The parser never looks at what a part holds.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from domain.errors import InvalidRequest, RequestTimeout

HEADER_BYTES_MAX = 16 * 1024
"""Of one part. A filename of 4 KB fits, an endless header does not."""
FIELD_BYTES_MAX = 64 * 1024
"""Of a text field."""
BOUNDARY_CHARACTERS_MAX = 200
"""RFC 2046 allows 70; some clients make longer ones."""
FILENAME_BYTES_MAX = 255
"""What file systems take."""
DEFAULT_FILENAME = "upload"
IDLE_SECONDS_MAX = 600.0
"""Between two pieces; the SDKs give up a write after as long. The whole may take hours."""

_PARAMETER = re.compile(r';\s*([\w*!#$%&\'+.^`|~-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;]*)')


@dataclass(frozen=True, slots=True)
class PartHead:
    """The headers of a part, as far as they matter. `filename` is what was sent, or None."""

    name: str
    filename: str | None
    transfer_encoding: str


def boundary_of(content_type: str) -> bytes:
    """The boundary in a Content-Type header. Raises InvalidRequest."""
    kind, _, _ = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise InvalidRequest("Send the upload as multipart/form-data.")
    boundary = _parameters(content_type).get("boundary", "")
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

    Raises InvalidRequest where the body is not multipart or ends early, RequestTimeout where it
    stops coming.
    """

    def __init__(self, stream: AsyncIterator[bytes], *, boundary: bytes) -> None:
        self._stream = stream
        self._delimiter = b"\r\n--" + boundary
        # The first delimiter may stand at the very start of the body.
        self._buffer = b"\r\n"
        self._in_part = True
        self._ended = False

    async def next_part(self) -> PartHead | None:
        """The next part's head, or None after the last. What is left of the current part is
        skipped; before the first part, the preamble is."""
        async for _ in self.data():
            pass
        while len(self._buffer) < 2:
            await self._more()
        if self._buffer.startswith(b"--"):
            return None
        line_end = await self._find(b"\r\n", within_bytes=HEADER_BYTES_MAX)
        if self._buffer[:line_end].strip(b" \t"):
            raise InvalidRequest("The multipart body has a malformed boundary line.")
        # Kept: a part without headers begins with the empty line's CRLF.
        self._buffer = self._buffer[line_end:]
        head_end = await self._find(b"\r\n\r\n", within_bytes=HEADER_BYTES_MAX)
        head = _part_head(self._buffer[:head_end])
        self._buffer = self._buffer[head_end + 4 :]
        self._in_part = True
        return head

    async def data(self) -> AsyncIterator[bytes]:
        """What is left of the current part, up to its delimiter, which is consumed."""
        keep = len(self._delimiter) - 1
        while self._in_part:
            at = self._buffer.find(self._delimiter)
            if at >= 0:
                piece, self._buffer = self._buffer[:at], self._buffer[at + keep + 1 :]
                self._in_part = False
            else:
                piece, self._buffer = self._buffer[:-keep], self._buffer[-keep:]
            if piece:
                yield piece
            if at < 0:
                await self._more()

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
        self._buffer = b""
        dropped = 0
        while not self._ended and dropped <= bytes_max:
            dropped += len(await self._next_chunk())
        return self._ended

    async def _find(self, mark: bytes, *, within_bytes: int) -> int:
        while (at := self._buffer.find(mark)) < 0 and len(self._buffer) <= within_bytes:
            await self._more()
        if not 0 <= at <= within_bytes:
            raise InvalidRequest("The headers of a part are too long.")
        return at

    async def _more(self) -> None:
        chunk = await self._next_chunk()
        if self._ended:
            raise InvalidRequest("The multipart body ends before its closing boundary.")
        self._buffer += chunk

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


def _part_head(raw: bytes) -> PartHead:
    headers: dict[str, str] = {}
    for line in _decoded(raw).split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    disposition = headers.get("content-disposition", "")
    parameters = _parameters(disposition)
    if not disposition.lower().startswith("form-data") or "name" not in parameters:
        raise InvalidRequest("A part has no Content-Disposition: form-data header with a name.")
    return PartHead(
        name=parameters["name"],
        filename=parameters.get("filename*", parameters.get("filename")),
        transfer_encoding=headers.get("content-transfer-encoding", "binary").lower(),
    )


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _parameters(header: str) -> dict[str, str]:
    """The parameters after the first `;`, names in lower case; `name*` as RFC 5987 encodes it."""
    found: dict[str, str] = {}
    for name, raw in _PARAMETER.findall(header):
        value = raw.strip()
        if value.startswith('"'):
            value = re.sub(r'\\(["\\])', r"\1", value[1:-1])
        if name.endswith("*"):
            value = _extended(value)
        found.setdefault(name.lower(), value)
    return found


def _extended(value: str) -> str:
    charset, _, rest = value.partition("'")
    raw = unquote_to_bytes(rest.partition("'")[2])
    encoding = "latin-1" if charset.lower() == "iso-8859-1" else "utf-8"
    return raw.decode(encoding, "replace")
