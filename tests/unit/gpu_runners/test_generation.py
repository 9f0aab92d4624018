"""What one line may take of the transformers engine, and that its faults are its own."""

from __future__ import annotations

from typing import Any

import pytest

from domain.inputs.requests.chat_body import ChatBody, read_chat_body
from gpu_runners.inference import generation
from gpu_runners.inference.engine import Base, ChatRequest, Generated, Refused
from gpu_runners.inference.engine_transformers import TransformersEngine
from gpu_runners.training.train_lora import TrainingBase

WINDOW = 512


@pytest.fixture(scope="module")
def engine(tiny_base: TrainingBase) -> TransformersEngine:
    engine = TransformersEngine()
    engine.load(
        Base(
            directory=tiny_base.directory,
            kind="chat",
            window_tokens=WINDOW,
            rank_max=8,
            template_kwargs={},
            control_tokens=tiny_base.control_tokens,
            pooling=None,
        )
    )
    return engine


def request(number: str, text: str = "Say hi.", **fields: Any) -> ChatRequest:
    body = read_chat_body({"messages": [{"role": "user", "content": text}], **fields})
    assert isinstance(body, ChatBody)
    return ChatRequest(id=number, adapter=None, body=body)


def results(engine: TransformersEngine) -> dict[str, Generated | Refused]:
    found = {}
    while engine.busy:
        for result in engine.step():
            assert isinstance(result, Generated | Refused)
            assert result.id not in found
            found[result.id] = result
    return found


def test_many_choices_of_a_full_window_run_a_few_at_a_time(engine: TransformersEngine) -> None:
    room = 3 * WINDOW
    engine._cache_tokens_max = room
    engine.submit(request("many", "word " * 450, n=128, max_tokens=9, seed=1))
    engine.submit(request("one", max_tokens=3))
    widths = []
    found = {}
    while engine.busy:
        for result in engine.step():
            found[result.id] = result
        if engine._batch is not None:
            rows = engine._batch.rows
            widths.append(len(rows) * max(row.asked.reserved_tokens for row in rows))
    assert max(widths) <= room
    assert len(found["many"].choices) == 128
    assert found["one"].choices[0].text


@pytest.mark.parametrize("n", [1, 3])
def test_a_row_that_fails_ends_its_line_alone(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    engine._cache_tokens_max = 1 << 20
    real = generation.draw

    def draw(logits: Any, sampling: Any, *, answer: Any, **rest: Any) -> int:
        if sampling.seed == 13 and len(answer) == 2:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return real(logits, sampling, answer=answer, **rest)

    monkeypatch.setattr(generation, "draw", draw)
    good = {"max_tokens": 6, "seed": 1}
    for line in (request("a", **good), request("bad", seed=13, n=n), request("b", **good)):
        engine.submit(line)
    found = results(engine)
    assert isinstance(found["bad"], Refused)
    assert found["bad"].error.code == "engine_failed"
    a, b = found["a"], found["b"]
    assert isinstance(a, Generated)
    assert isinstance(b, Generated)
    assert a.choices == b.choices


def test_a_prompt_that_goes_through_in_pieces_gives_the_same_answer(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["One two three four five six seven.", "Hi"]

    def answers() -> list[Any]:
        for number, text in enumerate(texts):
            engine.submit(request(str(number), text, temperature=0, max_tokens=4, logprobs=True))
        found = results(engine)
        return [found[str(number)].choices[0].logprobs[0] for number in range(len(texts))]

    whole = answers()
    monkeypatch.setattr(generation, "PROMPT_TOKENS_A_PASS", 10)
    pieces = answers()
    for one, other in zip(whole, pieces, strict=True):
        assert one["token"] == other["token"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=0.05)


def test_an_abort_leaves_nothing_behind(engine: TransformersEngine) -> None:
    engine.submit(request("a", n=2, max_tokens=50))
    engine.step()
    engine.abort()
    assert not engine.busy
    engine.submit(request("a", max_tokens=1))
    assert results(engine).keys() == {"a"}
