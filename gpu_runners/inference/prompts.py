"""The prompts of request lines as token ids, the same for every engine.

The engines call it. Conversations go through `rendering/chat_template.py`, as in training; texts to
embed through the same encoder, between the tokenizer's own first and last tokens. It must never cut
an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from domain.inputs.requests.embeddings_body import Inputs
from gpu_runners.inference.engine import (
    EngineRefusal,
    input_too_long,
    text_too_long,
    window_exceeded,
)
from gpu_runners.rendering.chat_template import ChatTemplate, RolesRefused
from gpu_runners.rendering.text_encoding import TextEncoder


def chat_prompt(
    template: ChatTemplate, messages: Sequence[dict[str, str]], *, window_tokens: int
) -> list[int]:
    """Raises EngineRefusal for roles that the template refuses and for a prompt that leaves no
    room."""
    letters = sum(len(message["content"]) for message in messages)
    if letters > window_tokens * template.encoder.token_letters_max:
        raise text_too_long(letters=letters, window_tokens=window_tokens, param="messages")
    try:
        prompt = template.prompt_ids(messages)
    except RolesRefused:
        raise EngineRefusal(
            "The base's chat template refuses the order of the roles in 'messages'.",
            param="messages",
        ) from None
    if len(prompt) >= window_tokens:
        raise window_exceeded(prompt_tokens=len(prompt), window_tokens=window_tokens)
    return prompt


class EmbeddingPrompts:
    """Texts and token ids as an embedding model reads them."""

    def __init__(self, tokenizer: Any, *, window_tokens: int) -> None:
        self._encoder = TextEncoder(tokenizer)
        self._vocabulary = len(tokenizer)
        self._window_tokens = window_tokens
        whole, inner = tokenizer(_SAMPLE).input_ids, self._text_ids(_SAMPLE)
        start = next(i for i in range(len(whole)) if whole[i : i + len(inner)] == inner)
        self._first, self._last = whole[:start], whole[start + len(inner) :]

    def ids(self, inputs: Inputs) -> list[list[int]]:
        """Each input with the tokenizer's own first and last tokens. Raises EngineRefusal for a
        token id that the model does not know and for an input beyond the window."""
        prompts = [
            self._framed(self._text_ids(each) if isinstance(each, str) else self._known(each))
            for each in inputs
        ]
        longest = max(map(len, prompts))
        if longest > self._window_tokens:
            raise input_too_long(tokens=longest, window_tokens=self._window_tokens)
        return prompts

    def _text_ids(self, text: str) -> list[int]:
        """Raises EngineRefusal for a text that takes long to count and cannot fit."""
        if len(text) > self._window_tokens * self._encoder.token_letters_max:
            raise text_too_long(letters=len(text), window_tokens=self._window_tokens, param="input")
        (shielded,), letters = self._encoder.shielded([text])
        return self._encoder.encode(shielded, letters).ids

    def _known(self, ids: Sequence[int]) -> list[int]:
        if max(ids) >= self._vocabulary:
            raise EngineRefusal(
                "'input' has a token id that the model does not know.", param="input"
            )
        return list(ids)

    def _framed(self, ids: list[int]) -> list[int]:
        """Token ids may come from the model's own tokenizer, framed already."""
        first, last = self._first, self._last
        inner = len(ids) - len(first) - len(last)
        if inner >= 0 and ids[: len(first)] == first and ids[len(first) + inner :] == last:
            return ids
        return [*first, *ids, *last]


_SAMPLE = "a"
