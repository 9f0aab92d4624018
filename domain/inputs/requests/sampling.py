"""How the answer of a chat line is drawn: OpenAI's sampling fields, and three that are ours.

`chat_body` reads them for validation and for the engine child alike. What two values have in common
is settled here and nowhere else: whatever asks for the likeliest token every time is the same
greedy sampling, so that no engine divides by a tiny temperature or sees a `top_p` of 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from domain.inputs.requests.fields import Reader, Wrong, boolean, integer, number
from domain.limits import (
    CHOICES_MAX,
    DEFAULT_OUTPUT_TOKENS,
    GREEDY_BELOW_TEMPERATURE,
    STOP_SEQUENCES_MAX,
    TOP_K_MAX,
    TOP_LOGPROBS_MAX,
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0 is greedy; nothing else narrows the choice then. `top_k` None: all tokens.
    `logprobs` None: not asked for; else the number of alternatives per token."""

    max_tokens: int = DEFAULT_OUTPUT_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    n: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time, so that all choices are alike."""
        return self.temperature == 0

    def engine_seed(self, choice: int) -> int | None:
        """The seed of one choice, below 2^62: no two of the line's 64-bit seeds share one
        by their nearness or sign, and none has a meaning of its own to an engine, as -1 has."""
        if self.seed is None:
            return None
        digest = hashlib.sha256(f"{self.seed}/{choice}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 2


def read_sampling(read: Mapping[str, Any]) -> Sampling:
    """From the fields that READERS made."""
    named = {name: read[name] for name in _NAMED if name in read}
    if read.get("logprobs"):
        named["logprobs"] = read.get("top_logprobs", 0)
    most = read.get("max_completion_tokens", read.get("max_tokens", DEFAULT_OUTPUT_TOKENS))
    if _asks_for_the_likeliest(read):
        named |= {"temperature": 0.0, "top_p": 1.0, "top_k": None, "min_p": 0.0}
    return Sampling(max_tokens=most, **named)


_NAMED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def _asks_for_the_likeliest(read: Mapping[str, Any]) -> bool:
    return (
        read.get("temperature", 1.0) < GREEDY_BELOW_TEMPERATURE
        or read.get("top_p") == 0
        or read.get("top_k") == 1
    )


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if (
        isinstance(texts, list)
        and len(texts) <= STOP_SEQUENCES_MAX
        and all(isinstance(text, str) and text for text in texts)
    ):
        return tuple(texts)
    raise Wrong(f"must be a non-empty string or a list of up to {STOP_SEQUENCES_MAX}")


def _top_k(value: Any) -> int | None:
    """-1 and 0 are vLLM's ways to say all tokens."""
    read: int = integer(-1, TOP_K_MAX)(value)
    return read if read > 0 else None


READERS: dict[str, Reader] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": _top_k,
    "min_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0.1, 10),
    "n": integer(1, CHOICES_MAX),
    "logprobs": boolean,
    "top_logprobs": integer(0, TOP_LOGPROBS_MAX),
    "stop": _stop,
    "seed": integer(-(2**63), 2**63 - 1),
    "max_tokens": integer(1),
    "max_completion_tokens": integer(1),
}
