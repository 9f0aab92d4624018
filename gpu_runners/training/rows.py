"""The rows of a training or validation file, in the order that config and seed decide.

`train_lora.py` reads, holds out and shuffles with it. It must never depend on a library's random
generator: the same file and seed give the same order on every machine and version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_runners.rendering import RenderedRow, Renderer, TrainingRefused

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ChatRow:
    """One conversation. `line` counts from 1, blank lines included."""

    line: int
    messages: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RenderedRows:
    """The rows that keep a trained token, and how many were dropped for keeping none."""

    rows: tuple[RenderedRow, ...]
    dropped: int


def read_chat_rows(path: Path) -> list[ChatRow]:
    """The file was checked when it was uploaded; what still does not read is `invalid_row`."""
    rows = []
    with path.open("rb") as file:
        for line, text in enumerate(file, start=1):
            content = text.removeprefix(_BOM) if line == 1 else text
            if content.strip():
                rows.append(ChatRow(line, _messages(content, line)))
    return rows


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
    rendered = [renderer.render(row.messages, line=row.line) for row in rows]
    kept = tuple(row for row in rendered if row is not None)
    return RenderedRows(kept, len(rendered) - len(kept))


def _messages(content: bytes, line: int) -> list[dict[str, Any]]:
    try:
        messages = json.loads(content)["messages"]
        if messages and all(
            isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages
        ):
            return list(messages)
    except (ValueError, KeyError, TypeError):
        pass
    raise TrainingRefused(f"Row {line} is not a chat row.", code="invalid_row")
