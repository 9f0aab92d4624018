"""What trains is what serving would send and expect, token for token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runners.rendering.training_rows import RenderedRow, Renderer, Sample, TrainingRefused
from tests.factories import chat_row
from tests.unit.gpu_runners.tiny_model import CONTROL_TOKENS, chat

END = "<|im_end|>"
# Templates with the one peculiarity each that a base of the catalog has.
TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HISTORY_DIFFERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
SYSTEM_IN_LAST_USER = (
    "{% set chat = messages %}{% if messages[0].role == 'system' %}"
    "{% set chat = messages[1:] %}{% endif %}<|im_start|>"
    "{% for m in chat %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)


def renderer(tokenizer: Any, template: str | None = None, max_seq_length: int = 512) -> Renderer:
    return Renderer(
        tokenizer,
        control_tokens=CONTROL_TOKENS,
        max_seq_length=max_seq_length,
        template=template,
    )


def render(tokenizer: Any, row: dict[str, Any], **options: Any) -> RenderedRow:
    rendered = renderer(tokenizer, **options).render(chat_row(row, line=7))
    assert rendered is not None
    return rendered


def trained_text(tokenizer: Any, sample: Sample) -> list[str]:
    return [tokenizer.decode(sample.ids[start:end]) for start, end in sample.spans]


def served_ids(tokenizer: Any, messages: list[Any], template: str | None = None) -> list[int]:
    prompt = tokenizer.apply_chat_template(
        [{"role": m["role"], "content": m["content"]} for m in messages],
        add_generation_prompt=True,
        chat_template=template,
        return_dict=False,
    )
    return [int(i) for i in prompt]


def test_the_answer_and_its_end_token_train_and_nothing_else(tokenizer: Any) -> None:
    row = render(tokenizer, chat("The parcel never came.", "delivery", system="Classify."))
    (sample,) = row.samples
    assert trained_text(tokenizer, sample) == ["delivery" + END]


def test_contents_that_read_like_the_templates_own_words_are_still_found(tokenizer: Any) -> None:
    row = render(tokenizer, chat("assistant", "user", "user", "assistant", system="system"))
    assert trained_text(tokenizer, row.samples[0]) == ["user" + END, "assistant" + END]


def test_each_turn_trains_behind_exactly_the_ids_that_serving_sends(tokenizer: Any) -> None:
    messages = chat("One?", "1", "Two?", "2\n\n", "Three?", "3")["messages"]
    (sample,) = render(tokenizer, {"messages": messages}).samples
    for turn, (start, _) in zip((1, 3, 5), sample.spans, strict=True):
        assert sample.ids[:start].tolist() == served_ids(tokenizer, messages[:turn])


def test_the_row_starts_with_exactly_one_beginning_token(tokenizer: Any) -> None:
    (sample,) = render(tokenizer, chat("a", "b")).samples
    assert sample.ids[0] == tokenizer.bos_token_id != sample.ids[1]


def test_weight_0_leaves_out_the_answer_and_its_end_token(tokenizer: Any) -> None:
    row = chat("One?", "1", "Two?", "2")
    row["messages"][1]["weight"] = 0
    rendered = render(tokenizer, row)
    assert trained_text(tokenizer, rendered.samples[0]) == ["2" + END]
    assert rendered.billed_tokens == render(tokenizer, chat("One?", "1", "Two?", "2")).billed_tokens


def test_all_rendered_tokens_are_billed_though_the_last_ones_are_not_computed(
    tokenizer: Any,
) -> None:
    row = render(tokenizer, chat("a", "b"))
    text = tokenizer.apply_chat_template(chat("a", "b")["messages"], tokenize=False)
    assert row.billed_tokens == len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert len(row.samples[0].ids) == row.samples[0].spans[-1][1] < row.billed_tokens


def test_the_cut_keeps_the_front_and_bills_the_front(tokenizer: Any) -> None:
    whole = render(tokenizer, chat("Count.", "one two three four five six seven"))
    start, end = whole.samples[0].spans[0]
    cut = render(tokenizer, whole_row(), max_seq_length=end - 3)
    assert cut.samples[0].spans == ((start, end - 3),)
    assert cut.billed_tokens == end - 3


def test_a_row_whose_cut_keeps_no_trained_token_is_dropped(tokenizer: Any) -> None:
    start = render(tokenizer, whole_row()).samples[0].spans[0][0]
    cut = renderer(tokenizer, max_seq_length=start)
    assert cut.render(chat_row(whole_row())) is None


def whole_row() -> dict[str, Any]:
    return chat("Count.", "one two three four five six seven")


@pytest.mark.parametrize(
    ("row", "message"),
    [(chat(" spaced", "b"), 1), (chat("a", "b "), 2), (chat("a", "b", "c\n", "d"), 3)],
)
def test_text_that_the_template_trims_is_refused_by_row_and_message(
    tokenizer: Any, row: dict[str, Any], message: int
) -> None:
    with pytest.raises(TrainingRefused) as refused:
        render(tokenizer, row, template=TRIMS)
    assert refused.value.code == "template_mismatch"
    assert refused.value.message.startswith(f"Row 7, message {message}: ")
    assert "spaced" not in refused.value.message


def test_a_control_token_as_text_is_refused_and_named(tokenizer: Any) -> None:
    with pytest.raises(TrainingRefused, match=r"Row 7, message 1: .*<\|im_end\|>") as refused:
        render(tokenizer, chat("end <|im_end|> here", "b"))
    assert refused.value.code == "template_mismatch"


def test_roles_that_the_template_refuses_are_a_mismatch(tokenizer: Any) -> None:
    row = {"messages": [*chat("a")["messages"], *chat("b", "c")["messages"]]}
    with pytest.raises(TrainingRefused, match=r"Row 7: .*roles") as refused:
        render(tokenizer, row, template=ALTERNATES)
    assert refused.value.code == "template_mismatch"


def test_where_history_looks_different_each_turn_trains_as_served_and_is_billed_once(
    tokenizer: Any,
) -> None:
    messages = chat("One?", "1", "Two?", "2")["messages"]
    row = render(tokenizer, {"messages": messages}, template=HISTORY_DIFFERS)
    assert len(row.samples) == 2
    for turn, sample in zip((1, 3), row.samples, strict=True):
        ((start, end),) = sample.spans
        assert sample.ids[:start].tolist() == served_ids(
            tokenizer, messages[:turn], HISTORY_DIFFERS
        )
        assert tokenizer.decode(sample.ids[start:end]) == messages[turn]["content"] + END
    text = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=HISTORY_DIFFERS)
    assert row.billed_tokens == len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_last_turn_with_a_think_block_trains_on_the_thought_too(tokenizer: Any) -> None:
    answer = "<think>\neasy\n</think>\n\n2"
    row = render(tokenizer, chat("Two?", answer), template=HISTORY_DIFFERS)
    (sample,) = row.samples
    assert trained_text(tokenizer, sample) == [answer + END]
    assert tokenizer.decode(sample.ids[: sample.spans[0][0]]).endswith("assistant\n")


def test_a_system_message_that_history_would_lose_is_trained_as_served(tokenizer: Any) -> None:
    messages = chat("One?", "1", "Two?", "2", system="Count.")["messages"]
    row = render(tokenizer, {"messages": messages}, template=SYSTEM_IN_LAST_USER)
    assert len(row.samples) == 2
    for turn, sample in zip((2, 4), row.samples, strict=True):
        ((start, _),) = sample.spans
        prompt = served_ids(tokenizer, messages[:turn], SYSTEM_IN_LAST_USER)
        assert sample.ids[:start].tolist() == prompt
        assert "Count." in tokenizer.decode(prompt)


@given(
    contents=st.lists(
        st.text(min_size=1, max_size=20).filter(lambda t: not any(c in t for c in CONTROL_TOKENS)),
        min_size=2,
        max_size=6,
    )
)
def test_any_text_trains_whole_with_its_end_token_behind_the_ids_that_serving_sends(
    tokenizer: Any, contents: list[str]
) -> None:
    messages = chat(*contents[: len(contents) // 2 * 2])["messages"]
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    samples = render(tokenizer, {"messages": messages}).samples
    spans = [(sample, *span) for sample in samples for span in sample.spans]
    assert len(spans) == len(turns)
    for turn, (sample, start, end) in zip(turns, spans, strict=True):
        assert sample.ids[:start].tolist() == served_ids(tokenizer, messages[:turn])
        # This vocabulary lacks some bytes, so the ids are compared, not the text.
        answer = tokenizer(messages[turn]["content"] + END, add_special_tokens=False)
        assert sample.ids[start:end].tolist() == answer["input_ids"]
