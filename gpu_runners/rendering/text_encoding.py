"""Text to token ids, in which nothing that people wrote is ever read as a mark of the base.

A base's tokenizer knows marks: control tokens that its chat template writes between messages, and
special tokens. Whoever writes one into a text has written letters. `chat_template.py` encodes
conversations with it and `inference/prompts.py` texts to embed. It must never give text without
marks other ids than the tokenizer does: adapters were trained on those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
Letters = Mapping[int, str]
"""Stand-in letters, by code point, and what they stand for: an argument of `str.translate`."""

_STAND_INS = range(0xF0000, 0xFFFFE)
"""Private-use characters: no template trims, splits or recognises them."""
LETTERS_A_TOKEN = 100
_LEAD = "\n"
"""Before text that is encoded by itself, since some tokenizers begin a text with a space."""


class Encoded:
    """The token ids of a text. `swaps` are tokens, by place and in order, that others stand for."""

    def __init__(self, encoding: Any, swaps: Sequence[tuple[int, list[int]]]) -> None:
        self.ids: list[int] = _swapped(encoding.ids, swaps)
        self._encoding = encoding
        self._swaps = swaps

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Where each token begins and ends in the text."""
        offsets: list[tuple[int, int]] = self._encoding.offsets
        return _swapped(offsets, [(at, [offsets[at]] * len(ids)) for at, ids in self._swaps])


def _swapped(items: list[T], swaps: Sequence[tuple[int, list[T]]]) -> list[T]:
    """In one pass, since a text may be nothing but marks."""
    if not swaps:
        return items
    whole: list[T] = []
    done = 0
    for at, others in swaps:
        whole += items[done:at]
        whole += others
        done = at + 1
    return whole + items[done:]


class TextEncoder:
    """Encodes for one base, with its tokenizer given over. `control_tokens` are the catalog's."""

    def __init__(self, tokenizer: Any, *, control_tokens: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
        special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        wanted = special.union(tokenizer.all_special_tokens, control_tokens)
        marks = sorted(added.keys() & wanted, key=len, reverse=True)
        self.marks = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        """What the template may write and people may not."""
        self.mark_ids = frozenset(added[mark] for mark in marks)
        self._first_letters = {mark[0] for mark in marks}
        self._plain_ids = lru_cache(1_024)(self._ids_of_letters)
        self.token_letters_max = max(LETTERS_A_TOKEN, max(map(len, tokenizer.get_vocab())))
        """No token stands for more letters, but where a tokenizer drops white space or words."""

    def shielded(self, texts: Sequence[str]) -> tuple[list[str], Letters]:
        """The texts with a stand-in for the first letter of each mark, so that a template, and who
        looks for marks, finds only the template's own; and the way back."""
        if not any(map(self.marks.search, texts)):
            return list(texts), {}
        used = set().union(*texts)
        free = (chr(point) for point in _STAND_INS if chr(point) not in used)
        stand_ins = dict(zip(sorted(self._first_letters), free, strict=False))
        shielded = [self._without_marks(text, stand_ins) for text in texts]
        return shielded, {ord(each): letter for letter, each in stand_ins.items()}

    def encode(self, text: str, letters: Letters) -> Encoded:
        """A text with shielded parts. Marks are tokens where they are not shielded."""
        encoding = self._encoding(text.translate(letters) if letters else text)
        swaps = []
        for at, token in enumerate(encoding.ids):
            if token in self.mark_ids:
                start, end = encoding.token_to_chars(at)
                if self.marks.search(text, start, end) is None:
                    swaps.append((at, self._plain_ids(text[start:end].translate(letters))))
        return Encoded(encoding, swaps)

    def _without_marks(self, text: str, stand_ins: Mapping[str, str]) -> str:
        """Marks may overlap, so that taking one away leaves another."""
        while self.marks.search(text):
            text = self.marks.sub(lambda found: stand_ins[found[0][0]] + found[0][1:], text)
        return text

    def _ids_of_letters(self, mark: str) -> list[int]:
        """The ids of a mark's letters."""
        lead = self._encoding(_LEAD).ids
        self._tokenizer.encode_special_tokens = True
        try:
            ids = self._encoding(_LEAD + mark).ids
        finally:
            self._tokenizer.encode_special_tokens = False
        plain = ids[len(lead) :]
        if ids[: len(lead)] == lead and self.mark_ids.isdisjoint(plain):
            return list(plain)
        # A tokenizer that has the mark among its ordinary pieces too.
        return [each for letter in mark for each in self._encoding(letter).ids]

    def _encoding(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)
