"""Tokens back to text: an answer as it grows, and its log-probabilities as OpenAI writes them.

The engines call it. The entries of an answer belong to its content: their tokens, and their bytes,
join to exactly that. So the token that ends an answer has none, and neither has a stop text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers.decoders import DecodeStream

LOGPROB_MIN = -9999.0
"""OpenAI's number for a token that could not be drawn; JSON has no -Infinity."""
SPELLINGS_KEPT_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Position:
    """A drawn token and the likeliest ones in its place, with their natural-log probabilities."""

    token: int
    logprob: float
    best: Sequence[tuple[int, float]]


class AnswerText:
    """The text of one answer. The prompt comes first, since a token's letters may depend on what
    stands before it."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The letters that this token completes, mostly its own."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:
            if not str(error).startswith("Invalid prefix"):
                raise
            # Of bytes that are no UTF-8 the stream loses its place; vLLM begins anew here too.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token) or ""


class EntryWriter:
    """Writes entries for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._unwritten = {number for number, token in added.items() if token.special}
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        self._byte_level = (backend.get("decoder") or {}).get("type") == "ByteLevel"
        self._anchor = tokenizer("a", add_special_tokens=False).input_ids
        self._anchor_text = tokenizer.decode(self._anchor)
        self._spelling = lru_cache(SPELLINGS_KEPT_MAX)(self._spell)

    def entries(
        self, positions: Sequence[Position], *, prompt: Sequence[int], text: str
    ) -> list[dict[str, Any]]:
        """Those of the tokens that the content has letters of. Of a token that a stop text cut,
        only the letters before the cut; a letter of several tokens stands with the last of them."""
        answer, left = AnswerText(self._tokenizer, prompt), len(text)
        entries: list[dict[str, Any]] = []
        begun: list[dict[str, Any]] = []
        for position in positions:
            letters = answer.add(position.token)[:left]
            if left == 0 or position.token in self._unwritten:
                continue
            begun.append(self._entry(position))
            if letters:
                _share(letters, begun)
                entries += begun
                begun, left = [], left - len(letters)
        return entries

    def token(self, token: int, logprob: float) -> dict[str, Any]:
        """One token by itself."""
        text, spelled = self._spelling(token)
        return {"token": text, "logprob": max(logprob, LOGPROB_MIN), "bytes": list(spelled)}

    def _entry(self, position: Position) -> dict[str, Any]:
        entry = self.token(position.token, position.logprob)
        return {**entry, "top_logprobs": [self.token(*each) for each in position.best]}

    def _spell(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of a token within a text; of part of a letter, U+FFFD and its bytes."""
        text = self._tokenizer.decode([*self._anchor, token])[len(self._anchor_text) :]
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if _BYTE_PIECE.fullmatch(piece):
            return text, bytes([int(piece[3:5], 16)])
        if self._byte_level and all(letter in _BYTE_OF_LETTER for letter in piece):
            return text, bytes(_BYTE_OF_LETTER[letter] for letter in piece)
        return text, text.encode()


def _share(letters: str, entries: Sequence[dict[str, Any]]) -> None:
    """Gives letters to the tokens that make them: to the last one, and of their bytes what those
    before it leave."""
    spelled = letters.encode()
    before = bytes(byte for entry in entries[:-1] for byte in entry["bytes"])
    if not spelled.startswith(before):  # bytes that are no UTF-8, and read as U+FFFD
        before = b""
        for entry in entries[:-1]:
            entry["bytes"] = []
    for entry in entries[:-1]:
        entry["token"] = ""
    entries[-1] |= {"token": letters, "bytes": list(spelled[len(before) :])}


def _byte_letters() -> dict[str, int]:
    """Byte-level tokenizers write the printable Latin-1 bytes as themselves and the others as the
    letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
