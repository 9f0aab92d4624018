"""Valid things in short calls, for tests that change one detail of them."""

from __future__ import annotations

import json
from typing import Any

from domain.inputs.jsonl import Line
from domain.inputs.training_row import ChatRow, TrainingRow, read_row


def row_line(value: Any, *, line: int = 1) -> Line:
    """A line of a file that holds this JSON value, or these bytes."""
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Line(number=line, start_byte=0, end_byte=len(raw) + 1, content=raw)


def training_row(value: Any, *, line: int = 1) -> TrainingRow:
    return read_row(row_line(value, line=line))


def chat_row(value: Any, *, line: int = 1) -> ChatRow:
    row = training_row(value, line=line)
    assert isinstance(row, ChatRow)
    return row
