"""Answers in the making on transformers: rows that generate together, one token a step.

`engine_transformers.py` makes batches of rows that share an adapter and steps them. Rows are
left-padded over one cache, and a finished one leaves at once. What goes wrong with one row ends its
line, whatever it is, and never reaches another one.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from domain.errors import GridlineError
from domain.inputs.requests.sampling import Sampling
from gpu_runners.inference.answer_form import Matcher
from gpu_runners.inference.answer_text import AnswerText, Position
from gpu_runners.inference.drawing import draw
from gpu_runners.inference.engine import ChatRequest, EngineFailed, FinishReason

PROMPT_TOKENS_A_PASS = 4_096
"""Of all rows together: longer prompts go through the model in pieces, so that what a pass takes
has a bound."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer that a line asks for, number `choice` of `of`."""

    request: ChatRequest
    choice: int
    of: int
    prompt: list[int]
    token_limit: int

    @property
    def reserved_tokens(self) -> int:
        """What the answer may come to take in the cache."""
        return len(self.prompt) + self.token_limit


@dataclass(slots=True)
class Row:
    """An answer in the making. `failure` ends it like a `finish_reason`."""

    asked: Asked
    source: torch.Generator
    writing: AnswerText
    matcher: Matcher | None
    drawn: Drawn | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    failure: GridlineError | None = None

    @property
    def line(self) -> str:
        return self.asked.request.id

    @property
    def sampling(self) -> Sampling:
        return self.asked.request.body.sampling

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None


class Drawn:
    """The log-probabilities of an answer's tokens, kept as plain numbers: a window of them with
    twenty alternatives each would be hundreds of megabytes as objects."""

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        self._tokens = array("l")
        self._logprobs = array("f")

    def add(self, token: int, logprobs: torch.Tensor) -> None:
        best = torch.topk(logprobs, self._alternatives)
        self._tokens.extend([token, *best.indices.tolist()])
        self._logprobs.extend([float(logprobs[token]), *best.values.tolist()])

    def positions(self) -> list[Position]:
        """In the order of the answer."""
        step = self._alternatives + 1
        found = []
        for at in range(0, len(self._tokens), step):
            tokens, values = self._tokens[at : at + step], self._logprobs[at : at + step]
            best = list(zip(tokens[1:], values[1:], strict=True))
            found.append(Position(tokens[0], values[0], best))
        return found


class Batch:
    """Rows that generate together."""

    def __init__(self, model: Any, ends: frozenset[int], rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self._model = model
        self._ends = ends
        self._cache = DynamicCache(config=model.config)
        width = max(len(row.asked.prompt) for row in rows)
        self._ids = torch.zeros(len(rows), width, dtype=torch.long, device=model.device)
        self._mask = torch.zeros_like(self._ids)
        for index, row in enumerate(rows):
            prompt = row.asked.prompt
            self._ids[index, width - len(prompt) :] = torch.tensor(prompt)
            self._mask[index, width - len(prompt) :] = 1

    def step(self) -> list[Row]:
        """One token more for every row; returns the rows that ended with it."""
        for row, logits in zip(self.rows, self._next_logits(), strict=True):
            try:
                _extend(row, logits, self._ends)
            except GridlineError as refusal:
                row.failure = refusal
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this row's alone
                logger.warning("an answer failed: %s", type(error).__name__)
                row.failure = EngineFailed("The engine could not finish this line.")
        self._end_lines_that_failed()
        ended = [row for row in self.rows if row.ended]
        self._go_on_with([index for index, row in enumerate(self.rows) if not row.ended])
        return ended

    def _next_logits(self) -> torch.Tensor:
        rows, width = self._ids.shape
        cached = self._mask.shape[1] - width
        positions = (self._mask.cumsum(-1) - 1).clamp_min(0)[:, cached:]
        piece = max(1, PROMPT_TOKENS_A_PASS // rows)
        for start in range(0, width, piece):
            end = min(start + piece, width)
            output = self._model(
                input_ids=self._ids[:, start:end],
                attention_mask=self._mask[:, : cached + end],
                position_ids=positions[:, start:end],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return torch.Tensor(output.logits[:, -1].float().cpu())

    def _end_lines_that_failed(self) -> None:
        """A line has all of its answers or none."""
        failures = {row.line: row.failure for row in self.rows if row.failure}
        for row in self.rows:
            row.failure = failures.get(row.line)

    def _go_on_with(self, kept: list[int]) -> None:
        ended = len(kept) < len(self.rows)
        self.rows = [self.rows[index] for index in kept]
        if not self.rows:
            return
        if ended:
            chosen = torch.tensor(kept, device=self._mask.device)
            self._cache.batch_select_indices(chosen)
            self._mask = self._mask[chosen]
        last = [[row.tokens[-1]] for row in self.rows]
        self._ids = torch.tensor(last, device=self._mask.device)
        self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], dim=1)


def _extend(row: Row, logits: torch.Tensor, ends: frozenset[int]) -> None:
    if row.matcher is not None:
        allowed = torch.from_numpy(row.matcher.allowed())[: len(logits)]
        logits = logits.masked_fill(~allowed, -torch.inf)
    prompt = row.asked.prompt
    token = draw(logits, row.sampling, prompt=prompt, answer=row.tokens, source=row.source)
    row.tokens.append(token)
    if row.drawn is not None:
        row.drawn.add(token, torch.log_softmax(logits, dim=-1))
    if token in ends:
        row.finish_reason = "stop"
        return
    if row.matcher is not None:
        row.matcher.take([token])
    _write(row, row.writing.add(token))
    if row.finish_reason is None and len(row.tokens) >= row.asked.token_limit:
        row.finish_reason = "length"


def _write(row: Row, letters: str) -> None:
    """The answer grows; a stop text ends it and is left out."""
    before, row.text = len(row.text), row.text + letters
    found = [
        at
        for stop in row.sampling.stop
        if (at := row.text.find(stop, max(0, before - len(stop) + 1))) >= 0
    ]
    if letters and found:
        row.text, row.finish_reason = row.text[: min(found)], "stop"
