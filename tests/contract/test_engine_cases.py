"""Lines that broke engines elsewhere, over every engine with a real model."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_runners.child_pipes import unpack_vector
from tests.contract.engine_child import EngineChild, length


def text(result: dict[str, Any]) -> str:
    return str(result["choices"][0]["text"])


def test_top_p_0_takes_the_likeliest_token_each_time(model: EngineChild) -> None:
    results = model.case("top-p")
    assert {each["type"] for each in results.values()} == {"generated"}
    assert text(results["top-p-0"]) == text(results["top-p-0-greedy"])


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
