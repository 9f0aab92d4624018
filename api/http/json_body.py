"""Reads a JSON request body, strictly and within a bound."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from domain.errors import FileTooLarge, RequestTimeout, UnsupportedContentEncoding
from domain.inputs.strict_json import InvalidJson, parse_json
from domain.limits import MIB

JSON_BYTES_MAX = MIB
"""A create body holds ids, settings and 16 pairs of metadata."""
BODY_SECONDS_MAX = 60.0
"""A megabyte comes through the slowest line in that time; a body without end must not wait on."""


def refuse_content_encoding(request: Request) -> None:
    """Raises UnsupportedContentEncoding for a compressed body: a small one can be a bomb."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedContentEncoding("Send the body without a Content-Encoding.")


async def read_json(request: Request) -> Any:
    """The body's value. Raises InvalidJson, FileTooLarge, UnsupportedContentEncoding or
    RequestTimeout."""
    refuse_content_encoding(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > JSON_BYTES_MAX:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            gathered = await _gathered(request)
    except TimeoutError:
        raise RequestTimeout(
            f"The body did not end within {BODY_SECONDS_MAX:g} seconds. Send it again."
        ) from None
    try:
        value = parse_json(gathered)
    except InvalidJson as error:
        raise InvalidJson(f"The request body is not JSON: {error.message}.") from None
    if b"\\u0000" in gathered and _holds_nul(value):
        raise InvalidJson("A string of the request body holds the character NUL.")
    return value


async def _gathered(request: Request) -> bytes:
    gathered = bytearray()
    async for chunk in request.stream():
        gathered += chunk
        if len(gathered) > JSON_BYTES_MAX:
            raise _too_large()
    return bytes(gathered)


def _too_large() -> FileTooLarge:
    return FileTooLarge(
        f"The body is larger than {JSON_BYTES_MAX // MIB} MiB.", code="request_too_large"
    )


def _holds_nul(value: object) -> bool:
    """PostgreSQL can keep no text with it."""
    if isinstance(value, dict):
        return any("\0" in key or _holds_nul(each) for key, each in value.items())
    if isinstance(value, list):
        return any(_holds_nul(each) for each in value)
    return isinstance(value, str) and "\0" in value
