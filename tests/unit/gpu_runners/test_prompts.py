"""The ids that a model was trained to answer are the ids that serving sends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from domain.catalog import CATALOG
from gpu_runners.rendering.chat_template import ChatTemplate
from gpu_runners.rendering.training_rows import Renderer
from tests.factories import chat_row
from tests.unit.gpu_runners.tiny_model import BASE, CONTROL_TOKENS, chat

ROWS = Path(__file__).parents[3] / "docs" / "demo" / "train.jsonl"
ARGUMENTS = CATALOG[BASE].template_arguments

# No halves of characters and no empty text, which no row holds; some of the tokenizer's marks that
# are no control tokens of the base, which a row may hold as letters.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30) | st.lists(
    st.sampled_from(["<gh_stars>", "<filename>", "<", "a"]), min_size=1, max_size=6
).map("".join)


def prompts_in_training(tokenizer: Any, messages: list[dict[str, Any]]) -> list[list[int]]:
    """What stands before each trained turn."""
    tuning = CATALOG[BASE].fine_tuning
    assert tuning is not None
    renderer = Renderer(
        tokenizer,
        control_tokens=tuning.control_tokens,
        max_seq_length=4096,
        arguments=ARGUMENTS,
    )
    row = renderer.render(chat_row({"messages": messages}))
    assert row is not None
    return [sample.ids[:start].tolist() for sample in row.samples for start, _ in sample.spans]


def prompts_in_serving(tokenizer: Any, messages: list[dict[str, Any]]) -> list[list[int]]:
    """What a batch line with the same messages up to each answer sends."""
    template = ChatTemplate(tokenizer, control_tokens=CONTROL_TOKENS, arguments=ARGUMENTS)
    return [
        template.prompt_ids(messages[:turn])
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def test_demo_rows_are_served_with_the_ids_that_they_are_trained_with(tokenizer: Any) -> None:
    for line in ROWS.read_text().splitlines():
        messages = json.loads(line)["messages"]
        assert prompts_in_training(tokenizer, messages) == prompts_in_serving(tokenizer, messages)


@given(
    turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
    system=st.none() | texts,
)
def test_whatever_the_messages_hold_they_are_the_same_ids(
    tokenizer: Any, turns: list[tuple[str, str]], system: str | None
) -> None:
    messages = chat(*(text for turn in turns for text in turn), system=system)["messages"]
    assert prompts_in_training(tokenizer, messages) == prompts_in_serving(tokenizer, messages)
