"""Batch input files at validation."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.catalog import CHAT_ENDPOINT, EMBEDDINGS_ENDPOINT, Endpoint
from domain.inputs.batch_file import BatchFileCheck, BatchFileFacts
from domain.inputs.message_text import message_text
from domain.inputs.requests.chat_body import READERS as CHAT_READERS
from domain.inputs.requests.chat_body import ChatBody, read_chat_body
from domain.inputs.requests.embeddings_body import READERS as EMBEDDINGS_READERS
from domain.inputs.requests.fields import NOTHING_ASKED
from domain.inputs.requests.sampling import Sampling
from domain.limits import MIB
from tests.unit.case_files import case_bytes, case_names

BASE = "qwen2.5-0.5b-instruct"
CHAT_BODY = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}]}
EMBEDDINGS_BODY = {"model": "bge-m3", "input": "one"}
EMBED: Endpoint = EMBEDDINGS_ENDPOINT


def checked(
    content: bytes,
    *,
    endpoint: Endpoint = CHAT_ENDPOINT,
    own_models: dict[str, str] | None = None,
    chunk_requests: int = 200,
) -> BatchFileFacts:
    check = BatchFileCheck(
        endpoint=endpoint, own_models=own_models or {}, chunk_requests=chunk_requests
    )
    for start in range(0, len(content), 65_536):
        check.feed(content[start : start + 65_536])
    return check.finish()


def line(number: int, body: Any, *, endpoint: str = CHAT_ENDPOINT) -> bytes:
    request = {"custom_id": f"r{number}", "method": "POST", "url": endpoint, "body": body}
    return json.dumps(request).encode() + b"\n"


def chat(*changes: dict[str, Any]) -> BatchFileFacts:
    return checked(b"".join(line(n, CHAT_BODY | each) for n, each in enumerate(changes)))


def embeddings(*changes: dict[str, Any]) -> BatchFileFacts:
    lines = (
        line(n, EMBEDDINGS_BODY | each, endpoint=EMBEDDINGS_ENDPOINT)
        for n, each in enumerate(changes)
    )
    return checked(b"".join(lines), endpoint=EMBEDDINGS_ENDPOINT)


def faults(facts: BatchFileFacts) -> list[tuple[str, int | None, str | None]]:
    return [(error.code, error.line, error.param) for error in facts.errors]


def test_a_mark_and_windows_line_ends_lose_no_request() -> None:
    content = case_bytes("windows", "requests-bom-crlf.jsonl")
    facts = checked(content)
    assert (facts.errors, facts.requests) == ((), 3)
    (chunk,) = facts.chunks
    assert (chunk.start_byte, chunk.end_byte) == (3, len(content))


def test_the_same_custom_id_twice_is_named_at_its_second_line() -> None:
    facts = checked(case_bytes("custom_ids", "requests-dup-line-3.jsonl"))
    assert faults(facts) == [("duplicate_custom_id", 3, "custom_id")]


def test_ids_that_only_look_alike_are_different() -> None:
    facts = checked(case_bytes("custom_ids", "requests-look-alike.jsonl"))
    assert (facts.errors, facts.requests) == ((), 12)


FIELDS = {
    "id": "custom_id",
    "method": "method",
    "url": "url",
    "body": "body",
    "model": "body.model",
    "messages": "body.messages",
    "temperature": "body.temperature",
    "max-tokens": "body.max_completion_tokens",
    "anthropic": "method",
}


@pytest.mark.parametrize("name", case_names("batch_lines"))
def test_a_line_that_cannot_run_is_named_with_its_field(name: str) -> None:
    facts = checked(case_bytes("batch_lines", name))
    first = facts.errors[0]
    field = next(param for start, param in FIELDS.items() if name.startswith(start))
    assert (first.line, first.param) == (2, field)
    assert {error.line for error in facts.errors} == {2}
    assert field in first.message


@pytest.mark.parametrize("name", case_names("request_fields"))
def test_a_field_that_is_not_offered_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    embedding = name.startswith("embeddings")
    facts = checked(
        case_bytes("request_fields", name),
        endpoint=EMBEDDINGS_ENDPOINT if embedding else CHAT_ENDPOINT,
    )
    if name.startswith(("ok-", "null-", "noop-")):
        assert (facts.errors, facts.requests) == ((), 3)
        return
    field = {
        "embeddings-dimensions.jsonl": "dimensions",
        "unknown-field.jsonl": "top_kk",
        "refused-stream-true.jsonl": "stream",
    }.get(name, name.removeprefix("refused-").removesuffix(".jsonl"))
    assert faults(facts) == [("unsupported_parameter", 2, f"body.{field}")]
    assert field in facts.errors[0].message


NINETEEN = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "stream": (False,),
    "stream_options": (),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "prediction": (),
    "audio": (),
    "modalities": (["text"],),
    "metadata": ({},),
    "reasoning_effort": (),
    "web_search_options": (),
    "suffix": (),
    "best_of": (1,),
    "dimensions": (),
}
"""The fields, and of each what changes nothing besides null."""
NEAR_NOTHING: tuple[Any, ...] = (
    *(False, True, 0, 0.0, 1, 1.0, 2, "", " ", "none", "auto", "default", "None", "false", "text"),
    *([], [None], ["text"], ["text", "text"], ["audio"], {}, {"a": None}),
)


@pytest.mark.parametrize("field", NINETEEN)
def test_what_asks_for_nothing_is_honoured_and_all_else_of_the_nineteen_refused(field: str) -> None:
    assert NOTHING_ASKED.keys() == NINETEEN.keys()
    for check in (chat, embeddings):
        assert check({field: None}, *({field: value} for value in NINETEEN[field])).errors == ()
        for value in NEAR_NOTHING:
            if any(value == each and type(value) is type(each) for each in NINETEEN[field]):
                continue
            assert faults(check({field: value})) == [
                ("unsupported_parameter", 1, f"body.{field}")
            ], value


def test_the_dimensions_that_a_model_has_anyway_are_honoured_on_it_alone() -> None:
    assert embeddings({"dimensions": 1_024}).errors == ()
    refused: tuple[Any, ...] = (384, 1_024.0, True, "1024", 0)
    for value in refused:
        assert faults(embeddings({"dimensions": value})) == [
            ("unsupported_parameter", 1, "body.dimensions")
        ], value
    own = line(0, {"model": "all-minilm-l6-v2", "input": "a", "dimensions": 384}, endpoint=EMBED)
    assert checked(own, endpoint=EMBED).errors == ()
    assert faults(chat({"dimensions": 1_024})) == [("unsupported_parameter", 1, "body.dimensions")]


SCHEMA = {"name": "answer", "schema": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0, "top_p": 1, "frequency_penalty": -2, "presence_penalty": 2},
        {"temperature": 2, "n": 3, "seed": -5, "stop": "END", "max_tokens": 1},
        {"stop": ["a", "b", "c", "d"], "logprobs": True, "top_logprobs": 20},
        {
            "temperature": None,
            "n": None,
            "stop": None,
            "max_tokens": None,
            "max_completion_tokens": 5,
        },
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        {"messages": [{"role": "system", "content": "a"}, {"role": "assistant", "content": ""}]},
        {"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]},
        {"user": "someone"},
        {"stop": [], "logprobs": False, "top_logprobs": 0},
        {"top_k": -1, "min_p": 0, "repetition_penalty": 1},
        {"top_k": 50, "min_p": 1, "repetition_penalty": 1.3},
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": "a",
                    "tool_calls": [],
                    "annotations": [],
                    "refusal": None,
                    "function_call": None,
                }
            ]
        },
    ],
)
def test_what_the_pages_honour_is_accepted(body: dict[str, Any]) -> None:
    assert chat(body).errors == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": "0"}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"user": 7}, "user"),
        ({"model": 7}, "model"),
        ({"model": "bge-m3"}, "model"),
        ({"response_format": "text"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": ["text"]}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA | {"name": "a b"}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": SCHEMA | {"schema": {"items": [{"pattern": "a(?=b)"}]}},
                }
            },
            "response_format",
        ),
        ({"messages": {}}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": [], "content": "a"}]}, "messages[0].role"),
    ],
)
def test_what_cannot_be_honoured_is_named(body: dict[str, Any], param: str) -> None:
    facts = chat({}, body)
    assert [(error.line, error.param) for error in facts.errors] == [(2, f"body.{param}")]


@pytest.mark.parametrize("value", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_embeddings_take_text_and_token_ids(value: Any) -> None:
    assert embeddings({"input": value, "encoding_format": "base64"}).errors == ()


@pytest.mark.parametrize("value", ["", [], [""], [[]], ["a", 1], [1.5], [True], [[-1]], {}, 7])
def test_other_embedding_inputs_are_refused(value: Any) -> None:
    assert faults(embeddings({"input": value})) == [("invalid_value", 1, "body.input")]


def test_every_fault_of_a_line_is_listed() -> None:
    content = b'{"custom_id": 7, "method": "GET", "body": {"messages": [], "stream": true}}\n'
    assert [error.param for error in checked(content).errors] == [
        "custom_id",
        "method",
        "url",
        "body.model",
        "body.stream",
        "body.messages",
    ]


SOME_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "a", "POST", BASE, "user", "text", "json_schema", CHAT_ENDPOINT, EMBED]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "?"]), inner)
    ),
    max_leaves=10,
)
BODIES = st.dictionaries(
    st.sampled_from([*CHAT_READERS, *EMBEDDINGS_READERS, *NOTHING_ASKED, "x", "two words"]),
    SOME_JSON,
    max_size=5,
)


@given(BODIES | SOME_JSON, st.sampled_from([CHAT_ENDPOINT, EMBED]))
def test_whatever_a_body_holds_it_runs_or_is_refused_by_name(body: Any, endpoint: Endpoint) -> None:
    facts = checked(line(0, body, endpoint=endpoint), endpoint=endpoint)
    assert facts.requests == 1
    assert all(error.line == 1 and error.param for error in facts.errors)


def test_lines_that_are_no_json_are_listed_and_the_rest_is_checked() -> None:
    content = b'{"a": NaN}\n' + line(1, CHAT_BODY) + b"[]\n\n" + b'{"a": 1, "a": 2}'
    assert faults(checked(content)) == [
        ("invalid_json_line", 1, None),
        ("invalid_json_line", 3, None),
        ("invalid_json_line", 5, None),
    ]


def test_at_most_a_hundred_faults_are_listed() -> None:
    assert len(checked(b"x\n" * 500).errors) == 100
    many = {f"k{n}": 1 for n in range(100_000)}
    tracemalloc.start()
    assert len(chat(many).errors) == 100
    assert len(checked(json.dumps(many).encode()).errors) == 100
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Fifty bytes a name are read; a fault for each would be five times that.
    assert peak < 40 * MIB


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_a_file_without_requests_is_refused(content: bytes) -> None:
    assert [error.code for error in checked(content).errors] == ["empty_file"]


def test_fifty_thousand_requests_fit_and_one_more_does_not() -> None:
    content = b"".join(line(n, CHAT_BODY) for n in range(50_000))
    facts = checked(content)
    assert (facts.errors, facts.requests, len(facts.chunks)) == ((), 50_000, 250)
    over = checked(content + line(50_000, CHAT_BODY))
    assert faults(over) == [("too_many_tasks", 50_001, "input_file_id")]
    assert "50,000" in over.errors[0].message


def test_a_field_whose_name_could_be_text_is_placed_and_not_quoted() -> None:
    messages = [{"role": "user", "content": "Hi", "two words": 1}]
    facts = chat({"two words": 1}, {"messages": messages})
    assert [error.message for error in facts.errors] == [
        "Line 1: body holds an unknown field.",
        "Line 2: body.messages[0] holds an unknown field.",
    ]


def test_no_fault_quotes_the_line() -> None:
    secret = "secretword"
    facts = chat(
        {"model": secret},
        {"temperature": secret},
        {f"{secret} ": 1},
        {"messages": [{"role": secret, "content": secret}]},
        {"response_format": {"type": secret}},
    )
    assert len(facts.errors) == 5
    assert secret not in "".join(error.message + str(error.param) for error in facts.errors)


# Models


def models(*names: str, own: dict[str, str] | None = None) -> BatchFileFacts:
    lines = b"".join(line(n, CHAT_BODY | {"model": name}) for n, name in enumerate(names))
    return checked(lines, own_models=own)


def test_base_and_its_fine_tunes_share_a_batch() -> None:
    own = {f"ft:{BASE}:o:{n}": BASE for n in range(9)}
    facts = models(BASE, *list(own)[:8], own=own)
    assert facts.errors == ()
    assert facts.base is not None
    assert facts.base.id == BASE
    assert facts.models == (f"ft:{BASE}:o:0", *list(own)[1:8], BASE)
    assert [usage.model for usage in facts.worst_case] == list(facts.models)
    assert faults(models(BASE, *own, own=own)) == [("too_many_models", 10, "body.model")]


def test_a_batch_has_one_base() -> None:
    assert faults(models(BASE, "qwen3-8b", BASE)) == [("model_mismatch", 2, "body.model")]
    own = {"ft:qwen3-8b:o:1": "qwen3-8b"}
    assert faults(models(BASE, "ft:qwen3-8b:o:1", own=own)) == [("model_mismatch", 2, "body.model")]


def test_a_model_of_nobody_and_one_of_somebody_else_answer_alike() -> None:
    facts = models("ft:qwen3-8b:o:1", "ft:nothing:o:1")
    assert {error.code for error in facts.errors} == {"model_not_found"}


def test_a_download_only_fine_tune_says_so() -> None:
    (error,) = models("ft:gpt-oss-20b:o:1").errors
    assert error.code == "model_not_servable"
    assert "download-only" in error.message


def test_a_chat_model_is_for_chat_batches_and_so_is_a_fine_tuned_one() -> None:
    own = f"ft:{BASE}:o:1"
    content = line(0, EMBEDDINGS_BODY | {"model": own}, endpoint=EMBEDDINGS_ENDPOINT)
    fine_tuned = checked(content, endpoint=EMBEDDINGS_ENDPOINT, own_models={own: BASE})
    for facts in (embeddings({"model": BASE}), fine_tuned):
        assert faults(facts) == [("model_mismatch", 1, "body.model")]


def test_an_embedding_model_is_for_embeddings_batches() -> None:
    assert faults(models("bge-m3")) == [("model_mismatch", 1, "body.model")]


# The plan and the worst case


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 7))
def test_chunks_hold_every_request_once(blank_before: list[bool], size: int) -> None:
    content = b"".join(
        (b"\r\n" if blank else b"") + line(n, CHAT_BODY) for n, blank in enumerate(blank_before)
    )
    facts = checked(content, chunk_requests=size)
    ids: list[str] = []
    for chunk in facts.chunks:
        part = content[chunk.start_byte : chunk.end_byte]
        rows = [json.loads(each) for each in part.splitlines() if each.strip()]
        assert len(rows) == chunk.requests <= size
        assert content[: chunk.start_byte].count(b"\n") + 1 == chunk.first_line
        ids += [row["custom_id"] for row in rows]
    assert ids == [f"r{n}" for n in range(len(blank_before))]


def test_the_worst_case_is_every_prompt_byte_and_every_max_token() -> None:
    facts = chat(
        {"max_completion_tokens": 16},
        {"max_tokens": 10, "n": 3},
        {"messages": [{"role": "user", "content": "Hié"}]},
    )
    (usage,) = facts.worst_case
    template = 32 + 2 * 8
    assert usage.input_tokens == 3 * template + 2 + 2 + 4
    assert usage.output_tokens == 16 + 30 + 1_024


def test_nothing_is_held_beyond_the_context_window() -> None:
    facts = chat({"max_tokens": 10**9, "messages": [{"role": "user", "content": "x" * 100_000}]})
    (usage,) = facts.worst_case
    assert (usage.input_tokens, usage.output_tokens) == (32_768, 32_768)


def test_embedding_inputs_are_bounded_one_by_one() -> None:
    (usage,) = embeddings({"input": ["ab", "x" * 10_000]}, {"input": [1, 2, 3]}).worst_case
    assert (usage.input_tokens, usage.output_tokens) == (6 + 8_192 + 7, 0)


def test_a_chunk_ends_where_its_bytes_would_pass_the_bound() -> None:
    body = CHAT_BODY | {"messages": [{"role": "user", "content": "x" * 3 * MIB}]}
    huge = CHAT_BODY | {"messages": [{"role": "user", "content": "x" * 9 * MIB}]}
    facts = checked(b"".join(line(n, each) for n, each in enumerate([body] * 5 + [huge, body])))
    assert facts.errors == ()
    assert [chunk.requests for chunk in facts.chunks] == [2, 2, 1, 1, 1]
    assert [chunk.first_line for chunk in facts.chunks] == [1, 3, 5, 6, 7]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 128, "max_tokens": 4_096}, None),
        ({"n": 128, "max_tokens": 4_097}, "n"),
        ({"n": 128, "max_tokens": 10**9}, "n"),
        ({"n": 16, "max_tokens": 10**9}, None),
        ({"max_tokens": 10**9, "logprobs": True}, None),
        ({"max_tokens": 10**9, "logprobs": True, "top_logprobs": 1}, None),
        ({"max_tokens": 10**9, "logprobs": True, "top_logprobs": 2}, "logprobs"),
        ({"max_tokens": 3_120, "logprobs": True, "top_logprobs": 20}, None),
        ({"max_tokens": 3_121, "logprobs": True, "top_logprobs": 20}, "logprobs"),
        ({"max_tokens": 10**9, "logprobs": False, "top_logprobs": 0}, None),
        ({"n": 128, "max_tokens": 9_000, "logprobs": True}, "n"),
    ],
)
def test_no_answer_can_be_larger_than_a_runner_takes(
    body: dict[str, Any], param: str | None
) -> None:
    facts = chat(body)
    wanted = [] if param is None else [("invalid_value", 1, f"body.{param}")]
    assert faults(facts) == wanted


def test_the_url_of_another_endpoint_is_told_what_to_write() -> None:
    facts = checked(line(0, CHAT_BODY, endpoint="/v1/responses"))
    assert faults(facts) == [("url_mismatch", 1, "url")]
    assert "write messages in place of input" in facts.errors[0].message


SAMPLED = [
    ({}, Sampling()),
    ({"temperature": 1e-38}, Sampling(temperature=0.0)),
    ({"temperature": 5e-324, "top_p": 0.5, "top_k": 7, "min_p": 0.1}, Sampling(temperature=0.0)),
    ({"temperature": 0.01}, Sampling(temperature=0.01)),
    ({"top_p": 0}, Sampling(temperature=0.0)),
    ({"top_p": 1e-9, "seed": 1}, Sampling(top_p=1e-9, seed=1)),
    ({"top_k": 1, "n": 2}, Sampling(temperature=0.0, n=2)),
    ({"top_k": 0}, Sampling()),
    ({"top_k": -1}, Sampling()),
    ({"logprobs": True}, Sampling(logprobs=0)),
    ({"logprobs": True, "top_logprobs": 3}, Sampling(logprobs=3)),
    ({"logprobs": False, "top_logprobs": 0}, Sampling()),
    ({"max_tokens": 3}, Sampling(max_tokens=3)),
    ({"stop": "a"}, Sampling(stop=("a",))),
    ({"stop": []}, Sampling()),
]


@pytest.mark.parametrize(("body", "sampling"), SAMPLED)
def test_what_asks_for_the_likeliest_token_is_greedy_and_the_rest_is_carried(
    body: dict[str, Any], sampling: Sampling
) -> None:
    read = read_chat_body(CHAT_BODY | body)
    assert isinstance(read, ChatBody)
    assert read.sampling == sampling


@pytest.mark.parametrize("name", ["seeds", "top-p", "tiny-temperature", "markup"])
def test_sampling_and_marks_as_people_send_them_are_accepted(name: str) -> None:
    facts = checked(case_bytes("engine_lines", f"{name}.jsonl"))
    assert facts.errors == ()


def test_seeds_and_choices_share_no_engine_seed() -> None:
    seeds = [-1, 0, 1, 42, -42, 2**31, 2**63 - 1, -(2**63), None]
    found = [Sampling(seed=seed).engine_seed(choice) for seed in seeds for choice in range(3)]
    numbers = [number for number in found if number is not None]
    assert found.count(None) == 3
    assert len(set(numbers)) == len(numbers) == 24
    assert all(0 <= number < 2**62 for number in numbers)


def test_embedding_inputs_as_people_send_them() -> None:
    facts = checked(case_bytes("engine_lines", "embeddings.jsonl"), endpoint=EMBED)
    assert facts.errors == ()
    for name in case_names("embedding_inputs"):
        facts = checked(case_bytes("embedding_inputs", name), endpoint=EMBED)
        assert faults(facts) == [("invalid_value", 2, "body.input")], name


def test_response_formats_as_people_send_them() -> None:
    for name, refused in (
        ("patterns.jsonl", ["names-quote"]),
        (
            "self-reference.jsonl",
            ["self", "self-def", "mutual", "anyof-self", "bad-type"],
        ),
    ):
        content = case_bytes("engine_lines", name)
        ids = [json.loads(each)["custom_id"] for each in content.splitlines()]
        facts = checked(content)
        assert [ids[(error.line or 0) - 1] for error in facts.errors] == refused
        for error in facts.errors:
            assert (error.code, error.param) == ("invalid_value", "body.response_format")
            assert "body.response_format at json_schema.schema" in error.message


def test_text_parts_are_joined_as_the_engines_join_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message_text(parts) == "a\nb"
    assert message_text("a") == "a"


@given(st.integers(1, 7))
def test_a_chunks_digest_is_of_its_lines_whatever_parts_them(size: int) -> None:
    lines = [line(number, CHAT_BODY) for number in range(5)]
    parted = [b"", b"\n", b" \n", b"\r\n", b""]
    content = b"".join(before + each for before, each in zip(parted, lines, strict=True))
    facts = checked(content.replace(b"}\n", b"}\r\n").rstrip(), chunk_requests=size)
    assert [chunk.sha256 for chunk in facts.chunks] == [
        hashlib.sha256(b"".join(lines[at : at + size])).hexdigest()
        for at in range(0, len(lines), size)
    ]
