"""What is measured of trained tokens, and each step's figures as the CSV that OpenAI's jobs have as
their result file.

`train_lora.py` and the echo child write it beside the adapter. The columns are OpenAI's, read by
name by Weights & Biases' sync and others; a cell without a value is empty. The same numbers give
the same bytes.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from domain.messages import STEP_METRICS

COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")


@dataclass(slots=True)
class Tally:
    """Sums over trained tokens."""

    loss: float = 0.0
    correct: int = 0
    tokens: int = 0

    def add(self, other: Tally) -> None:
        self.loss += other.loss
        self.correct += other.correct
        self.tokens += other.tokens

    @property
    def mean_loss(self) -> float:
        return self.loss / self.tokens

    @property
    def accuracy(self) -> float:
        return self.correct / self.tokens


def write_step_metrics(directory: Path, steps: Sequence[Tally], evaluation: Tally | None) -> None:
    """One row a step, counted from 1; the last one has what the finished adapter was evaluated at,
    if rows were held out."""
    with (directory / STEP_METRICS).open("w", encoding="ascii", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for number, step in enumerate(steps, start=1):
            valid = evaluation if number == len(steps) else None
            writer.writerow([number, *_cells(step), *_cells(valid)])


def _cells(tally: Tally | None) -> tuple[str, str]:
    if tally is None:
        return "", ""
    return f"{tally.mean_loss:.6g}", f"{tally.accuracy:.6g}"
