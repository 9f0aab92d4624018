"""Fine-tune files at upload, and what create reads in them."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionStoreMessage,
    ChatCompletionToolMessageParam,
    ParsedChatCompletionMessage,
)
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from domain.catalog import CATALOG
from domain.errors import InvalidFile
from domain.inputs.batch_file import BatchFileCheck
from domain.inputs.training_file import FileRole, TemplateCheck, TrainingFacts, TrainingFileCheck
from domain.inputs.training_row import PreferenceRow
from tests.factories import chat_row, training_row
from tests.unit.case_files import case_bytes, case_names

MIB = 1024 * 1024


def facts(content: bytes) -> TrainingFacts:
    check = TrainingFileCheck()
    for start in range(0, len(content), 65_536):
        check.feed(content[start : start + 65_536])
    return check.finish()


def refusal(content: bytes) -> InvalidFile:
    with pytest.raises(InvalidFile) as refused:
        facts(content)
    return refused.value


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def chat(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in messages], **more}


PLAIN = chat(("user", "Topic?"), ("assistant", "billing"))


def test_a_mark_and_windows_line_ends_change_no_fact() -> None:
    plain = facts(case_bytes("windows", "train-plain.jsonl"))
    assert (plain.kind, plain.rows, plain.messages) == ("chat", 12, 28)
    assert facts(case_bytes("windows", "train-bom-crlf.jsonl")) == plain


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("array-pretty", "invalid_json", 1),
        ("array-one-line", "invalid_messages", 1),
        ("trailing-commas", "invalid_json", 1),
        ("inner-quotes-line-6", "invalid_json", 6),
        ("two-objects-line-4", "invalid_json", 4),
        ("python-repr", "invalid_json", 1),
        ("string-line-3", "invalid_messages", 3),
        ("empty", "invalid_file_format", None),
        ("only-newlines", "invalid_file_format", None),
    ],
)
def test_what_is_no_jsonl_is_refused_at_its_line(name: str, code: str, line: int | None) -> None:
    refused = refusal(case_bytes("not_jsonl", f"{name}.jsonl"))
    assert (refused.code, refused.line) == (code, line)
    assert "MARKER" not in refused.message
    if line is None:
        assert "no rows" in refused.message


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("train-cp1252-line-4", 4),
        ("train-utf16le", 1),
        ("train-gzip", 1),
        ("lfs-pointer", 1),
        ("train-nul-line-2", 2),
    ],
)
def test_what_is_no_text_is_refused_at_its_line(name: str, line: int) -> None:
    refused = refusal(case_bytes("not_text", f"{name}.jsonl"))
    assert (refused.code, refused.line) == ("invalid_json", line)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (case_bytes("not_jsonl", "array-pretty.jsonl"), "write each row as a JSON object on one"),
        (case_bytes("not_jsonl", "array-one-line.jsonl"), "write each row as a JSON object on one"),
        (json.dumps(PLAIN, indent=1).encode(), "write each row as a JSON object on one line"),
        (case_bytes("not_text", "train-gzip.jsonl"), "looks like gzip"),
        (case_bytes("not_text", "train-utf16le.jsonl"), "looks like UTF-16"),
        (case_bytes("not_text", "lfs-pointer.jsonl"), "looks like a Git LFS pointer"),
    ],
    ids=["pretty array", "array", "pretty object", "gzip", "UTF-16", "LFS"],
)
@pytest.mark.parametrize("purpose", ["fine-tune", "batch"])
def test_a_file_of_another_format_is_told_what_it_looks_like(
    content: bytes, hint: str, purpose: str
) -> None:
    if purpose == "fine-tune":
        assert hint in refusal(content).message
        return
    check = BatchFileCheck(endpoint="/v1/chat/completions", own_models={})
    check.feed(content)
    assert hint in check.finish().errors[0].message


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (65_537, None),
        (MIB, None),
        (MIB + 1, "line_too_large"),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_is_at_most_one_mebibyte(row: int, code: str | None, end: bytes) -> None:
    frame = jsonl(chat(("user", "Say it."), ("assistant", ""))).rstrip(b"\n")
    long = frame.replace(b'""', b'"' + b"x" * (row - len(frame)) + b'"')
    assert len(long) == row
    small = jsonl(PLAIN).strip()
    content = end.join([*[small] * 5, long, *[small] * 7]) + end
    if code is None:
        assert facts(content).rows == 13
    else:
        refused = refusal(content)
        assert (refused.code, refused.line) == (code, 6)


def test_the_size_of_a_line_is_judged_before_its_json() -> None:
    refused = refusal(b'{"messages": "' + b"y" * (2 * MIB))
    assert (refused.code, refused.line) == ("line_too_large", 1)


@pytest.mark.parametrize(("messages", "fits"), [(1_024, True), (1_025, False)])
def test_a_row_has_at_most_1024_messages(messages: int, fits: bool) -> None:
    row = chat(*((("user", "assistant")[i % 2], f"m{i}") for i in range(messages)))
    content = jsonl(*[PLAIN] * 12, row)
    if fits:
        assert facts(content).rows == 13
    else:
        refused = refusal(content)
        assert (refused.code, refused.line) == ("invalid_messages", 13)


@pytest.mark.parametrize("name", case_names("content"))
def test_content_is_a_non_empty_string(name: str) -> None:
    content = case_bytes("content", name)
    if name.endswith("-ok.jsonl") or name == "whitespace-only.jsonl":
        assert facts(content).rows == 12
        return
    refused = refusal(content)
    assert (refused.code, refused.line) == ("invalid_messages", 3)
    words = {
        "parts.jsonl": "content parts",
        "image-part.jsonl": "content parts",
        "role-caps.jsonl": "User",
        "prompt-completion.jsonl": "a messages list is missing",
    }
    assert words.get(name, "") in refused.message


def test_spaces_around_content_stay_part_of_it() -> None:
    row = chat_row(chat(("user", "a"), ("assistant", "  billing ")))
    assert row.messages[1].content == "  billing "


@pytest.mark.parametrize("name", case_names("roles"))
def test_roles_may_come_in_any_order_but_for_the_system(name: str) -> None:
    content = case_bytes("roles", name)
    if name.startswith("ok-"):
        found = facts(content)
        alternates = name == "ok-ends-with-user.jsonl"
        assert found.rows == 12
        assert found.first_row_that_does_not_alternate == (None if alternates else 3)
    else:
        refused = refusal(content)
        assert (refused.code, refused.line) == ("invalid_messages", 3)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (chat(("user", "a"), ("assistant", "b"), tools=[{}]), "tools"),
        (chat(("user", "a"), ("assistant", "b"), functions=[{}]), "functions"),
        (chat(("user", "a"), ("assistant", "b"), tool_choice="none"), "tool_choice"),
        (chat(("user", "a"), ("assistant", "b"), parallel_tool_calls=True), "parallel_tool_calls"),
        (chat(("user", "a"), ("assistant", "b"), temperature=1), "temperature"),
        (chat(("user", "a"), ("assistant", "b"), score=None), "score"),
        (chat(("user", "a"), ("assistant", "b"), score=[]), "score"),
        (chat(("user", "a"), ("assistant", "b"), score=1), "score"),
        (chat(("user", "a"), ("tool", "b")), "tool"),
        (chat(("user", "a"), ("function", "b")), "function"),
        (chat(("developer", "a"), ("assistant", "b")), "developer"),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, "name"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "[0].tool_calls"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "[0].function_call"),
        ({"messages": [{"role": "user", "name": "x"}]}, "[0].name"),
        ({"messages": [{"role": "assistant", "content": None, "audio": {}}]}, "[0].audio"),
        ({"messages": [{"role": "assistant", "content": "a", "name": []}]}, "name"),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "weight"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": True}]}, "weight"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 2}]}, "weight"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, "assistant"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(row: Any, word: str) -> None:
    refused = refusal(jsonl(PLAIN, row))
    assert (refused.code, refused.line) == ("invalid_messages", 2)
    assert word in refused.message


PAIR = {
    "input": {"messages": [{"role": "user", "content": "a"}]},
    "preferred_output": [{"role": "assistant", "content": "b"}],
    "non_preferred_output": [{"role": "assistant", "content": "c"}],
}
ROW_FIELDS = sorted(get_type_hints(CompletionCreateParamsBase).keys() - {"messages"})
MESSAGE_FIELDS = sorted(
    {
        *ParsedChatCompletionMessage.model_fields,
        *ChatCompletionStoreMessage.model_fields,
        *get_type_hints(ChatCompletionAssistantMessageParam),
        *get_type_hints(ChatCompletionToolMessageParam),
        "reasoning_content",
        "weight",
    }
    - {"role", "content"}
)


@pytest.mark.parametrize("name", [*ROW_FIELDS, "stream"])
def test_null_of_any_field_of_openais_request_is_its_absence(name: str) -> None:
    assert facts(jsonl(PLAIN | {name: None})) == facts(jsonl(PLAIN))
    given = PAIR["input"]
    assert isinstance(given, dict)
    pair = PAIR | {name: None, "input": given | {name: None}}
    assert facts(jsonl(pair)) == facts(jsonl(PAIR))


@pytest.mark.parametrize("name", MESSAGE_FIELDS)
def test_null_of_any_field_of_openais_message_is_its_absence(name: str) -> None:
    messages = [message | {name: None} for message in PLAIN["messages"]]
    assert facts(jsonl({"messages": messages})) == facts(jsonl(PLAIN))


@pytest.mark.parametrize(
    ("name", "empty"),
    [("tools", []), ("functions", []), ("metadata", {}), ("logit_bias", {}), ("stop", [])],
)
def test_an_empty_list_or_object_that_means_none_is_absence(name: str, empty: object) -> None:
    assert facts(jsonl(PLAIN | {name: empty})) == facts(jsonl(PLAIN))


def test_what_an_sdk_dumps_of_an_answer_is_a_message() -> None:
    answer = ParsedChatCompletionMessage(role="assistant", content="b", annotations=[])
    dumped = answer.model_dump() | {"reasoning_content": None, "tool_calls": []}
    row = {"messages": [{"role": "user", "content": "a"}, dumped], "tools": [], "metadata": None}
    assert facts(jsonl(row)) == facts(jsonl(chat(("user", "a"), ("assistant", "b"))))


def test_a_field_whose_name_could_be_text_of_the_row_is_not_quoted() -> None:
    refused = refusal(jsonl({"messages": [], "The parcel never came": 1}))
    assert "parcel" not in refused.message


@pytest.mark.parametrize(
    ("row", "place"),
    [
        (PLAIN | {"two words": 1}, "the row holds"),
        ({"messages": [{"role": "user", "content": "x", "two words": 1}]}, "messages[0] holds"),
        ({"input": {"messages": [], "two words": 1}}, "input holds"),
    ],
)
def test_an_unknown_field_is_placed_in_words(row: Any, place: str) -> None:
    assert f"Line 1: {place} an unknown field." in refusal(jsonl(row)).message


def test_weight_zero_keeps_a_turn_as_context() -> None:
    row = chat_row(
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "weight": 0},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d", "weight": 1},
            ]
        }
    )
    assert [message.trained for message in row.messages] == [False, False, False, True]


@pytest.mark.parametrize("name", case_names("preference"))
def test_a_preference_row_has_one_answer_each_side(name: str) -> None:
    content = case_bytes("preference", name)
    if name.startswith("ok"):
        found = facts(content)
        assert (found.kind, found.rows) == ("preference", 12)
        return
    refused = refusal(content)
    assert (refused.code, refused.line) == ("invalid_messages", 4)
    if name == "with-tools.jsonl":
        assert "parallel_tool_calls" in refused.message


def test_a_preference_row_counts_its_prompt_once_and_both_answers() -> None:
    row = training_row(case_bytes("preference", "ok.jsonl").splitlines()[0])
    assert isinstance(row, PreferenceRow)
    assert len(row.messages) == len(row.prompt) + 2
    assert [message.trained for message in row.messages[-2:]] == [True, True]
    assert not any(message.trained for message in row.prompt)


def test_a_file_holds_rows_of_one_kind() -> None:
    pair = json.loads(case_bytes("preference", "ok.jsonl").splitlines()[0])
    refused = refusal(jsonl(PLAIN, pair))
    assert (refused.code, refused.line) == ("invalid_messages", 2)


# Token counts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_an_estimate_never_passes_the_bound(pairs: list[tuple[str, str]]) -> None:
    rows = [chat(("user", question), ("assistant", answer)) for question, answer in pairs]
    found = facts(jsonl(*rows))
    least = sum(len((q + a).encode()) for q, a in pairs)
    for name, bound in found.token_bounds.items():
        assert least < bound
        assert found.token_estimates[name] <= bound


def test_the_bound_counts_the_composed_form_where_it_is_longer() -> None:
    # U+0958 has three bytes; its NFC form, which some tokenizers read, has six.
    one = facts(jsonl(chat(("user", "\u0958"), ("assistant", "a"))))
    two = facts(jsonl(chat(("user", "abcdef"), ("assistant", "a"))))
    assert one.token_bounds == two.token_bounds


def test_english_is_estimated_at_about_a_token_for_four_bytes() -> None:
    text = "I bought a jacket last week and the zip is broken. How can I send it back? " * 200
    base = "qwen2.5-7b-instruct"
    found = facts(jsonl(chat(("user", text), ("assistant", "returns"))))
    assert 3 <= len(text) / found.token_estimates[base] <= 4


def test_bases_that_train_turn_by_turn_count_each_turns_context() -> None:
    turn = ("user", "word " * 100), ("assistant", "word " * 100)
    found = facts(jsonl(chat(*turn, *turn)))
    # Two samples: the first turn, and both.
    ratio = found.sample_estimates["qwen3-8b"] / found.token_estimates["qwen3-8b"]
    assert ratio == pytest.approx(1.5, abs=0.05)
    assert found.sample_estimates["mistral-7b-instruct-v0.3"] == pytest.approx(
        found.token_estimates["mistral-7b-instruct-v0.3"]
    )
    assert "qwen2.5-7b-instruct" not in found.sample_estimates


def test_mistral_trains_turn_by_turn_only_below_a_system_message() -> None:
    turn = ("user", "word " * 100), ("assistant", "word " * 100)
    found = facts(jsonl(chat(("system", "Be short."), *turn, *turn)))
    name = "mistral-7b-instruct-v0.3"
    assert found.sample_estimates[name] > 1.4 * found.token_estimates[name]


# What create reads


def template_refusal(
    content: bytes, base: str, *, file: FileRole = "training file"
) -> InvalidFile | None:
    record = CATALOG[base]
    assert record.fine_tuning is not None
    check = TemplateCheck(record, record.fine_tuning, file=file)
    try:
        check.feed(content)
        check.finish()
    except InvalidFile as refused:
        return refused
    return None


CONTROL_TOKENS = {
    "im-end-line-7.jsonl": ("<|im_end|>", "qwen"),
    "im-start-system-line-7.jsonl": ("<|im_start|>", "qwen"),
    "endoftext-answer-line-7.jsonl": ("<|endoftext|>", "qwen"),
    "im-end-weight-0-line-7.jsonl": ("<|im_end|>", "qwen"),
    "im-end-escaped-line-7.jsonl": ("<|im_end|>", "qwen"),
    "html-strike-line-7.jsonl": ("<s>", "mistral"),
    "eot-line-7.jsonl": ("<|eot_id|>", "llama"),
}


@pytest.mark.parametrize(
    "base",
    [
        "qwen2.5-0.5b-instruct",
        "mistral-7b-instruct-v0.3",
        "llama-3.1-8b-instruct",
        "smollm2-135m-instruct",
        "qwen3-8b",
    ],
)
@pytest.mark.parametrize("name", case_names("control_tokens"))
def test_a_control_token_is_refused_for_the_base_that_owns_it(name: str, base: str) -> None:
    content = case_bytes("control_tokens", name)
    facts(content)
    refused = template_refusal(content, base)
    token, owner = CONTROL_TOKENS.get(name, ("<|im_end|>", "qwen"))
    line = 2 if name.startswith("valid") else 7
    owned = base.startswith(owner) or (owner == "qwen" and base.startswith("smollm2"))
    if name in ("near-misses-ok.jsonl", "train-clean.jsonl") or not owned:
        assert refused is None
        return
    assert refused is not None
    assert (refused.code, refused.line) == ("template_token_in_content", line)
    assert token in refused.message
    assert f"line {line}, messages[" in refused.message


def test_a_refusal_says_which_of_the_two_files_it_is_about() -> None:
    content = case_bytes("control_tokens", "valid-im-end-line-2.jsonl")
    refused = template_refusal(content, "qwen2.5-0.5b-instruct", file="validation file")
    assert refused is not None
    assert "validation file, line 2" in refused.message
    assert refused.param == "validation_file"


@pytest.mark.parametrize(
    ("answers", "refused"),
    [
        (["<think>\nhm\n</think>\n\nyes"], False),
        (["<think>\n\n</think>\n\nyes"], False),
        (["no", "<think>\nhm\n</think>\n\nyes"], False),
        (["<think>\nhm\n</think>\n\nyes", "no"], True),
        (["<think>hm</think>yes"], True),
        (["<think>\nhm\n</think>\nyes"], True),
        (["<think>\nhm\n</think>\n\n\nyes"], True),
        (["<think>\n\nhm\n</think>\n\nyes"], True),
        (["<think>\nhm\n</think>\n\n<think>\nhm\n</think>\n\nyes"], True),
        (["the tag </think> ends it"], True),
        (["the tag <think> begins it"], False),
    ],
)
def test_a_think_block_stands_only_in_the_last_turn_in_the_templates_form(
    answers: list[str], refused: bool
) -> None:
    turns = [turn for answer in answers for turn in (("user", "why?"), ("assistant", answer))]
    content = jsonl(chat(*turns))
    found = template_refusal(content, "qwen3-8b")
    assert (found is not None) == refused
    if found is not None:
        assert found.code == "template_token_in_content"
        assert "</think>" in found.message
    assert template_refusal(content, "qwen2.5-7b-instruct") is None


def test_a_user_may_write_about_think_blocks() -> None:
    content = jsonl(chat(("user", "What is </think>?"), ("assistant", "A tag.")))
    assert template_refusal(content, "qwen3-8b") is None


@pytest.mark.parametrize("name", ["spaces-kept-ok.jsonl", "whitespace-only.jsonl"])
def test_what_a_template_would_trim_is_refused_before_a_job(name: str) -> None:
    content = case_bytes("content", name)
    for base in ("llama-3.1-8b-instruct", "mistral-7b-instruct-v0.3"):
        refused = template_refusal(content, base)
        assert refused is not None
        assert (refused.code, refused.line) == ("template_mismatch", 3)
    assert template_refusal(content, "qwen2.5-0.5b-instruct") is None


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MARKS = {
    "qwen2.5-0.5b-instruct": CHATML,
    "qwen2.5-1.5b-instruct": CHATML,
    "qwen2.5-7b-instruct": CHATML,
    "qwen3-8b": CHATML,
    "qwen3.5-9b": CHATML,
    "smollm2-135m-instruct": CHATML,
    "llama-3.1-8b-instruct": (
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|begin_of_text|>",
        "<|end_of_text|>",
    ),
    "mistral-7b-instruct-v0.3": ("<s>", "</s>", "[INST]", "[/INST]"),
    "gpt-oss-20b": (
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
        "<|call|>",
        "<|startoftext|>",
        "<|endoftext|>",
    ),
}
"""As the bases' own templates have them."""


def test_the_marks_are_known_of_every_base_that_trains() -> None:
    assert MARKS.keys() == {name for name, base in CATALOG.items() if base.fine_tuning}


@pytest.mark.parametrize("mark", sorted({mark for marks in MARKS.values() for mark in marks}))
def test_a_mark_alone_is_refused_on_each_base_whose_template_has_it_and_on_no_other(
    mark: str,
) -> None:
    content = jsonl(chat(("user", "a"), ("assistant", f"b {mark}c")))
    for base, marks in MARKS.items():
        refused = template_refusal(content, base)
        if mark not in marks:
            assert refused is None, base
            continue
        assert refused is not None, base
        assert refused.code == "template_token_in_content"
        assert mark in refused.message
        assert "line 1, messages[1]" in refused.message
