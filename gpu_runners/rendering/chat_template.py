"""A base's chat template and its tokenizer: the one way from messages to what the model reads.

Training's `training_rows.py` and every engine call it, so that what was trained and what is served
do not differ by a single token. Contents go through the template shielded: what it writes are
marks, what people wrote are letters. It must never name a text in an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from gpu_runners.rendering.text_encoding import TextEncoder


class RolesRefused(Exception):
    """The template takes no conversation with these roles in this order."""


class ChatTemplate:
    """For one base. `text` is the template's, None for the tokenizer's own; `arguments` are the
    catalog's."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        control_tokens: Sequence[str] = (),
        text: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.encoder = TextEncoder(tokenizer, control_tokens=control_tokens)
        self._tokenizer = tokenizer
        self._text = text
        self._arguments = dict(arguments or {})

    def render(self, roles: Sequence[str], contents: Sequence[str], *, generation: bool) -> str:
        """The conversation as text; `generation` adds what stands before an answer. The contents
        should be shielded. Raises RolesRefused."""
        conversation = [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=True)
        ]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation,
                    tokenize=False,
                    add_generation_prompt=generation,
                    chat_template=self._text,
                    **self._arguments,
                )
            )
        except TemplateError:
            raise RolesRefused from None

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids that ask for an answer to these messages. Raises RolesRefused."""
        contents, letters = self.encoder.shielded([each["content"] for each in messages])
        text = self.render([each["role"] for each in messages], contents, generation=True)
        return self.encoder.encode(text, letters).ids
