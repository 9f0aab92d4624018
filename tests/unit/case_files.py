"""The small inputs of `tests/unit/cases`: what people really upload and send."""

from __future__ import annotations

from pathlib import Path

CASES = Path(__file__).parent / "cases"


def case_bytes(folder: str, name: str) -> bytes:
    return (CASES / folder / name).read_bytes()


def case_names(folder: str) -> list[str]:
    names = sorted(path.name for path in (CASES / folder).iterdir())
    assert names
    return names
