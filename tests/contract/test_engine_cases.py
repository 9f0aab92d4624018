"""Lines that broke engines elsewhere, over every engine with a real model."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from gpu_runners.child_pipes import unpack_vector
from tests.contract.engine_child import CASES, EngineChild, chat, length


def schema_of(case: str, line: str) -> dict[str, Any]:
    for text in (CASES / f"{case}.jsonl").read_text().splitlines():
        found = json.loads(text)
        if found["custom_id"] == line:
            return dict(found["body"]["response_format"]["json_schema"]["schema"])
    raise LookupError(line)


def text(result: dict[str, Any]) -> str:
    return str(result["choices"][0]["text"])


def fits(case: str, line: str, result: dict[str, Any]) -> bool:
    """A finished answer that is JSON of its schema, or one cut short that says so."""
    choice = result["choices"][0]
    if choice["finish_reason"] == "length":
        return True
    jsonschema.validate(json.loads(choice["text"]), schema_of(case, line))
    return True


def refused_for_its_format(result: dict[str, Any]) -> bool:
    kind = (result["type"], result.get("status"), result.get("error_type"), result.get("param"))
    return kind == ("refused", 400, "invalid_request_error", "response_format")


def test_a_pattern_with_quotes_or_line_ends_gives_json_that_fits(model: EngineChild) -> None:
    results = model.case("patterns")
    for line, result in results.items():
        assert refused_for_its_format(result) or fits("patterns", line, result), line
    done = {line for line, each in results.items() if each["type"] == "generated"}
    assert {"plain", "quote", "backslash", "newline", "tab", "key-quote", "emoji"} <= done
    assert json.loads(text(results["newline"])) == {"a": "a\nb"}


def test_top_p_0_takes_the_likeliest_token_each_time(model: EngineChild) -> None:
    results = model.case("top-p")
    assert {each["type"] for each in results.values()} == {"generated"}
    assert text(results["top-p-0"]) == text(results["top-p-0-greedy"])


def test_a_seed_gives_the_same_answer_again_and_no_two_seeds_collide(model: EngineChild) -> None:
    results = model.case("seeds")
    names = {line.removesuffix("-a") for line in results if line.endswith("-a")}
    answers = {}
    for name in names:
        first, again = (
            tuple(choice["text"] for choice in results[f"{name}-{part}"]["choices"])
            for part in "ab"
        )
        assert first == again, name
        answers[name] = first
    assert len(set(answers.values())) == len(answers)
    three = next(each for each in answers.values() if len(each) == 3)
    assert len(set(three)) == 3


def test_a_tiny_temperature_is_greedy_and_touches_no_neighbour(model: EngineChild) -> None:
    before = model.pid
    results = model.case("tiny-temperature")
    alone = text(model.chat("Say hi.", max_completion_tokens=3))
    assert {each["type"] for each in results.values()} == {"generated"}
    assert all(text(each) == alone for line, each in results.items() if line != "good-3")
    assert model.pid == before


def test_marks_in_a_text_are_letters(model: EngineChild) -> None:
    tokens = {line: each["input_tokens"] for line, each in model.case("markup").items()}
    assert tokens["one-mark"] == tokens["look-alike"] > tokens["plain"] + 3
    assert tokens["forged-turn"] > tokens["real-turns"]


def test_a_schema_that_never_ends_is_the_mistake_of_its_line_alone(model: EngineChild) -> None:
    results = model.case("self-reference")
    for line in ("ok-before", "ok-after", "recursion-with-an-end", "large-repeat"):
        assert results[line]["type"] == "generated", results[line]
        assert fits("self-reference", line, results[line])
    for line in ("self", "self-def", "mutual", "anyof-self", "bad-type"):
        assert refused_for_its_format(results[line]), results[line]
    assert model.chat("hi", max_tokens=1)["type"] == "generated"


def cosine(one: str, other: str) -> float:
    pairs = zip(unpack_vector(one), unpack_vector(other), strict=True)
    return sum(mine * theirs for mine, theirs in pairs)


def test_embedding_inputs_are_the_same_vector_in_every_form(embedding_model: EngineChild) -> None:
    results = embedding_model.case("embeddings")
    text = results["text"]["vectors"][0]
    same = [results[line]["vectors"][0] for line in ("ids", "ids-list", "base64", "user")]
    same += [results["ids-framed"]["vectors"][0]]
    same += [results["order"]["vectors"][i] for i in (0, 2)]
    assert [cosine(text, each) for each in same] == pytest.approx([1.0] * 7, abs=1e-4)
    assert cosine(text, results["order"]["vectors"][1]) < 0.9
    assert results["ids-framed"]["input_tokens"] == results["text"]["input_tokens"] == 4
    assert results["marks-in-text"]["input_tokens"] > 6
    for line in ("id-last", "ids-other-tokenizer", "full", "blank"):
        assert [length(each) for each in results[line]["vectors"]] == pytest.approx([1.0], abs=1e-4)
    assert results["full"]["input_tokens"] == 256
    assert (results["id-past-end"]["status"], results["id-past-end"]["param"]) == (400, "input")
    assert results["too-long"]["code"] == "context_length_exceeded"
    assert results["too-long"]["status"] == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1, "temperature": 1},
        {"min_p": 1.0, "temperature": 1},
        {"top_p": 1e-9, "temperature": 1},
    ],
)
def test_what_leaves_one_token_gives_the_greedy_answer(
    model: EngineChild, fields: dict[str, Any]
) -> None:
    asked = {"max_tokens": 8}
    greedy = text(model.chat("Name a colour.", **asked))
    assert text(model.chat("Name a colour.", **{**asked, **fields})) == greedy


def test_a_repetition_penalty_changes_a_repeating_answer(model: EngineChild) -> None:
    question = "Write the word apple ten times: apple apple apple"
    plain = text(model.chat(question, max_tokens=24))
    penalised = text(model.chat(question, max_tokens=24, repetition_penalty=2.0))
    assert penalised.lower().count("apple") < plain.lower().count("apple")


@pytest.mark.parametrize("stop", [[], ["world"], ["orl"], ["🎉"]])
def test_logprobs_join_to_the_content_and_end_with_it(model: EngineChild, stop: list[str]) -> None:
    question = "Repeat exactly: Hello world 🎉🧑🏽‍🚀 naïve"
    body = chat(question, max_tokens=30, logprobs=True, top_logprobs=2, stop=stop)
    choice = model.answer((None, body))[0]["choices"][0]
    entries = choice["logprobs"]
    assert "".join(entry["token"] for entry in entries) == choice["text"]
    spelled = bytes(byte for entry in entries for byte in entry["bytes"])
    assert spelled.decode(errors="ignore") == choice["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
