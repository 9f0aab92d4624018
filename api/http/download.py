"""Sends a stored object: whole, or one range of it, so that a broken download can go on.

Called by the routes of files and adapters. The object is opened before the answer begins: a missing
one is a 404, and one that is deleted meanwhile is still sent to its end.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.http.errors import error_response
from domain.errors import InvalidRequest, NotFound
from domain.log.stored import StoredObject
from domain.ports import ObjectMissing, Objects

_RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")


async def send_object(
    request: Request,
    objects: Objects,
    stored: StoredObject,
    *,
    filename: str,
    headers: dict[str, str] | None = None,
) -> Response:
    """200 with all bytes, or 206 or 416 for a Range. Raises NotFound."""
    etag = f'"{stored.sha256}"'
    sent = {
        "accept-ranges": "bytes",
        "etag": etag,
        "content-disposition": content_disposition(filename),
        **(headers or {}),
    }
    start, end, status = 0, stored.bytes, 200
    wanted = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if wanted is not None and wanted.group(0) != "bytes=-" and _may_range(request, etag):
        start, end = _bounds(wanted, size=stored.bytes)
        if start >= end:
            return _unsatisfiable(stored.bytes)
        status = 206
        sent["content-range"] = f"bytes {start}-{end - 1}/{stored.bytes}"
    sent["content-length"] = str(end - start)
    body = await _opened(objects, stored.key, start, end, head_only=request.method == "HEAD")
    return StreamingResponse(
        body, status_code=status, headers=sent, media_type="application/octet-stream"
    )


def content_disposition(filename: str) -> str:
    """An attachment; names beyond ASCII as RFC 6266 says, with a plain one for old clients."""
    plain = re.sub(r"[^ !#-\[\]-~]", "_", filename)
    extended = quote(filename, safe="")
    suffix = "" if plain == filename else f"; filename*=UTF-8''{extended}"
    return f'attachment; filename="{plain}"{suffix}'


def _may_range(request: Request, etag: str) -> bool:
    condition = request.headers.get("if-range")
    return condition is None or condition.strip() == etag


def _bounds(wanted: re.Match[str], *, size: int) -> tuple[int, int]:
    """The range as [start, end); empty where it cannot be satisfied."""
    first, last = wanted.groups()
    if not first:
        return size - _position(last, size=size), size
    end = min(_position(last, size=size) + 1, size) if last else size
    return _position(first, size=size), end


def _position(digits: str, *, size: int) -> int:
    """The number, or `size` if it is larger; Python reads no integer of thousands of digits."""
    significant = digits.lstrip("0")
    return size if len(significant) > len(str(size)) else min(size, int(significant or "0"))


def _unsatisfiable(size: int) -> Response:
    response = error_response(InvalidRequest("The range lies outside the file.", param="range"))
    response.status_code = 416
    response.headers["content-range"] = f"bytes */{size}"
    return response


async def _opened(
    objects: Objects, key: str, start: int, end: int, *, head_only: bool
) -> AsyncIterator[bytes]:
    pieces = objects.get(key, start_byte=start, end_byte=end)
    try:
        first = await anext(pieces, b"")
    except ObjectMissing:
        raise NotFound("The file's content is gone.", param="id") from None

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    async def none() -> AsyncIterator[bytes]:
        yield b""

    return none() if head_only else all_pieces()
