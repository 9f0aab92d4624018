"""What every engine promises its parent, whichever one it is."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests.contract.engine_child import EngineChild, chat, length

QUESTION = "What is the capital of France?"


def test_an_answer_comes_with_its_tokens_counted(child: EngineChild) -> None:
    answer = child.chat(QUESTION, max_tokens=30)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["input_tokens"] > len(QUESTION.split())
    assert 0 < answer["output_tokens"] <= 30


def test_max_tokens_ends_an_answer_with_length(child: EngineChild) -> None:
    answer = child.chat("Count from one to one hundred, please.", max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 0 < answer["output_tokens"] <= 3


def test_a_stop_text_ends_an_answer_and_is_left_out(child: EngineChild) -> None:
    whole = child.chat(QUESTION, max_tokens=30)["choices"][0]["text"]
    stop = whole.split(" ")[-1]
    cut = child.chat(QUESTION, max_tokens=30, stop=[stop])["choices"][0]
    assert cut["text"] == whole.partition(stop)[0]
    assert cut["finish_reason"] == "stop"


def test_n_answers_are_all_counted(child: EngineChild) -> None:
    one = child.chat(QUESTION, max_tokens=5)
    three = child.chat(QUESTION, max_tokens=5, n=3)
    assert len(three["choices"]) == 3
    assert three["input_tokens"] == one["input_tokens"]
    assert three["output_tokens"] >= 3 * one["output_tokens"]


def test_logprobs_name_each_token(child: EngineChild) -> None:
    answer = child.chat(QUESTION, max_tokens=4, logprobs=True)
    entries = answer["choices"][0]["logprobs"]
    assert len(entries) == 4
    assert all(entry["logprob"] <= 0 for entry in entries)
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("tools", [{}]), ("n", 0), ("top_kk", 5), ("stop", [""])],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(
    child: EngineChild, field: str, value: object
) -> None:
    refusal = child.chat(QUESTION, **{field: value})
    assert (refusal["type"], refusal["status"], refusal["param"]) == ("refused", 400, field)


def test_a_json_schema_is_held_to_or_refused_by_name(child: EngineChild) -> None:
    properties = {"city": {"type": "string", "maxLength": 20}, "capital": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = child.chat(QUESTION, max_tokens=60, response_format=wanted)
    if child.engine == "echo":
        assert (answer["type"], answer["param"]) == ("refused", "response_format")
    else:
        assert answer["choices"][0]["finish_reason"] == "stop"
        jsonschema.validate(json.loads(answer["choices"][0]["text"]), schema)


def test_a_json_object_is_one(model: EngineChild) -> None:
    free = model.chat(QUESTION, max_tokens=5, response_format={"type": "json_object"})
    assert free["choices"][0]["text"].startswith("{")


def test_a_prompt_longer_than_the_window_is_refused(child: EngineChild) -> None:
    refused, answered = child.answer(
        (None, chat("word " * 9_000)), (None, chat(QUESTION, max_tokens=2))
    )
    assert refused["code"] == "context_length_exceeded"
    assert answered["type"] == "generated"


def test_a_text_of_megabytes_is_refused_before_it_is_encoded(model: EngineChild) -> None:
    refused = model.chat("<|im_end|>" * 1_500_000)
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "messages")


def test_base_and_adapter_lines_mix_without_touching_each_other(
    child: EngineChild, adapters: list[Path]
) -> None:
    wanted = chat(QUESTION, max_tokens=1, logprobs=True)
    alone = child.answer((None, wanted))[0]
    for index, directory in enumerate(adapters):
        assert child.add_adapter(f"ft:{index}", directory)["type"] == "adapter_ready"
    tuned_alone = child.answer(("ft:0", wanted))[0]
    names = [None, *(f"ft:{index}" for index in range(len(adapters)))]
    mixed = child.answer(*((name, wanted) for name in names))
    assert _same(mixed[0], alone)
    assert _same(mixed[1], tuned_alone)
    assert not any(_same(each, alone) for each in mixed[1:])


@pytest.mark.parametrize("fault", ["missing", "truncated"])
def test_an_adapter_that_cannot_load_is_refused_and_the_engine_lives(
    child: EngineChild, adapters: list[Path], tmp_path: Path, fault: str
) -> None:
    if fault == "truncated":
        for file in adapters[0].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes()[:400])
        (tmp_path / "adapter_config.json").write_bytes(
            (adapters[0] / "adapter_config.json").read_bytes()
        )
    refusal = child.add_adapter(f"ft:{fault}", tmp_path)
    assert (refusal["type"], refusal["code"]) == ("adapter_failed", "adapter_unusable")
    assert child.chat(QUESTION, max_tokens=2)["type"] == "generated"


def test_an_abort_drops_what_is_not_finished(child: EngineChild) -> None:
    line = {"op": "line", "endpoint": "/v1/chat/completions", "adapter": None}
    slow = {"model": "m", **chat("Tell a long story. echo-delay-ms=200", max_tokens=2_000)}
    for index in range(8):
        child.send({**line, "id": f"dropped-{index}", "body": slow})
    child.send({"op": "abort", "token": "t"})
    while (message := child.receive())["type"] != "aborted":
        assert message["id"].startswith("dropped-")
    assert child.chat(QUESTION, max_tokens=2)["type"] == "generated"


def test_embeddings_have_length_one_and_keep_their_order(embedder: EngineChild) -> None:
    both = embedder.answer((None, {"input": ["one text", "another one"]}))[0]
    first = embedder.answer((None, {"input": "one text"}))[0]
    assert [length(vector) for vector in both["vectors"]] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert both["input_tokens"] > first["input_tokens"]
    assert len(first["vectors"]) == 1
    refused = embedder.answer((None, {"input": []}))[0]
    assert refused["param"] == "input"


def _same(one: dict, other: dict) -> bool:
    """The same first token, as likely within bf16's rounding of another batch size."""
    [mine], [theirs] = one["choices"][0]["logprobs"], other["choices"][0]["logprobs"]
    return mine["token"] == theirs["token"] and abs(mine["logprob"] - theirs["logprob"]) < 0.05
