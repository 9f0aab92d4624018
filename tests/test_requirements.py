"""Both sides of `requirements.py`: every test it names is there, and every id that a test names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.requirements import REQUIREMENTS

HERE = Path(__file__).parent
STATEMENTS = {"M": 178, "F": 307, "E": 94, "Q": 58}
"""How many statements each page has; they are numbered from 1."""
ID = re.compile(r"\b[MFEQ]-\d{3}\b")


@cache
def named_in(file: str) -> dict[str, str]:
    """The test functions of a file, with their docstrings."""
    path = HERE / file
    if not path.is_file():
        return {}
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def test_every_statement_of_the_pages_is_a_row_once() -> None:
    expected = {f"{page}-{n:03}" for page, most in STATEMENTS.items() for n in range(1, most + 1)}
    counts = Counter(requirement.id for requirement in REQUIREMENTS)

    assert counts.keys() == expected
    assert max(counts.values()) == 1


def test_every_row_is_held_by_tests_that_exist_or_waits_for_something() -> None:
    for row in REQUIREMENTS:
        assert row.says, row.id
        assert bool(row.held_by) != bool(row.later), f"{row.id} is held or waits, one of the two"

    missing = [
        f"{row.id}: {held_by}"
        for row in REQUIREMENTS
        for held_by in row.held_by
        if held_by.partition("::")[2] not in named_in(held_by.partition("::")[0])
    ]

    assert not missing


def test_a_test_that_names_a_statement_is_named_by_its_row() -> None:
    rows = {requirement.id: requirement for requirement in REQUIREMENTS}
    for path in HERE.rglob("test_*.py"):
        file = path.relative_to(HERE).as_posix()
        for name, docstring in named_in(file).items():
            for named in ID.findall(docstring):
                assert f"{file}::{name}" in rows[named].held_by, f"{file}::{name} names {named}"
