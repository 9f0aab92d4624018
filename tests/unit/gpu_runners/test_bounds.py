"""What is held is never less than what is billed: the bounds from bytes against the real
tokenizers, as training renders and engines count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from domain.inputs.batch_line import BatchRequest, parse_request
from domain.inputs.requests.chat_body import ChatBody, read_chat_body
from domain.inputs.requests.embeddings_body import EmbeddingsBody, read_embeddings_body
from domain.inputs.token_estimate import bytes_bound
from domain.inputs.training_file import TrainingFileCheck
from domain.limits import DEFAULT_OUTPUT_TOKENS
from gpu_runners.inference.engine import EngineRefusal
from gpu_runners.inference.prompts import EmbeddingPrompts
from gpu_runners.rendering.chat_template import ChatTemplate
from gpu_runners.rendering.training_rows import Renderer
from gpu_runners.training.rows import render_rows
from gpu_runners.weights.store import Weights
from tests.factories import chat_row

CHAT = "smollm2-135m-instruct"
EMBEDDING = "all-minilm-l6-v2"
RARE = "\u0378𓀀🧑🏽\u200d🚀e\u0301\u0958\ufdfa\u1100\u1161\u11a8ﬃΐ㍿\u2028\x00\x7f \n\t"
"""Characters of which a tokenizer makes a token a byte, and those that normal forms lengthen."""

MARKS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "[CLS]", "[SEP]", "<s>"]
"""Of templates and tokenizers, which are letters in a text, as many tokens as those make."""

TEXTS = st.one_of(
    st.text(st.sampled_from(RARE), max_size=40),
    st.text(st.characters(codec="utf-8"), max_size=60),
    st.sampled_from(["", " ", "assistant", "x" * 3_000, "🚀" * 500, *MARKS, "".join(MARKS) * 50]),
)
MANY = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="session")
def embedding_tokenizer(weights_root: Path) -> Any:
    return AutoTokenizer.from_pretrained(Weights(weights_root).path(EMBEDDING))


@st.composite
def chat_rows(draw: st.DrawFn) -> dict[str, Any]:
    turns = draw(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": "s" + draw(TEXTS)})
    for asked, answered in turns:
        messages.append({"role": "user", "content": "u" + asked})
        weight = draw(st.sampled_from([{}, {"weight": 0}, {"weight": 1}]))
        messages.append({"role": "assistant", "content": "a" + answered, **weight})
    messages[-1].pop("weight", None)
    return {"messages": messages}


@given(st.lists(chat_rows(), min_size=1, max_size=3), st.sampled_from([128, 2_048]))
@MANY
def test_training_never_bills_more_tokens_than_its_quote_counts(
    tokenizer: Any, rows: list[dict[str, Any]], max_seq_length: int
) -> None:
    check = TrainingFileCheck()
    for row in rows:
        check.feed(json.dumps(row).encode() + b"\n")
    bound = check.finish().token_bounds[CHAT]
    renderer = Renderer(tokenizer, control_tokens=(), max_seq_length=max_seq_length)
    lines = [chat_row(row, line=number) for number, row in enumerate(rows, start=1)]
    rendered = render_rows(renderer, lines)
    assert sum(row.billed_tokens for row in rendered.rows) <= bound


def checked(endpoint: str, body: dict[str, Any]) -> BatchRequest:
    line = {"custom_id": "1", "method": "POST", "url": endpoint, "body": body}
    raw = json.dumps(line).encode()
    request = parse_request(raw, line=1, endpoint=endpoint, own_models={})  # type: ignore[arg-type]
    assert isinstance(request, BatchRequest), request
    return request


ROLES = st.sampled_from(["system", "developer", "user", "assistant"])
# Marks are letters in a line, and so many tokens each; a training file refuses them.
LINE_TEXTS = TEXTS | st.sampled_from(["<|im_end|>" * 50, "<gh_stars>", "[SEP] [CLS]" * 20])
CONTENTS = LINE_TEXTS | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": LINE_TEXTS}), min_size=1, max_size=3
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}), min_size=1, max_size=6
)
TOKEN_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 128),
        "max_tokens": st.integers(1, 4_096) | st.none(),
    },
) | st.fixed_dictionaries({"max_completion_tokens": st.integers(1, 10_000)})


@given(MESSAGES, TOKEN_FIELDS)
@MANY
def test_a_chat_line_never_uses_more_than_is_held_for_it(
    tokenizer: Any, messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    body = {"model": CHAT, "messages": messages, **fields}
    request = checked("/v1/chat/completions", body)
    chat = read_chat_body(body)
    assert isinstance(chat, ChatBody)
    prompt = ChatTemplate(tokenizer).prompt_ids(chat.messages)
    window = 8_192
    # An engine refuses a prompt that leaves no room.
    assert len(prompt) >= window or len(prompt) <= request.input_token_bound
    sampling = chat.sampling
    most = min(sampling.max_tokens, window)
    assert most * sampling.n <= request.output_token_bound
    if not fields:
        assert sampling.max_tokens == DEFAULT_OUTPUT_TOKENS


FULL_TEXTS = LINE_TEXTS.filter(bool)
TOKEN_IDS = st.lists(st.integers(0, 30_000), min_size=1, max_size=50)


@given(
    FULL_TEXTS
    | TOKEN_IDS
    | st.lists(FULL_TEXTS, min_size=1, max_size=4)
    | st.lists(TOKEN_IDS, min_size=1, max_size=4)
)
@example([7] * 2_500)
@MANY
def test_an_embeddings_line_never_uses_more_than_is_held_for_it(
    embedding_tokenizer: Any, given_input: Any
) -> None:
    body = {"model": EMBEDDING, "input": given_input}
    request = checked("/v1/embeddings", body)
    embeddings = read_embeddings_body(body)
    assert isinstance(embeddings, EmbeddingsBody)
    try:
        prompts = EmbeddingPrompts(embedding_tokenizer, window_tokens=256).ids(embeddings.inputs)
    except EngineRefusal:
        return  # an input beyond the window
    assert sum(map(len, prompts)) <= request.input_token_bound


def test_characters_that_a_normal_form_lengthens_count_in_their_longest_form() -> None:
    assert bytes_bound("\ufdfa") == 33
    assert bytes_bound("\u0958") == 6
    assert bytes_bound("e\u0301") == 3
