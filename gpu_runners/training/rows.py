"""The rows of a training or validation file, in the order that config and seed decide.

`train_lora.py` reads, holds out and shuffles with it. It must never depend on a library's random
generator: the same file and seed give the same order on every machine and version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from domain.errors import InvalidFile
from domain.inputs.jsonl import Line, LineSplitter
from domain.inputs.training_row import ChatRow, read_row
from domain.limits import MIB, TRAINING_LINE_BYTES_MAX
from gpu_runners.rendering.training_rows import RenderedRow, Renderer, TrainingRefused


@dataclass(frozen=True, slots=True)
class RenderedRows:
    """The rows that keep a trained token, and how many were dropped for keeping none."""

    rows: tuple[RenderedRow, ...]
    dropped: int


def read_chat_rows(path: Path) -> list[ChatRow]:
    """With the upload's own reader. What does not read all the same is `invalid_row`."""
    splitter = LineSplitter(line_bytes_max=TRAINING_LINE_BYTES_MAX)
    rows: list[ChatRow] = []
    with path.open("rb") as file:
        while block := file.read(MIB):
            rows += map(_row, splitter.feed(block))
    return [*rows, *map(_row, splitter.finish())]


def hold_out(
    rows: Sequence[ChatRow], *, eval_rows: int, seed: int
) -> tuple[list[ChatRow], list[ChatRow]]:
    """(to train, held out), both in file order."""
    chosen = set(shuffled(len(rows), seed=seed, purpose="holdout")[:eval_rows])
    train = [row for i, row in enumerate(rows) if i not in chosen]
    return train, [rows[i] for i in sorted(chosen)]


def shuffled(count: int, *, seed: int, purpose: str) -> list[int]:
    """The numbers below `count`, in an order drawn from the seed by SHA-256."""

    def rank(i: int) -> bytes:
        return hashlib.sha256(f"{purpose}:{seed}:{i}".encode()).digest()

    return sorted(range(count), key=rank)


def render_rows(renderer: Renderer, rows: Sequence[ChatRow]) -> RenderedRows:
    """Raises TrainingRefused with `template_mismatch`, naming the first row that does not fit."""
    rendered = [renderer.render(row) for row in rows]
    kept = tuple(row for row in rendered if row is not None)
    return RenderedRows(kept, len(rendered) - len(kept))


def _row(line: Line) -> ChatRow:
    try:
        row = read_row(line)
    except InvalidFile as refused:
        raise TrainingRefused(refused.message, code="invalid_row") from None
    if not isinstance(row, ChatRow):
        raise TrainingRefused(f"Line {line.number} is not a chat row.", code="invalid_row")
    return row
