"""Tokens from text without a tokenizer: an upper bound from bytes, and an estimate from characters.

A byte-level tokenizer never makes more tokens than there are UTF-8 bytes; some bases compose
characters first (NFC), which can lengthen text, so the longer form counts. The estimate weighs
classes of characters by `TokenRates`. Letters of English text are a class of their own: a text is
English where enough of its words are among the commonest English ones that other languages do not
have. Counting is some C-speed passes over the bytes.
"""

from __future__ import annotations

import unicodedata
from dataclasses import fields
from operator import add

from domain.catalog import TokenRates

_CLASSES = tuple(each.name for each in fields(TokenRates))
_ENGLISH_LETTERS, _OTHER_LETTERS, _DIGIT, _MARK = range(4)
_ACCENTED, _THREE_BYTE = _CLASSES.index("accented"), _CLASSES.index("three_byte")
_LETTERS = bytes(b for b in range(128) if chr(b).isalpha() or chr(b).isspace())
_DIGITS = b"0123456789"
_MARKS = bytes(b for b in range(128) if b not in _LETTERS and b not in _DIGITS)
_ASCII = bytes(range(128))
_LEADS = {
    _CLASSES.index(name): leads
    for name, leads in {
        "accented": bytes(range(0xC0, 0xCC)),
        "cyrillic": bytes(range(0xD0, 0xD4)),
        "arabic": bytes(range(0xD8, 0xDC)),
        "two_byte": bytes((*range(0xCC, 0xD0), *range(0xD4, 0xD8), *range(0xDC, 0xE0))),
        "indic": b"\xe0",
        "three_byte": b"\xe1",
        "east_asian": bytes(range(0xE2, 0xF0)),
        "four_byte": bytes(range(0xF0, 0xF8)),
    }.items()
}
"""The first bytes of the characters of a class."""
_VIETNAMESE = (b"\xe1\xba", b"\xe1\xbb")
"""Accented Latin letters that lie among the scripts of three bytes."""
_ENGLISH_WORDS = (
    "the and to of you that it with this are not be your from what can my how when we they he his "
    "which will there has but"
)
_ENGLISH = frozenset(_ENGLISH_WORDS.split())
_ENGLISH_WORD_IN = 12
"""A text is English if one word in so many is one of these: in English it is one in three or four,
in the languages that share some of them one in thirty."""
_JUDGED_CHARACTERS = 2_000
"""At either end of a text: what is longer is judged by these."""


class CharacterCounts:
    """Characters by class, added up over texts, in the order of `TokenRates`. `bytes` is the upper
    bound in tokens."""

    __slots__ = ("bytes", "characters")

    def __init__(self) -> None:
        self.bytes = 0
        self.characters = [0] * len(_CLASSES)

    def add(self, text: str) -> None:
        """Counts one text in, of one person or model: its language is judged as a whole."""
        raw, counts = text.encode(), self.characters
        digits, marks = _count(raw, _DIGITS), _count(raw, _MARKS)
        ascii_only = len(raw) == len(text)
        letters = len(raw) - digits - marks if ascii_only else _count(raw, _LETTERS)
        counts[_ENGLISH_LETTERS if _is_english(text) else _OTHER_LETTERS] += letters
        counts[_DIGIT] += digits
        counts[_MARK] += marks
        if ascii_only:
            self.bytes += len(raw)
            return
        self.bytes += max(len(raw), len(unicodedata.normalize("NFC", text).encode()))
        beyond_ascii = raw.translate(None, _ASCII)
        for at, leads in _LEADS.items():
            counts[at] += _count(beyond_ascii, leads)
        vietnamese = sum(beyond_ascii.count(start) for start in _VIETNAMESE)
        counts[_ACCENTED] += vietnamese
        counts[_THREE_BYTE] -= vietnamese

    def merge(self, other: CharacterCounts) -> None:
        """Counts another sum in."""
        self.bytes += other.bytes
        self.characters = list(map(add, self.characters, other.characters))

    def estimate(self, rates: TokenRates) -> int:
        """Tokens, rounded up."""
        thousandths = sum(
            count * int(getattr(rates, name))
            for name, count in zip(_CLASSES, self.characters, strict=True)
        )
        return min(self.bytes, -(-thousandths // 1_000))


def _count(raw: bytes, wanted: bytes) -> int:
    return len(raw) - len(raw.translate(None, wanted))


def _is_english(text: str) -> bool:
    if len(text) > 2 * _JUDGED_CHARACTERS:
        text = f"{text[:_JUDGED_CHARACTERS]} {text[-_JUDGED_CHARACTERS:]}"
    words = text.lower().split()
    return sum(map(_ENGLISH.__contains__, words)) * _ENGLISH_WORD_IN >= len(words) > 0


def bytes_bound(text: str) -> int:
    """The most tokens that any base makes of a text. Some embedding bases rewrite compatibility
    characters first (NFKC), which can make one character eighteen."""
    if text.isascii():
        return len(text)
    rewritten = (text, *(unicodedata.normalize(form, text) for form in ("NFC", "NFKC")))
    return max(len(each.encode()) for each in rewritten)
