"""JSON as every reader would read it: one line of a file or one request body.

Refuses what readers disagree on: duplicate keys, NaN and infinities, lone surrogates, invalid
UTF-8, more than one value, and nesting past the limit. Called by the file checks and by the API's
body reader; it must never put a byte of what it read into an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NoReturn

from domain.errors import GridlineError
from domain.limits import JSON_CONTAINERS_MAX, JSON_DEPTH_MAX


class InvalidJson(GridlineError):
    """Text that is not strictly JSON. The message says why, and never quotes it."""

    code = "invalid_json"


class _Refused(ValueError):
    """Raised inside the decoder's hooks; its text is fixed."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Refused("an object holds the same key twice")
    return found


def _constant(_: str) -> NoReturn:
    raise _Refused("NaN and Infinity are not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _Refused("a number is too large")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite
)


def parse_json(raw: bytes) -> Any:
    """The one JSON value in `raw`. Raises InvalidJson."""
    # Brackets inside strings count too, so that both counts are upper bounds and cheap.
    brackets = raw.count(b"{") + raw.count(b"[")
    if brackets > JSON_CONTAINERS_MAX and _has_too_many_containers(raw):
        raise InvalidJson(f"it has more than {JSON_CONTAINERS_MAX:,} objects and arrays")
    try:
        value = _DECODER.decode(raw.decode())
    except UnicodeDecodeError:
        raise InvalidJson(f"it is not UTF-8 text{_foreign_format(raw)}") from None
    except _Refused as error:
        raise InvalidJson(str(error)) from None
    except json.JSONDecodeError as error:
        raise InvalidJson(_where(error, raw)) from None
    except ValueError:
        raise InvalidJson("a number has too many digits") from None
    except RecursionError:
        raise InvalidJson(_TOO_DEEP) from None
    if brackets > JSON_DEPTH_MAX and _depth(value) > JSON_DEPTH_MAX:
        raise InvalidJson(_TOO_DEEP)
    if (b"\\ud" in raw or b"\\uD" in raw) and _has_lone_surrogate(value):
        raise InvalidJson("a string holds half of a surrogate pair")
    return value


_TOO_DEEP = f"it is nested deeper than {JSON_DEPTH_MAX} levels"


def _where(error: json.JSONDecodeError, raw: bytes) -> str:
    if error.msg == "Extra data":
        return f"more text follows the JSON value at character {error.pos + 1}"
    return f"it cannot be read at character {error.pos + 1}{_foreign_format(raw)}"


def _foreign_format(raw: bytes) -> str:
    if raw.startswith(b"\x1f\x8b"):
        return " (this looks like gzip: unpack it first)"
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or raw[1:2] == b"\x00":
        return " (this looks like UTF-16: save it as UTF-8)"
    if raw.startswith(b"version https://git-lfs"):
        return " (this looks like a Git LFS pointer: fetch the file itself)"
    return ""


_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)
"""A string, or what was begun as one, is passed over at once and never read twice."""


def _has_too_many_containers(raw: bytes) -> bool:
    found = (match for match in _STRING_OR_BRACKET.finditer(raw) if raw[match.start()] != _QUOTE)
    return next(islice(found, JSON_CONTAINERS_MAX, None), None) is not None


_QUOTE = ord('"')


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [child for each in level for child in _children(each)]
    return depth


def _children(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _has_lone_surrogate(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
