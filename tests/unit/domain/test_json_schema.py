"""JSON schemas of response formats: what is followed, what is refused with its place and cause."""

from __future__ import annotations

import contextlib
import json
import re
import time
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain import limits
from domain.inputs.requests.json_schema import followable
from domain.inputs.requests.schema_pattern import (
    BadPattern,
    Characters,
    Choice,
    Node,
    Repeat,
    Sequence,
    read_pattern,
    written,
)
from domain.inputs.requests.schema_values import KEYWORDS, Unfollowable
from tests.unit.case_files import case_bytes


def held_to(schema: dict[str, Any]) -> Any:
    return followable(schema)


def refusal(schema: Any) -> str:
    with pytest.raises(Unfollowable) as caught:
        followable(schema)
    return f"{caught.value.place} {caught.value.cause}"


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "place", "cause"),
    [
        ({"not": INTEGER}, "", "not"),
        ({"type": "object", "if": {}, "then": {}}, "", "if"),
        ({**object_of(a=INTEGER), "dependentRequired": {"a": ["b"]}}, "", "dependentRequired"),
        ({**object_of(a=INTEGER), "anyOf": [{"required": ["a"]}]}, "", "beside anyOf"),
        ({"type": "object", "oneOf": [INTEGER]}, "", "type beside oneOf"),
        (object_of(a={"$ref": "#/$defs/b", "minimum": 5}), ".properties.a", "minimum beside $ref"),
        (object_of(a=INTEGER) | {"required": ["b"]}, "", "requires b"),
        ({"type": "object", "required": ["b"]}, "", "requires b"),
        ({"$ref": "https://example.org/schema"}, "", "another document"),
        ({"$ref": "other.json#/$defs/a"}, "", "another document"),
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "", "anchor"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$anchor": "a"}}}, ".$defs.a", "$anchor"),
        ({"$dynamicRef": "#a"}, "", "$dynamicRef"),
        ({"$ref": "#/$defs/none"}, "", "a place that the schema does not have"),
        ({"$ref": "#/anyOf/7", "anyOf": []}, "", "beside $ref"),
        ({"items": {"$ref": "#/required/9"}, "type": "array"}, ".items", "does not have"),
        ({"$ref": 7}, "", "another document"),
        ({"$ref": "#"}, "", "itself"),
        ({"anyOf": [{"$ref": "#"}]}, "", "itself"),
        ({"anyOf": [{"$ref": "#"}, INTEGER]}, "", "itself with nothing of a value between"),
        (object_of(a={"$ref": "#"}), "", "without an end"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "", "without an end"),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "$defs": {"x": object_of(b={"$ref": "#/$defs/x"})},
            },
            ".properties.a",
            "without an end",
        ),
        (object_of(a={"type": "text"}), ".properties.a", "type that is none of null"),
        (object_of(a={"type": []}), ".properties.a", "type that is none of"),
        (object_of(a={"type": [["string"]]}), ".properties.a", "type that is none of"),
        (object_of(a=False), ".properties.a", "no value"),
        (object_of(a="string"), ".properties.a", "no schema"),
        ({"anyOf": []}, "", "anyOf that is no list"),
        ({"anyOf": {"a": INTEGER}}, "", "anyOf that is no list"),
        ({"allOf": [INTEGER, {"minimum": 3}]}, "", "allOf with more than one"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "", "write anyOf"),
        ({"oneOf": [object_of(a={"const": 1}), object_of(a={"const": 1.0})]}, "", "write anyOf"),
        ({"oneOf": [{"enum": ["a"]}, {"type": "string"}]}, "", "write anyOf"),
        ({"oneOf": [{"type": "array"}, {"properties": {"a": INTEGER}}]}, "", "write anyOf"),
        ({"type": "string", "minimum": 3}, "", "minimum, which says nothing of type string"),
        ({"type": "string", "enum": ["a", 1]}, "", "not of its type"),
        ({"enum": ["a"], "minLength": 1}, "", "minLength beside listed values"),
        ({"enum": ["a"], "const": "a"}, "", "const beside listed values"),
        ({"enum": []}, "", "enum that is no list"),
        ({"const": 2**53 + 1}, "", "number that not every reader"),
        ({"enum": [{"a": [1e300]}]}, "", "number that not every reader"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "", "no value fits"),
        ({"type": "string", "minLength": -1}, "", "minLength that is no integer from 0"),
        ({"type": "string", "maxLength": True}, "", "maxLength that is no integer"),
        ({"type": "string", "maxLength": 10**9}, "", "maxLength that is no integer from 0"),
        ({"type": "string", "maxLength": 5, "pattern": "a"}, "", "more than one of pattern"),
        ({"type": "string", "format": "idn-email"}, "", "format that is none of date-time"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "", "bounds that no number fits"),
        (
            {"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5},
            "",
            "no multiple from zero",
        ),
        ({"type": "integer", "maximum": -1, "multipleOf": 5}, "", "no multiple from zero"),
        ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 6}, "", "no number fits"),
        ({"type": "integer", "multipleOf": 0.5}, "", "no positive integer"),
        ({"type": "number", "multipleOf": 0}, "", "no positive number"),
        ({"type": "number", "minimum": "0"}, "", "minimum that is no number"),
        ({"type": "number", "exclusiveMinimum": True}, "", "exclusiveMinimum that is no number"),
        ({"type": "number", "minimum": 1e20}, "", "minimum beyond"),
        ({"type": "number", "minimum": 1e-12}, "", "more than 9 decimals"),
        ({"type": "array", "items": [INTEGER]}, ".items", "no schema"),
        ({"type": "array", "uniqueItems": True}, "", "uniqueItems"),
        ({"type": "array", "contains": INTEGER}, "", "contains"),
        (
            {"type": "array", "prefixItems": [INTEGER], "items": False, "minItems": 2},
            "",
            "no value",
        ),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "", "no value fits"),
        ({"type": "object", "propertyNames": {"pattern": '^"k$'}}, "", "propertyNames"),
        (
            object_of(a=INTEGER) | {"additionalProperties": INTEGER},
            "",
            "a schema of additionalProperties beside named ones",
        ),
        (
            object_of(a=INTEGER) | {"patternProperties": {"^b": INTEGER}},
            "",
            "patternProperties beside properties",
        ),
        ({"patternProperties": {"a": INTEGER, "b": INTEGER}}, "", "more than one"),
        ({"type": "object", "minProperties": 2}, "", "minProperties of more than 1"),
        ({"properties": {"a": INTEGER}, "minProperties": 1}, "", "minProperties"),
        ({"properties": []}, "", "properties that are no object"),
        ({"properties": {"a": INTEGER}, "required": "a"}, "", "required that is no list"),
        ({"x-guidance": {}}, "", "x-guidance"),
        ({"two words": 1}, "", "a name, which is not offered"),
        (object_of(**{"two words": False}), ".properties[0]", "no value"),
        ({"type": "string", "pattern": 7}, "", "pattern that is no string"),
    ],
)
def test_what_no_answer_is_held_to_is_refused_with_its_place(
    schema: dict[str, Any], place: str, cause: str
) -> None:
    said = refusal(schema)
    assert said.startswith(f"{place} ")
    assert cause in said


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, {}),
        ({"title": "t", "description": "d", "default": 1, "examples": [1]}, {}),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x"}, {}),
        ({"type": "integer", "uniqueItems": False}, {"type": ["integer"]}),
        ({"const": None}, {"enum": [None]}),
        (
            {"type": ["string", "null"], "maxLength": 5},
            {"type": ["string", "null"], "maxLength": 5},
        ),
        ({"type": ["integer", "number"]}, {"type": ["number"]}),
        ({"minimum": 3}, {"type": ["number"], "minimum": 3}),
        ({"type": "integer", "exclusiveMinimum": 0.5}, {"type": ["integer"], "minimum": 1}),
        ({"type": "integer", "multipleOf": 1}, {"type": ["integer"]}),
        (
            {"type": "integer", "minimum": -9, "multipleOf": 5},
            {"type": ["integer"], "minimum": 0, "multipleOf": 5},
        ),
        ({"allOf": [INTEGER], "description": "d"}, {"type": ["integer"]}),
        (
            {"properties": {"a": INTEGER, "b": True}, "required": ["a"]},
            {
                "type": ["object"],
                "properties": {"a": {"type": ["integer"]}, "b": {}},
                "required": ["a"],
                "additionalProperties": False,
            },
        ),
        ({"type": "object"}, {"type": ["object"], "additionalProperties": {}}),
        (
            {"type": "object", "properties": {}, "additionalProperties": False},
            {"type": ["object"], "additionalProperties": False},
        ),
        (
            {"oneOf": [INTEGER, {"type": "string"}]},
            {"anyOf": [{"type": ["integer"]}, {"type": ["string"]}]},
        ),
        (
            {"definitions": {"a/b ~": INTEGER}, "items": {"$ref": "#/definitions/a~1b%20~0"}},
            {
                "type": ["array"],
                "items": {"$ref": "#/$defs/0"},
                "$defs": {"0": {"type": ["integer"]}},
            },
        ),
    ],
)
def test_a_schema_is_written_anew_in_what_the_decoder_honours(
    given: dict[str, Any], kept: dict[str, Any]
) -> None:
    assert held_to(given) == kept


def test_branches_told_apart_by_a_listed_property_exclude_each_other() -> None:
    cat = object_of(kind={"const": "cat"}, lives=INTEGER)
    dog = object_of(kind={"enum": ["dog", "wolf"]}, name={"type": "string"})
    union = {
        "$defs": {"Cat": cat, "Dog": dog},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind"},
    }
    assert len(held_to(union)["anyOf"]) == 2
    assert "write anyOf" in refusal({"oneOf": [cat, object_of(name={"type": "string"})]})


def test_recursion_with_an_end_is_followed() -> None:
    node = object_of(value=INTEGER, next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})
    kept = held_to({"$defs": {"Node": node}, "$ref": "#/$defs/Node"})
    assert kept["$ref"] == "#/$defs/0"
    assert kept["$defs"]["0"]["properties"]["next"]["anyOf"][0] == {"$ref": "#/$defs/0"}
    assert held_to({"type": "array", "items": {"$ref": "#"}})["items"] == {"$ref": "#/$defs/0"}


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        ({"enum": ["x" * 1_000] * 200}, "128 KiB"),
        ({"prefixItems": [{}] * limits.SCHEMA_NODES_MAX}, "1,000 schemas"),
        ({"anyOf": [{}] * 23}, "20 branches"),
        ({"oneOf": [{"const": n} for n in range(101)]}, "more than 100 schemas"),
        ({"items": {"anyOf": [{}] * 13}, "prefixItems": [{"anyOf": [{}] * 12}]}, "20 branches"),
        ({"enum": list(range(limits.SCHEMA_VALUES_MAX + 1))}, "1,000 listed values"),
        ({"properties": {f"p{n}": {} for n in range(201)}}, "200 properties that are not required"),
        ({"anyOf": [{"maxLength": n} for n in range(51)]}, "50 kinds of strings"),
        ({"anyOf": [{"maximum": n} for n in range(51)]}, "50 kinds of numbers"),
        ({"anyOf": [{"pattern": "[a-z]{0,6000}"}] * 2}, "10,000 characters of patterns"),
        ({"anyOf": [{"minItems": 90_000}] * 12}, "1,000,000 items counted"),
        ({"maxItems": 30_001}, "30,000 items that may be left out"),
        ({"anyOf": [{"minItems": 9, "maxItems": 10_010}] * 3}, "30,000 items that may be left out"),
        ({"type": "object", "maxProperties": 30_001}, "30,000 items that may be left out"),
        ({"anyOf": [{"multipleOf": 6_000}, {"multipleOf": 0.6001}]}, "10,000 steps of multipleOf"),
        ({"multipleOf": 10**12}, "10,000 steps of multipleOf"),
    ],
)
def test_a_schema_has_bounds(schema: dict[str, Any], bound: str) -> None:
    assert bound in refusal(schema)


def hostile() -> list[dict[str, Any]]:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(900)} | {"d900": INTEGER}
    nested: dict[str, Any] = INTEGER
    for _ in range(55):
        nested = {"type": "array", "items": nested}
    return [
        {"enum": [[]] * 5_000_000},
        {"$defs": chain, "$ref": "#/$defs/d0"},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/" + "x/" * 60_000}}},
        {"pattern": "(" * 1_999},
        {"pattern": "[" + "a-z" * 600 + "]"},
        {"pattern": "(?:" * 20 + "a" + "){0,999999}" * 20},
        {"oneOf": [{"const": {"a": [n] * 9}} for n in range(100)]},
        nested,
        {"$ref": "#/" + "9" * 10_000},
    ]


@pytest.mark.parametrize("number", range(len(hostile())))
def test_a_hostile_schema_takes_no_time(number: int) -> None:
    schema = hostile()[number]
    started = time.process_time()
    with contextlib.suppress(Unfollowable):
        followable(schema)
    assert time.process_time() - started < 2


KEYWORD_NAMES = sorted(
    {name for names in KEYWORDS.values() for name in names}
    | {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "title", "x"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["#", "#/$defs/x", "#/0", "#/%", "a", "string", "object", "(", "date", "~"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYWORD_NAMES), inner, max_size=4)
    ),
    max_leaves=25,
)


@given(st.dictionaries(st.sampled_from(KEYWORD_NAMES), ANYTHING, max_size=5))
@settings(max_examples=1_000)
def test_any_json_is_a_schema_or_is_refused(schema: dict[str, Any]) -> None:
    with contextlib.suppress(Unfollowable):
        assert json.dumps(followable(schema))


# Patterns


@pytest.mark.parametrize(
    ("pattern", "cause"),
    [
        (r"a(?=b)", "lookahead"),
        (r"(?<!a)b", "lookahead, lookbehind"),
        (r"(?i)a", "flags"),
        (r"\bword", "escape that is not offered"),
        (r"(a)\1", "escape that is not offered"),
        (r"\p{L}", "escape that is not offered"),
        ("a{", "brace that is no repeat"),
        ("a{,2}", "brace that is no repeat"),
        ("a{2,1}", "end is before its start"),
        ("a**", "repeats a repeat"),
        ("a++", "repeats a repeat"),
        ("*a", "repeats nothing"),
        ("(a", "not closed"),
        ("a)", "not open"),
        ("[a", "ends within a class"),
        ("[]", "empty class"),
        ("[z-a]", "range within a class"),
        (r"[a-\d]", "range within a class"),
        ("a\\", "ends within an escape"),
        (r"\xg1", "not hexadecimal"),
        (r"\u{110000}", "beyond Unicode"),
        (r"\ud83d", "surrogate"),
        ("a^b", "has ^ within it"),
        ("(a$)", "has $ within it"),
        ("a$b", "$ before its end"),
        ("(" * 21, "groups more than 20 deep"),
        ("a" * 2_001, "longer than 2,000"),
    ],
)
def test_a_pattern_that_cannot_be_followed_says_why(pattern: str, cause: str) -> None:
    with pytest.raises(BadPattern, match=re.escape(cause)):
        read_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        ("^[A-Z]{2}-[0-9]{3}$", ["AB-123"], ["AB-1234", "xAB-123"]),
        ("@", ["a@b", "@"], ["a"]),
        ("^a|b$", ["axx", "xxb"], ["xax"]),
        ('^"yes"$', ['"yes"'], ["yes"]),
        (r"^C:\\dir$", ["C:\\dir"], ["C:dir"]),
        (r"^a\nb\t$", ["a\nb\t"], ["anbt"]),
        (r"^\d\w\s.$", ["1a x"], ["\u0661a x", "1\u00e9 x", "1a\u2003x", "1a \n"]),
        (r"^[^a\s]$", ["b", "\u00e9"], ["a", " ", "\u2003"]),
        (r"^(?<year>\d{4})-(?:0[1-9]|1[0-2])$", ["2026-12"], ["2026-13"]),
        (r"^\u0041\x42\u{1F600}\ud83d\ude00$", ["AB\U0001f600\U0001f600"], ["AB"]),
        (r"^[\]\-^]+\/$", ["]-^/"], ["a/"]),
        ("^a{0}b?$", ["", "b"], ["a"]),
        ("", ["", "anything"], []),
    ],
)
def test_a_pattern_is_written_as_all_readers_take_it(
    pattern: str, fits: list[str], does_not: list[str]
) -> None:
    plain = re.compile(written(read_pattern(pattern)))
    assert all(plain.search(text) for text in fits)
    assert not any(plain.search(text) for text in does_not)


PIECES = st.sampled_from(
    [
        *'ab.()|*+?^$[]-{x\u00e9"',
        *(
            "\\",
            "\\d",
            "\\s",
            "\\W",
            "\\.",
            "\\\\",
            "\\n",
            "[a-c]",
            "[^b]",
            "(?:",
            "{2}",
            "{1,3}",
            "{0,}",
        ),
    ]
)


def texts_of(node: Node) -> st.SearchStrategy[str]:
    """Strings that a tree stands for."""
    match node:
        case Characters(ranges=ranges):
            ends = {chr(end) for pair in ranges for end in pair}
            some = st.sampled_from(ranges).flatmap(lambda pair: st.integers(*pair)).map(chr)
            return st.sampled_from(sorted(ends)) | some
        case Sequence(parts=parts):
            return st.tuples(*map(texts_of, parts)).map("".join)
        case Choice(options=options):
            return st.one_of(*map(texts_of, options))
        case Repeat(part=part, least=least, most=most):
            high = least + 3 if most is None else min(most, least + 3)
            return st.lists(texts_of(part), min_size=least, max_size=high).map("".join)


@given(st.lists(PIECES, max_size=14).map("".join), st.data())
def test_what_is_generated_for_a_pattern_matches_it_and_what_was_written(
    pattern: str, data: st.DataObject
) -> None:
    try:
        node = read_pattern(pattern)
    except BadPattern:
        return
    text = data.draw(texts_of(node))
    assert compiled(pattern).search(text)
    assert compiled(written(node)).search(text)


@given(st.text(max_size=50))
def test_any_text_is_a_pattern_or_is_refused(pattern: str) -> None:
    with contextlib.suppress(BadPattern):
        assert compiled(written(read_pattern(pattern)))


def compiled(pattern: str) -> re.Pattern[str]:
    """Python warns of brackets within brackets, which it may read otherwise one day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return re.compile(pattern)


# What people sent


def lines(name: str) -> dict[str, Any]:
    rows = map(json.loads, case_bytes("engine_lines", name).splitlines())
    return {
        row["custom_id"]: row["body"]["response_format"]["json_schema"]["schema"] for row in rows
    }


def test_patterns_with_quotes_and_line_ends_are_followed() -> None:
    found = lines("patterns.jsonl")
    assert "propertyNames" in refusal(found.pop("names-quote"))
    for schema in found.values():
        assert held_to(schema)


def test_schemas_without_an_end_are_refused_and_those_with_one_are_not() -> None:
    found = lines("self-reference.jsonl")
    for name in ("self", "self-def", "mutual", "anyof-self"):
        assert "itself" in refusal(found.pop(name))
    assert "type that is none of" in refusal(found.pop("bad-type"))
    assert sorted(found) == ["large-repeat", "ok-after", "ok-before", "recursion-with-an-end"]
    for schema in found.values():
        assert held_to(schema)
