"""Figures: what one is, the conditions it was taken under, and the file that keeps the newest of
each name."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parent / "results.json"
SYNCS = 200


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. `goal` is a comparison, such as ">= 3"; `peer` what it is measured against."""

    name: str
    value: float
    unit: str
    goal: str
    peer: str
    conditions: str

    @property
    def reached(self) -> bool:
        """Whether the value meets the goal."""
        comparison, bound = self.goal.split()
        return self.value >= float(bound) if comparison == ">=" else self.value <= float(bound)


def keep(figures: Iterable[Figure], path: Path = RESULTS) -> None:
    """Puts the figures in the file, in place of older ones of the same names."""
    kept = {entry["name"]: entry for entry in json.loads(path.read_text())} if path.exists() else {}
    kept.update((figure.name, asdict(figure)) for figure in figures)
    text = json.dumps([kept[name] for name in sorted(kept)], indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def machine() -> str:
    """The machine in a few words."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}"


def syncs_per_second(directory: Path) -> int:
    """How many small writes a second the disk below a directory makes durable (fdatasync)."""
    seconds = []
    path = directory / "fdatasync"
    with path.open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            start = time.perf_counter()
            file.write(b"x" * 512)
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - start)
    path.unlink()
    return round(1 / median(seconds))
