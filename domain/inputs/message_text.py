"""The text of a chat message whose content may be a list of text parts.

Validation counts it and the runner renders it: one rule, so that what is held for is what runs.
Imports nothing, because the engines' environments have little installed.
"""

from __future__ import annotations

from typing import Any

PART_SEPARATOR = "\n"
"""Between text parts, as vLLM joins them for templates that take strings."""


def message_text(content: Any) -> str:
    """The string, or the text parts joined. For content that is already checked."""
    if isinstance(content, str):
        return content
    assert is_text_parts(content)
    return PART_SEPARATOR.join(part["text"] for part in content)


def is_text_parts(content: object) -> bool:
    """Whether it is a non-empty list of nothing but text parts."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(part, dict)
            and part.keys() == {"type", "text"}
            and part["type"] == "text"
            and isinstance(part["text"], str)
            for part in content
        )
    )
