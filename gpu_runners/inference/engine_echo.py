"""An engine without a model: it answers each request from the request itself, the same each time.

For tests and load trials, chosen only by the setting that names it. It takes real requests, honours
the fields that shape an answer, counts tokens as words, and reads three marks in the last user
message: `echo-delay-ms=N` takes that long, `echo-crash` kills the engine, `echo-refuse` is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
import threading
from collections import deque
from pathlib import Path
from typing import Any

from domain.errors import InvalidRequest
from gpu_runners.inference.engine import (
    AdapterUnusable,
    Base,
    ChatRequest,
    Choice,
    Embedded,
    EmbeddingRequest,
    EngineRefusal,
    Generated,
    Result,
    window_exceeded,
)

DELAY = re.compile(r"echo-delay-ms=(\d{1,6})")
DIMENSIONS = 32
TOKENS_PER_MESSAGE = 4


class EchoEngine:
    """Finishes one request a step, in the order of arrival."""

    gather_seconds = 0.0

    def __init__(self) -> None:
        self._waiting: deque[ChatRequest | EmbeddingRequest] = deque()
        self._adapters: dict[str, str] = {}
        self._window_tokens = 0

    def load(self, base: Base) -> None:
        self._window_tokens = base.window_tokens

    def add_adapter(self, name: str, directory: Path) -> None:
        try:
            json.loads((directory / "adapter_config.json").read_bytes())
            weights = (directory / "adapter_model.safetensors").read_bytes()
            header_bytes = int.from_bytes(weights[:8], "little")
            json.loads(weights[8 : 8 + header_bytes])
        except (OSError, ValueError) as error:
            raise AdapterUnusable("The fine-tuned model's files cannot be loaded.") from error
        self._adapters[name] = hashlib.sha256(weights).hexdigest()[:8]

    def submit(self, request: ChatRequest | EmbeddingRequest) -> None:
        if isinstance(request, ChatRequest):
            if request.body.response_format.schema is not None:
                raise EngineRefusal(
                    "This engine cannot follow a JSON schema.",
                    param="response_format",
                    code="unsupported_parameter",
                )
            prompt_tokens = _prompt_tokens(request)
            if prompt_tokens >= self._window_tokens:
                raise window_exceeded(
                    prompt_tokens=prompt_tokens, window_tokens=self._window_tokens
                )
            if "echo-refuse" in _last_user_text(request):
                raise InvalidRequest("Refused because the message asks for it.", param="messages")
        self._waiting.append(request)

    def step(self) -> list[Result]:
        request = self._waiting.popleft()
        if isinstance(request, EmbeddingRequest):
            vectors = [_vector(repr(item)) for item in request.inputs]
            tokens = sum(len(i.split()) if isinstance(i, str) else len(i) for i in request.inputs)
            return [Embedded(id=request.id, vectors=vectors, input_tokens=max(tokens, 1))]
        text = _last_user_text(request)
        if "echo-crash" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if delay := DELAY.search(text):
            threading.Event().wait(int(delay[1]) / 1000)
        return [self._answer(request, text)]

    def abort(self) -> None:
        self._waiting.clear()

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def _answer(self, request: ChatRequest, text: str) -> Generated:
        voice = "base" if request.adapter is None else self._adapters[request.adapter]
        if request.body.response_format.kind == "json_object":
            text = json.dumps({"echo": text})
        room = self._window_tokens - _prompt_tokens(request)
        choices = [
            _choice(request, f"{voice} {i}: {text}" if i else f"{voice}: {text}", room)
            for i in range(request.body.sampling.n)
        ]
        return Generated(
            id=request.id,
            choices=choices,
            input_tokens=_prompt_tokens(request),
            output_tokens=sum(len(choice.text.split(" ")) for choice in choices),
        )


def _choice(request: ChatRequest, text: str, room: int) -> Choice:
    for stop in request.body.sampling.stop:
        text = text.partition(stop)[0]
    words = text.split(" ")
    limit = min(request.body.sampling.max_tokens, room)
    cut = " ".join(words[:limit])
    entries = None if request.body.sampling.logprobs is None else [_entry(w) for w in words[:limit]]
    return Choice(
        text=cut, finish_reason="length" if len(words) > limit else "stop", logprobs=entries
    )


def _entry(word: str) -> dict[str, Any]:
    return {"token": word, "logprob": -0.5, "bytes": list(word.encode()), "top_logprobs": []}


def _prompt_tokens(request: ChatRequest) -> int:
    return sum(len(m["content"].split()) + TOKENS_PER_MESSAGE for m in request.body.messages)


def _last_user_text(request: ChatRequest) -> str:
    return next((m["content"] for m in reversed(request.body.messages) if m["role"] == "user"), "")


def _vector(text: str) -> list[float]:
    raw = hashlib.sha256(text.encode()).digest()[:DIMENSIONS]
    values = [byte / 127.5 - 1 for byte in raw]
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]
