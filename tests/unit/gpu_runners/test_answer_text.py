"""The entries of log-probabilities join to the content, whatever its letters are made of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runners.inference.answer_text import AnswerText, EntryWriter, Position


def answer_of(tokenizer: Any, tokens: list[int]) -> str:
    answer = AnswerText(tokenizer, [])
    return "".join(map(answer.add, tokens))


@pytest.fixture(scope="session")
def writer(tokenizer: Any) -> EntryWriter:
    return EntryWriter(tokenizer)


def entries_of(writer: EntryWriter, tokens: list[int], text: str) -> list[dict[str, Any]]:
    positions = [Position(token, -0.5, [(token, -0.5), (5, float("-inf"))]) for token in tokens]
    return writer.entries(positions, prompt=[], text=text)


def joined(entries: list[dict[str, Any]]) -> tuple[str, bytes]:
    text = "".join(entry["token"] for entry in entries)
    return text, bytes(byte for entry in entries for byte in entry["bytes"])


@pytest.mark.parametrize("cut", [0, 1, 3, 5, 7, 9, 40])
def test_entries_join_to_a_content_of_letters_of_many_tokens(
    tokenizer: Any, writer: EntryWriter, cut: int
) -> None:
    whole = "Hi 🧑🏽‍🚀 naïve 日本 end"
    tokens = tokenizer(whole, add_special_tokens=False).input_ids
    # This vocabulary lacks some bytes, so the reference is what its tokens say.
    text = answer_of(tokenizer, tokens)[:cut]
    entries = entries_of(writer, [*tokens, tokenizer.eos_token_id], text)
    assert joined(entries) == (text, text.encode())


@given(tokens=st.lists(st.integers(0, 49_151), max_size=30), cut=st.integers(0, 60))
def test_any_tokens_join_to_their_content(
    tokenizer: Any, writer: EntryWriter, tokens: list[int], cut: int
) -> None:
    text = answer_of(tokenizer, tokens)[:cut]
    assert joined(entries_of(writer, tokens, text)) == (text, text.encode())


def test_the_end_mark_and_what_follows_the_content_have_no_entry(
    tokenizer: Any, writer: EntryWriter
) -> None:
    tokens = tokenizer("one two three", add_special_tokens=False).input_ids
    entries = entries_of(writer, [*tokens, tokenizer.eos_token_id], "one tw")
    assert [entry["token"] for entry in entries] == ["one", " tw"]


def test_alternatives_are_spelled_and_an_impossible_one_has_a_number(
    tokenizer: Any, writer: EntryWriter
) -> None:
    (token,) = tokenizer(" two", add_special_tokens=False).input_ids
    (entry,) = entries_of(writer, [token], " two")
    best, impossible = entry["top_logprobs"]
    assert (best["token"], bytes(best["bytes"])) == (" two", b" two")
    assert impossible["logprob"] == -9999.0
