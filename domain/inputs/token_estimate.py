"""Tokens from text without a tokenizer: an upper bound from bytes, and an estimate from characters.

A byte-level tokenizer never makes more tokens than there are UTF-8 bytes; some bases compose
characters first (NFC), which can lengthen text, so the longer form counts. The estimate weighs
classes of characters by `TokenRates`. Counting is a few C-speed passes over the bytes.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from domain.catalog import TokenRates

_LETTERS = bytes(b for b in range(128) if chr(b).isalpha() or chr(b).isspace())
_DIGITS = b"0123456789"
_MARKS = bytes(b for b in range(128) if b not in _LETTERS and b not in _DIGITS)
_LEAD_ACCENTED = bytes(range(0xC0, 0xCC))
_LEAD_TWO = bytes(range(0xCC, 0xE0))
_LEAD_THREE = bytes(range(0xE0, 0xF0))
_LEAD_FOUR = bytes(range(0xF0, 0xF8))


@dataclass(slots=True)
class CharacterCounts:
    """Characters by class, added up over texts. `bytes` is the upper bound in tokens."""

    bytes: int = 0
    letters: int = 0
    digits: int = 0
    marks: int = 0
    accented: int = 0
    two_byte: int = 0
    three_byte: int = 0
    four_byte: int = 0

    def add(self, text: str) -> None:
        """Counts one text in."""
        raw = text.encode()
        digits = len(raw) - len(raw.translate(None, _DIGITS))
        marks = len(raw) - len(raw.translate(None, _MARKS))
        self.digits += digits
        self.marks += marks
        if text.isascii():
            self.bytes += len(raw)
            self.letters += len(raw) - digits - marks
            return
        self.bytes += max(len(raw), len(unicodedata.normalize("NFC", text).encode()))
        self.letters += len(raw) - len(raw.translate(None, _LETTERS))
        self.accented += len(raw) - len(raw.translate(None, _LEAD_ACCENTED))
        self.two_byte += len(raw) - len(raw.translate(None, _LEAD_TWO))
        self.three_byte += len(raw) - len(raw.translate(None, _LEAD_THREE))
        self.four_byte += len(raw) - len(raw.translate(None, _LEAD_FOUR))

    def merge(self, other: CharacterCounts) -> None:
        """Counts another sum in."""
        self.bytes += other.bytes
        self.letters += other.letters
        self.digits += other.digits
        self.marks += other.marks
        self.accented += other.accented
        self.two_byte += other.two_byte
        self.three_byte += other.three_byte
        self.four_byte += other.four_byte

    def estimate(self, rates: TokenRates) -> int:
        """Tokens, rounded up."""
        thousandths = (
            self.letters * rates.letter
            + self.digits * rates.digit
            + self.marks * rates.mark
            + self.accented * rates.accented
            + self.two_byte * rates.two_byte
            + self.three_byte * rates.three_byte
            + self.four_byte * rates.four_byte
        )
        return min(self.bytes, -(-thousandths // 1_000))


def bytes_bound(text: str) -> int:
    """The most tokens that any base makes of a text. Some embedding bases rewrite compatibility
    characters first (NFKC), which can make one character eighteen."""
    if text.isascii():
        return len(text)
    rewritten = (text, *(unicodedata.normalize(form, text) for form in ("NFC", "NFKC")))
    return max(len(each.encode()) for each in rewritten)
