"""A schema is followed in every keyword, or refused with the cause; never followed in part."""

from __future__ import annotations

import json
from typing import Any

import pytest

from domain.inputs.requests.chat_body import ChatBody
from domain.inputs.requests.response_format import ResponseFormat
from domain.inputs.requests.sampling import Sampling
from gpu_runners.inference.answer_form import AnswerForms
from gpu_runners.inference.engine import EngineRefusal

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
A = {"a": INTEGER}


def closed(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, **keywords}


def body(schema: dict[str, Any] | None, **sampling: Any) -> ChatBody:
    kind = "json_object" if schema is None else "json_schema"
    return ChatBody((), Sampling(**sampling), ResponseFormat(kind, schema))


@pytest.fixture(scope="session")
def forms(tokenizer: Any) -> AnswerForms:
    return AnswerForms(tokenizer, vocabulary=49_152, ends=[tokenizer.eos_token_id])


def fits(forms: AnswerForms, schema: dict[str, Any] | None, text: str) -> bool:
    try:
        forms.check_answer(body(schema), text)
    except EngineRefusal:
        return False
    return True


FOLLOWED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "anyOf beside properties": (
        closed(
            properties={"a": STRING, "b": INTEGER}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]
        ),
        [{"a": "x"}, {"b": 1}],
        [{}],
    ),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [4], [7, 2]),
    "beside $ref": ({"$defs": {"o": INTEGER}, "$ref": "#/$defs/o", "minimum": 5}, [7], [3]),
    "anchor": ({"$defs": {"o": {"$anchor": "o", **INTEGER}}, "$ref": "#o"}, [1], ["a"]),
    "required beside properties": (
        {"type": "object", "properties": A, "required": ["z"], "additionalProperties": INTEGER},
        [{"z": 1}],
        [{"a": 1}],
    ),
    "patternProperties": (closed(patternProperties={"^x": INTEGER}), [{"xa": 1}], [{"y": 1}]),
    "prefixItems": (
        {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
        [[1, "a"]],
        [["a"]],
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, [9], [10]),
    "quote": ({"type": "string", "pattern": '^"yes"$'}, ['"yes"'], ["yes"]),
    "backslash": ({"type": "string", "pattern": r"^C:\\dir$"}, [r"C:\dir"], ["C:dir"]),
    "line end": ({"type": "string", "pattern": r"^a\nb$"}, ["a\nb"], ["ab"]),
    "unanchored": ({"type": "string", "pattern": "b"}, ["abc"], ["ac"]),
    "enum": ({"enum": ["a", 1, None, {"k": [1]}]}, ["a", 1, None, {"k": [1]}], [2]),
    "recursion": (
        closed(
            properties={"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, required=["next"]
        ),
        [{"next": {"next": None}}],
        [{"next": 1}],
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_is_followed_in_every_keyword(forms: AnswerForms, name: str) -> None:
    schema, good, bad = FOLLOWED[name]
    for value in good:
        assert fits(forms, schema, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not fits(forms, schema, json.dumps(value, ensure_ascii=False)), value


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "oneOf": (closed(properties=A, oneOf=[{"required": ["a"]}, {"required": []}]), "oneOf"),
    "not": ({"type": "integer", "not": {"const": 3}}, "not"),
    "if": ({"if": {"const": 1}, "then": {"const": 2}}, "if"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentReq"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "unknown name required": (closed(properties=A, required=["z"]), "'z'"),
    "remote": ({"$ref": "https://example.org/x.json"}, "https://example.org/x.json"),
    "dynamic": ({"$dynamicRef": "#x"}, "$dynamicRef"),
    "dangling": ({"$ref": "#/$defs/none"}, "/$defs/none"),
    "type": ({"type": "not-a-type"}, "not-a-type"),
    "pattern": ({"type": "string", "pattern": "(["}, "unclosed character class"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    "itself": ({"$ref": "#"}, "refers to itself"),
    "each other": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "refers to itself",
    ),
    "nothing fits": ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    "no schema": ({"type": "object", "properties": [1]}, "properties"),
    "bad bound": ({"type": "string", "maxLength": 10**30}, "maxLength"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_with_its_cause(forms: AnswerForms, name: str) -> None:
    schema, cause = REFUSED[name]
    with pytest.raises(EngineRefusal) as refused:
        forms.check(ResponseFormat("json_schema", schema))
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    assert cause in refused.value.message
    assert "Tokens" not in refused.value.message


def test_a_schema_without_end_further_in_ends_its_answer(forms: AnswerForms) -> None:
    mutual = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    schema = {"$defs": mutual, **closed(properties={"x": {"$ref": "#/$defs/a"}}, required=["x"])}
    with pytest.raises(EngineRefusal, match="refers to itself"):
        forms.check_answer(body(schema), '{"x": ')


def test_a_json_object_is_any_object_and_nothing_else(forms: AnswerForms) -> None:
    assert fits(forms, None, '{"a": [1, {"b": null}]}')
    assert not any(fits(forms, None, text) for text in ("[1]", "1", '{"a": 1', "{} {}", ""))


def test_a_stop_text_within_an_answer_is_named(forms: AnswerForms) -> None:
    with pytest.raises(EngineRefusal) as refused:
        forms.check_answer(body(None, stop=("}",)), '{"a": 1')
    assert refused.value.param == "stop"


def test_what_a_schema_says_to_the_decoder_itself_is_not_heard(forms: AnswerForms) -> None:
    schema = {**closed(properties=A), "x-guidance": {"whitespace_flexible": True}}
    assert not fits(forms, schema, '{ "a" : 1 }')
