"""Sets of characters, as the classes and escapes of a pattern name them.

`schema_pattern` calculates with them. Where readers of patterns differ on what an escape holds,
both readings are kept: what all of them take, and what any of them takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
"""Of characters: sorted, apart from each other, both ends included."""

LAST = 0x10FFFF
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_WIDE_SPACES: Ranges = (
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680)),
    *((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
    (0xFEFF, 0xFEFF),
)
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029))
CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_NOT_ASCII: Ranges = ((0x80, LAST),)


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """Characters as all readers take them, and as any reader does: a negation leaves out all that
    any reader takes."""

    narrow: Ranges
    wide: Ranges

    def negated(self) -> CharacterClass:
        return CharacterClass(without(self.wide), without(self.narrow))


ESCAPES = {
    "d": CharacterClass(_DIGITS, (*_DIGITS, *_NOT_ASCII)),
    "w": CharacterClass(_WORD, (*_WORD, *_NOT_ASCII)),
    "s": CharacterClass(_SPACES, _WIDE_SPACES),
}


def one(code: int) -> Ranges:
    return ((code, code),)


def single(found: CharacterClass) -> int | None:
    """The one character of a class, where it has one."""
    match found.narrow:
        case ((low, high),) if low == high and found.wide == found.narrow:
            return low
    return None


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All of them, in any order and with any overlap."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def without(ranges: Ranges) -> Ranges:
    """All characters but these."""
    left, start = [], 0
    for low, high in ranges:
        if start < low:
            left.append((start, low - 1))
        start = high + 1
    return (*left, (start, LAST)) if start <= LAST else tuple(left)


def both(some: Ranges, others: Ranges) -> Ranges:
    """What is in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return tuple((low, high) for low, high in pairs if low <= high)
