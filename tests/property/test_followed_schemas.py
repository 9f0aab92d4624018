"""A schema that is taken at validation is one that the decoder holds an answer to: whatever the
decoder lets end is JSON and fits the schema as it was sent."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from domain.inputs.requests.json_schema import followable
from domain.inputs.requests.schema_values import FORMATS, Unfollowable
from domain.limits import (
    SCHEMA_KINDS_MAX,
    SCHEMA_NODES_MAX,
    SCHEMA_OPTIONAL_MAX,
    SCHEMA_VALUES_MAX,
)

TOKENIZER = llguidance.LLTokenizer("byte")
END = TOKENIZER.eos_token
STEPS_MAX = 300


def compiled(schema: dict[str, Any]) -> llguidance.LLMatcher:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()[:200]
    return matcher


def answer(matcher: llguidance.LLMatcher, random: Random) -> str | None:
    """One that the decoder lets end; None where it goes on."""
    raw = bytearray()
    for _ in range(STEPS_MAX):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        assert not matcher.is_error(), matcher.get_error()[:200]
        allowed = [int(i) for i in np.flatnonzero(np.unpackbits(bits, bitorder="little"))]
        assert allowed, "nothing may follow"
        if END in allowed and (len(allowed) == 1 or random.random() < 0.5):
            return raw.decode()
        letters = [token for token in allowed if token != END]
        closing = [token for token in letters if token in b'"}]']
        chosen = random.choice(closing if closing and random.random() < 0.4 else letters)
        matcher.consume_tokens([chosen])
        raw.append(chosen)
    return None


NAMES = st.sampled_from(["a", "b", "two words", 'q"', "\u00e9"])
COUNTS = st.integers(0, 3)
NUMBERS = st.integers(-50, 50) | st.floats(-5, 5).map(lambda x: round(x, 3))
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=3)
PATTERNS = st.sampled_from(
    [
        "^[A-Z]{2}-\\d{3}$",
        '^"yes"$',
        "^C:\\\\dir$",
        "^a\\nb$",
        "@",
        "^\\S+$",
        "^(?:a|bc)*$",
        "",
        "^.?$",
    ]
)


def keywords(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=optional)


BOUNDS = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS)
STEPS = st.sampled_from([1, 5, 0.5, 0.25])
LEAVES = st.one_of(
    st.sampled_from([{}, True, {"type": "null"}, {"type": "boolean"}, {"$ref": "#"}]),
    st.builds(lambda k: {"type": "string", **k}, keywords(minLength=COUNTS, maxLength=COUNTS)),
    st.builds(lambda p: {"type": "string", "pattern": p}, PATTERNS),
    st.builds(lambda f: {"type": "string", "format": f}, st.sampled_from(FORMATS)),
    st.builds(lambda k: {"type": "integer", **k}, keywords(**BOUNDS, multipleOf=STEPS)),
    st.builds(lambda k: {"type": "number", **k}, keywords(**BOUNDS, multipleOf=STEPS)),
    st.builds(lambda v: {"enum": v}, st.lists(VALUES, min_size=1, max_size=3)),
    st.builds(lambda v: {"const": v}, VALUES | st.lists(VALUES, max_size=2)),
)


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(NAMES, inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda p, r, k: {"type": "object", "properties": p, "required": r, **k},
            properties,
            st.lists(NAMES, max_size=2, unique=True),
            keywords(additionalProperties=st.booleans(), minProperties=COUNTS),
        ),
        st.builds(
            lambda k: {"type": "object", **k},
            keywords(additionalProperties=inner, minProperties=COUNTS, maxProperties=COUNTS),
        ),
        st.builds(lambda p, each: {"patternProperties": {p: each}}, PATTERNS, inner),
        st.builds(
            lambda k: {"type": "array", **k},
            keywords(
                items=inner | st.just(False),
                prefixItems=st.lists(inner, max_size=2),
                minItems=COUNTS,
                maxItems=COUNTS,
            ),
        ),
        st.builds(
            lambda k, v: {k: v},
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda each: {"$defs": {"x": each}, "$ref": "#/$defs/x"}, inner),
    )


@given(st.recursive(LEAVES, deeper, max_leaves=6), st.integers())
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_the_decoder_lets_end_fits_the_schema_as_it_was_sent(schema: Any, seed: int) -> None:
    if schema is True:
        schema = {}
    try:
        followed = followable(schema)
    except Unfollowable:
        return
    matcher, random = compiled(followed), Random(seed)
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for _ in range(5):
        text = answer(matcher.deep_copy(), random)
        if text is not None:
            checker.validate(json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{n}": {} for n in range(SCHEMA_OPTIONAL_MAX)}},
        {
            "anyOf": [
                {"properties": {f"p{n}-{m}": {"type": "integer"} for m in range(10)}}
                for n in range(SCHEMA_OPTIONAL_MAX // 10)
            ]
        },
        {"enum": [f"value {n}" for n in range(SCHEMA_VALUES_MAX)]},
        {
            "properties": {f"p{n}": {"type": "string"} for n in range(SCHEMA_NODES_MAX - 1)},
            "required": [f"p{n}" for n in range(SCHEMA_NODES_MAX - 1)],
        },
        {"anyOf": [{"type": "array", "items": {}, "minItems": n} for n in range(22)]},
        {
            "anyOf": [
                {"type": "string", "minLength": 1_000 + n, "maxLength": 100_000 - n}
                for n in range(SCHEMA_KINDS_MAX)
            ]
        },
        {
            "anyOf": [
                {"pattern": f"^(?:[a-z]{{2}}|\\d){{0,{n + 40}}}$"} for n in range(SCHEMA_KINDS_MAX)
            ]
        },
        {
            "anyOf": [
                {"items": {"type": "integer", "minimum": n, "maximum": 10**12 - n}}
                for n in range(22)
            ]
        },
        {
            "anyOf": [
                {"type": "number", "minimum": n / 1_000, "exclusiveMaximum": 10**9 - n / 10**6}
                for n in range(SCHEMA_KINDS_MAX)
            ]
        },
        {"pattern": "^[a-z]{0,10000}$"},
        {"pattern": "(?:[a-z]{1,31} ?){0,31}x"},
        {"pattern": "^(?:(?:a|b|ab){1,15}b?){0,15}$"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
        {"items": {"properties": {f"p{n}": {} for n in range(90)}}, "maxItems": 30_000},
        {
            "anyOf": [
                {"items": {"type": "integer", "minimum": n}, "maxItems": 30_000 // 22}
                for n in range(22)
            ]
        },
        {
            "anyOf": [
                *({"type": "object", "maxProperties": 1_400 - n} for n in range(21)),
                {"properties": {f"p{n}": {} for n in range(SCHEMA_OPTIONAL_MAX)}},
            ]
        },
    ],
)
def test_a_schema_at_its_bounds_is_followed(schema: dict[str, Any]) -> None:
    matcher, random = compiled(followable(schema)), Random(0)
    for _ in range(3):
        answer(matcher.deep_copy(), random)
