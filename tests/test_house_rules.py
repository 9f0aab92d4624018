"""The rules of CONTRIBUTING.md that neither ruff nor mypy nor import-linter can hold.

Each rule is a function from a source file to its findings, and each exception stands in a table
with its reason; one that is no longer needed fails as well. Patterns are written so that this file
does not match them itself.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path

import pytest

from adapters.process.settings import Settings
from domain import limits

ROOT = Path(__file__).parent.parent
PRODUCT = ("domain", "projections", "adapters", "gpu_runners", "api")
CODE = (*PRODUCT, "bench", "docs", "tests")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".sql", ".json", ".yaml", ".yml", ".sh", ".mjs", ".cjs"}
TEXT_NAMES = {"Makefile", "run", "LICENSE", ".gitignore"}
NOT_OURS = {".git", ".venv", ".venv-vllm", ".gridline", "node_modules", "cases", "__pycache__"}
FUNCTION_LINES_MAX = 50
NINE_OF_TEN_LINES_MAX = 18
NAMELESS = {"utils", "util", "helpers", "helper", "common", "base", "misc", "tools", "stuff"}


@dataclass(frozen=True)
class Source:
    """One Python file of ours."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_product(self) -> bool:
        return self.name.split("/")[0] in PRODUCT

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


Findings = Iterator[tuple[int, str]]
Rule = Callable[[Source], Findings]


@cache
def sources() -> tuple[Source, ...]:
    return tuple(
        Source(path)
        for top in CODE
        for path in sorted((ROOT / top).rglob("*.py"))
        if not NOT_OURS & set(path.parts)
    )


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _uses(*names: str) -> Rule:
    """Attribute chains and names that end in one of these, and imports of them."""

    def rule(source: Source) -> Findings:
        for node in ast.walk(source.tree):
            found = ""
            if isinstance(node, ast.Attribute | ast.Name):
                found = _dotted(node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if f"{node.module}.{alias.name}" in names:
                        yield node.lineno, f"imports {node.module}.{alias.name}"
            for name in names:
                if isinstance(node, ast.expr) and f".{found}".endswith(f".{name}"):
                    yield node.lineno, found

    return rule


def _imports(*modules: str) -> Rule:
    def rule(source: Source) -> Findings:
        for line, name in _imported(source):
            if name in modules:
                yield line, f"imports {name}"

    return rule


def _imported(source: Source) -> Findings:
    """Every module that a file imports, and every name that it imports from one."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _bare_sleeps(source: Source) -> Findings:
    """Sleeps outside a `while`: those inside look for what they wait for."""
    waiting = {
        id(inner)
        for loop in ast.walk(source.tree)
        if isinstance(loop, ast.While)
        for inner in ast.walk(loop)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and id(node) not in waiting:
            name = _dotted(node)
            if name == "time.sleep":
                yield node.lineno, name


SQL = re.compile(
    r"\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM|CREATE|ALTER|DROP|TRUNCATE|LOCK|LISTEN|NOTIFY|WITH|"
    r"COPY|GRANT|SET)\s"
)


def _built_sql(source: Source) -> Findings:
    """SQL text with values written into it: by an f-string, `%`, `+` or `format`."""
    for node in ast.walk(source.tree):
        first: ast.AST | None = None
        if isinstance(node, ast.JoinedStr) and len(node.values) > 1:
            first = node.values[0]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.Add):
            first = node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            first = node.func.value if node.func.attr == "format" else None
        if (
            isinstance(node, ast.expr)
            and isinstance(first, ast.Constant)
            and isinstance(first.value, str)
            and SQL.match(first.value)
        ):
            yield node.lineno, first.value.strip().split("\n")[0]


def _long_functions(source: Source) -> Findings:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {lines} lines"


def _without_docstring(source: Source) -> Findings:
    if source.text and not ast.get_docstring(source.tree):
        yield 1, "the module has no docstring"


def _nameless(source: Source) -> Findings:
    if NAMELESS & {source.path.stem.strip("_"), source.path.parent.name}:
        yield 1, "a module name that says nothing"


@dataclass(frozen=True)
class HouseRule:
    """`exceptions` maps a file to why the rule does not hold there."""

    finds: Rule
    reason: str
    product_only: bool = True
    exceptions: Mapping[str, str] = field(default_factory=dict)


RULES: dict[str, HouseRule] = {
    "clock": HouseRule(
        _uses("datetime.now", "datetime.utcnow", "datetime.today", "date.today", "time.time"),
        "Time comes from the Clock of the composition root.",
        exceptions={
            "adapters/process/clock.py": "it is the clock",
            "adapters/objects.py": "files left by a crash are as old as the disk says",
        },
    ),
    "sleep": HouseRule(
        _bare_sleeps,
        "Wait for a condition, in a loop that looks for it.",
        product_only=False,
    ),
    "environment": HouseRule(
        _uses("os.environ", "os.getenv", "os.putenv"),
        "Settings are read once, by adapters/process/settings.py.",
        exceptions={"adapters/process/settings.py": "it reads the environment"},
    ),
    "randomness": HouseRule(
        _imports("random", "secrets", "uuid"),
        "Ids come from the IdSource; seeds are facts of the job.",
        exceptions={
            "adapters/process/clock.py": "the IdSource",
            "adapters/embedded/broker.py": "names a broker's life",
            "adapters/embedded/postgres.py": "draws the roles' passwords",
            "adapters/objects.py": "names unfinished files",
            "adapters/operators/actions.py": "draws API keys, and ids of what an operator typed",
            "adapters/event_log/writer.py": "jitters its retries",
            "api/http/envelope.py": "draws request ids",
        },
    ),
    "print": HouseRule(
        _uses("print"),
        "Processes log; only the operator's commands print.",
        exceptions={"adapters/operators/commands.py": "it is where results meet people"},
    ),
    "built SQL": HouseRule(
        _built_sql,
        "SQL is constant text with bound parameters; names are composed by psycopg.sql.",
        exceptions={
            "adapters/worker/worker.py": "LISTEN takes no parameter; the channel is a constant"
        },
    ),
    "long functions": HouseRule(
        _long_functions,
        f"A function is read without scrolling: {FUNCTION_LINES_MAX} lines.",
        product_only=False,
    ),
    "docstrings": HouseRule(
        _without_docstring,
        "A module says what it is, who calls it and what it must never do.",
        product_only=False,
    ),
    "module names": HouseRule(
        _nameless, "If a thing has no name, its design is unfinished.", product_only=False
    ),
    "mocks": HouseRule(
        _imports("unittest.mock", "mock", "unittest"),
        "Fakes that pass the same contract suite as the real thing, never mocks.",
        product_only=False,
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_sources_keep_the_rule(name: str) -> None:
    rule = RULES[name]
    findings: dict[str, list[str]] = {}
    for source in sources():
        if source.is_product or not rule.product_only:
            for line, found in rule.finds(source):
                findings.setdefault(source.name, []).append(f"{source.name}:{line}: {found}")

    broken = [each for file in findings if file not in rule.exceptions for each in findings[file]]
    assert not broken, "\n".join([rule.reason, *broken])
    assert not rule.exceptions.keys() - findings.keys(), "an exception that is no longer needed"


def test_nine_of_ten_functions_are_read_at_a_glance() -> None:
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for source in sources()
        if source.is_product
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    )

    assert lengths[len(lengths) * 9 // 10] <= NINE_OF_TEN_LINES_MAX


UNWANTED: dict[str, tuple[str, dict[str, str]]] = {
    r"(?<!\w)/wor[k]/|/hom[e]/|/tm[p]/|/User[s]/|\.\./share[d]": (
        "The product knows no machine's paths.",
        {".ci/run": "a Kafka beside the checkout is used where there is one"},
    ),
    r"pypi\.or[g]|pythonhosted\.or[g]|npmjs\.or[g]|pytorch\.or[g]|registry\.npm": (
        "Registries are reached through their clients' own settings.",
        {},
    ),
    r"\b(TOD[O]|FIXM[E]|XX[X])\b|type: ignore\s*$|noqa\s*$": (
        "Work that is left is an issue; a silenced warning names which.",
        {},
    ),
    r"(?i)sub-?agen[t]|\bas an A[I]\b|our brie[f]\b|(readings|design|house-style)\.m[d]": (
        "The product speaks of itself alone.",
        {},
    ),
}


@cache
def texts() -> Mapping[str, str]:
    """All text files of ours, by their name."""
    found = {}
    for directory, folders, files in os.walk(ROOT):
        folders[:] = sorted(set(folders) - NOT_OURS)
        for path in (Path(directory) / file for file in sorted(files)):
            if path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES:
                found[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    return found


@pytest.mark.parametrize("pattern", UNWANTED, ids=[reason for reason, _ in UNWANTED.values()])
def test_no_file_holds_what_does_not_belong(pattern: str) -> None:
    reason, exceptions = UNWANTED[pattern]
    found: dict[str, list[str]] = {}
    for name, text in texts().items():
        for number, line in enumerate(text.splitlines(), start=1):
            if re.search(pattern, line):
                found.setdefault(name, []).append(f"{name}:{number}: {line.strip()[:100]}")

    broken = [each for file in found if file not in exceptions for each in found[file]]
    assert not broken, "\n".join([reason, *broken])
    assert not exceptions.keys() - found.keys(), "an exception that is no longer needed"


STARTED_NOT_IMPORTED: dict[str, str] = {
    "adapters.operators.cli": "the program gridlined",
    "adapters.event_log.memory_store": "the store of tests of rules, which need no database",
    "adapters.embedded.launch": "a script that process.py runs",
    "gpu_runners.install_engines": "a script of the Makefile",
}
"""Modules that nothing of the product imports. Packages' `__main__` need no entry."""


def test_every_module_is_imported_or_started_by_something() -> None:
    modules = {source.module for source in sources() if source.is_product}
    used: set[str] = set()
    for source in sources():
        if not source.is_product:
            continue
        used |= {name for _, name in _imported(source)}
        used |= {  # `-m` of a child process, or importlib
            node.value
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Constant) and node.value in modules
        }
    packages = {module.rpartition(".")[0] for module in modules}

    unused = {m for m in modules - used - packages if not m.endswith("__main__")}

    assert unused == STARTED_NOT_IMPORTED.keys()


NOT_ASKED_FOR: dict[str, str] = {
    "DAILY_SPEND_USD_NEW_ACCOUNT": "accounts that people open themselves are still to come",
    "DPO_ADAPTER_BYTES_MAX": "DPO training is still to come",
    "TRAINING_AT_A_TIME": "an account holds the id of its one training, so the rule is its shape",
}
"""Limits that no code reads."""


def test_every_setting_and_limit_is_asked_for_somewhere() -> None:
    settings = {field.name for field in fields(Settings)}
    bounds = {name for name in vars(limits) if name.isupper()}
    places = {"adapters/process/settings.py", "domain/limits.py"}
    asked: set[str] = set()
    for source in sources():
        if source.is_product and source.name not in places:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Attribute):
                    asked.add(node.attr)
                elif isinstance(node, ast.Name):
                    asked.add(node.id)

    assert (settings | bounds) - asked == NOT_ASKED_FOR.keys()


def test_the_distribution_lists_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]

    there = {
        source.module
        for source in sources()
        if source.is_product and source.path.name == "__init__.py"
    }

    assert set(listed) == there
