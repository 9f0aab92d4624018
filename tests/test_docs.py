"""The reference pages are complete: a setting, route, code or limit that its page does not name
fails here, and so does a name on a page that the product no longer has. The page of events is held
to the code in `integration/test_projections.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from adapters.process.settings import Settings
from api.app import ROUTES
from api.http.errors import BASE_PATH
from api.routes.not_offered import INSTEAD, TO_COME, AnythingElse, ToCome
from domain import limits
from domain.inputs.requests import chat_body, embeddings_body
from domain.inputs.requests.fields import NOTHING_ASKED
from domain.inputs.requests.schema_values import KEYWORDS
from domain.work import job_errors
from tests.test_house_rules import Source, sources

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"[a-z]+(_[a-z0-9]+)+|overloaded")

OUR_PATH = re.compile(r"`((?:docs|domain|adapters|api|tests)/(?!\S*NNNN)[\w/.-]+\.\w+)`")
"""Files of ours that a page names; one with NNNN in it is a pattern."""


@cache
def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def first_cells(text: str) -> list[str]:
    """What the first column of a page's tables names in code type."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_the_settings_page_names_exactly_the_settings() -> None:
    names = [f"GRIDLINE_{field.name.upper()}" for field in fields(Settings)]

    assert first_cells(page("settings.md")) == names


def test_the_settings_page_gives_the_defaults_in_force() -> None:
    for field in fields(Settings):
        row = next(r for r in page("settings.md").splitlines() if f"_{field.name.upper()}`" in r)
        default = row.split("|")[2].strip().strip("`")

        assert default == str(field.default), row


def test_the_settings_page_says_of_each_what_the_code_says() -> None:
    for name, field in vars(Settings)["__pydantic_fields__"].items():
        row = next(r for r in page("settings.md").splitlines() if f"_{name.upper()}`" in r)

        assert row.split(" | ", 2)[-1].strip(" |") == " ".join(field.description.split())


def test_the_limits_page_names_exactly_the_limits() -> None:
    names = [name for name in vars(limits) if name.isupper() and name != "MIB"]

    assert sorted(first_cells(page("limits.md"))) == sorted(names)


def metrics_of(source: Source) -> Iterator[tuple[str, str]]:
    """Name and help of each Prometheus metric that a module makes."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if len(texts) > 1 and str(texts[0]).startswith("gridline_"):
                yield str(texts[0]), str(texts[1])


def test_the_metrics_page_says_of_each_metric_what_the_code_says() -> None:
    made = {each for source in sources() if source.is_product for each in metrics_of(source)}
    rows = [row.split("|") for row in page("metrics.md").splitlines() if row.startswith("| `")]

    assert {(row[1].strip(" `"), row[3].strip()) for row in rows} == made


def section(name: str, title: str) -> str:
    return page(name).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_batches_page_names_exactly_the_fields_that_lines_may_have() -> None:
    for title, readers in (("Chat", chat_body.READERS), ("Embeddings", embeddings_body.READERS)):
        named = first_cells(section("batches.md", title))

        assert sorted([*named, "model"]) == sorted(readers)


def test_the_batches_page_names_every_value_that_changes_nothing() -> None:
    text = section("batches.md", "Fields that are not offered")
    named = first_cells(text)

    for field, values in NOTHING_ASKED.items():
        assert f"`{field}`" in text
        assert (field in named) == bool(values)


def test_the_batches_page_names_every_keyword_that_holds_an_answer() -> None:
    text = section("batches.md", "Response formats")

    for keyword in {name for names in KEYWORDS.values() for name in names}:
        assert f"`{keyword}`" in text


def test_the_api_page_lists_exactly_the_routes() -> None:
    routes = {
        f"{method} {route.path.replace(':path', '').removeprefix(BASE_PATH)}"
        for route in ROUTES
        for method in vars(route.endpoint).get("_handlers", ("GET",))
        if not isinstance(route.endpoint, AnythingElse | ToCome)
    }

    offered = page("api.md").partition("## Not offered")[0]

    assert set(first_cells(offered)) == routes


def test_the_api_page_lists_what_is_refused_with_an_alternative() -> None:
    refused = page("api.md").partition("## Not offered")[2]

    to_come = {path.replace(":path", "") for path in TO_COME}
    assert sorted(first_cells(refused)) == sorted({f"/{first}" for first in INSTEAD} | to_come)


def _codes_in_call(node: ast.Call, places: Mapping[str, int]) -> list[ast.expr]:
    values = [k.value for k in node.keywords if k.arg in ("code", "failure_code")]
    is_method = isinstance(node.func, ast.Attribute)
    place = places.get(ast.unparse(node.func).rpartition(".")[2])
    return values if place is None else values + node.args[place - is_method :][:1]


def _codes_in(node: ast.AST, places: Mapping[str, int]) -> list[ast.expr]:
    match node:
        case ast.Call():
            return _codes_in_call(node, places)
        case ast.Assign(targets=[ast.Name(id="code" | "NeverRan")]):
            return [node.value]
        case ast.AnnAssign(target=ast.Name(id="code"), value=ast.expr() as value):
            return [value]
        case ast.Dict():
            keyed = zip(node.keys, node.values, strict=True)
            return [v for k, v in keyed if isinstance(k, ast.Constant) and k.value == "code"]
    return []


def codes_of(source: Source) -> Iterator[str]:
    """Literals that become a `code`: by keyword, as a class attribute, in a dictionary, in the
    place of a parameter of that name, or as a name in a `Literal` of codes."""
    places = {
        node.name: [argument.arg for argument in node.args.args].index("code")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef) and "code" in {a.arg for a in node.args.args}
    }
    for node in ast.walk(source.tree):
        for value in _codes_in(node, places):
            for part in ast.walk(value):
                text = part.value if isinstance(part, ast.Constant) else None
                if isinstance(text, str) and CODE.fullmatch(text):
                    yield text


def test_the_errors_page_names_exactly_the_codes_that_are_raised() -> None:
    raised = {code for source in sources() if source.is_product for code in codes_of(source)}

    assert sorted(set(first_cells(page("errors.md")))) == sorted(raised | job_errors.SIDES.keys())


@pytest.mark.parametrize("code", job_errors.SIDES)
def test_the_errors_page_gives_the_side_that_pays(code: str) -> None:
    who_pays = page("errors.md").partition("## Who pays")[2]

    row = next(row for row in who_pays.splitlines() if row.startswith(f"| `{code}` "))

    assert row.split("|")[2].strip() == job_errors.SIDES[code]


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"\]\(([^)#:]+)\)", text)
        named_from_root = OUR_PATH.findall(text)
        broken += [f"{path.name}: {to}" for to in named if not (path.parent / to).exists()]
        broken += [f"{path.name}: {to}" for to in named_from_root if not (ROOT / to).exists()]

    assert not broken


CITED = re.compile(r"(?i)\b(migration|fine-tuning|evals|quickstart|pricing|models?) page\b")


def test_a_public_page_that_is_cited_is_listed() -> None:
    """By the name on the page of them; a page of another kind has another word before it."""
    listed = re.findall(r"^\| the ([\w-]+) page \|", page("public-pages.md"), flags=re.MULTILINE)

    cited = {each.lower() for source in sources() for each in CITED.findall(source.text)}

    assert {"migration", "fine-tuning"} <= cited
    assert cited <= set(listed)


def test_sources_name_pages_that_exist() -> None:
    named = {
        (source.name, to)
        for source in sources()
        for to in re.findall(r"`(docs/[\w/.-]+\.md)`", source.text)
    }

    assert not [each for each in named if not (ROOT / each[1]).exists()]
