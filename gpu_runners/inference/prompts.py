"""Text to token ids and back, the same for every engine and as training renders it.

The engines call it. A prompt is the base's own chat template with the catalog's arguments, then
tokenized once without added special tokens: what was trained and what is served must not differ by
a single token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from domain.inputs.requests.embeddings_body import Inputs
from gpu_runners.inference.engine import EngineRefusal

LOGPROB_MIN = -9999.0
"""OpenAI's number for a token that could not be drawn; JSON has no -Infinity."""


def chat_token_ids(
    tokenizer: Any, messages: Sequence[dict[str, str]], arguments: Mapping[str, Any]
) -> list[int]:
    """The prompt of a conversation. Raises EngineRefusal for roles that the template refuses."""
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **arguments
        )
    except TemplateError:
        raise EngineRefusal(
            "The base's chat template refuses the order of the roles in 'messages'.",
            param="messages",
        ) from None
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def embedding_token_ids(tokenizer: Any, inputs: Inputs) -> list[list[int]]:
    """Each input with the tokenizer's own first and last tokens; nothing is cut. Raises
    EngineRefusal for a token id that the model does not know."""
    return [
        list(tokenizer(each, truncation=False).input_ids)
        if isinstance(each, str)
        else _framed(tokenizer, each)
        for each in inputs
    ]


def _framed(tokenizer: Any, ids: tuple[int, ...]) -> list[int]:
    if max(ids) >= len(tokenizer):
        raise EngineRefusal("'input' has a token id that the model does not know.", param="input")
    first = [] if tokenizer.cls_token_id is None else [tokenizer.cls_token_id]
    last = [] if tokenizer.sep_token_id is None else [tokenizer.sep_token_id]
    return [*first, *ids, *last]


class TokenWriter:
    """Writes tokens as OpenAI's log-probability entries do: text and bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        decoder = backend.get("decoder") or {}
        self._byte_level = decoder.get("type") == "ByteLevel"

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """One token: its text, natural-log probability and UTF-8 bytes (part of a character is
        bytes that are no text by themselves)."""
        text = self._tokenizer.decode([token_id])
        return {
            "token": text,
            "logprob": max(logprob, LOGPROB_MIN),
            "bytes": list(self._bytes(token_id, text)),
        }

    def _bytes(self, token_id: int, text: str) -> bytes:
        if self._byte_level:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
            if all(letter in _BYTE_OF_LETTER for letter in piece):
                return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
        return text.encode()


def _byte_letters() -> dict[str, int]:
    """Byte-level tokenizers write the printable Latin-1 bytes as themselves and the others as the
    letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()
