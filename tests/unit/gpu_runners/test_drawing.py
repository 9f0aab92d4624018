"""Every value that validation lets through draws a token, and only one that is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from domain.inputs.requests.sampling import Sampling
from gpu_runners.inference.drawing import draw, generator

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -torch.inf])


def drawn(logits: torch.Tensor = LOGITS, answer: tuple[int, ...] = (), **fields: Any) -> int:
    sampling = Sampling(**fields)
    return draw(logits, sampling, prompt=[], answer=answer, source=generator(sampling, 0))


def shares(**fields: Any) -> list[float]:
    """How often each token comes, of 4,000 draws."""
    sampling = Sampling(**fields)
    source = generator(sampling, 0)
    tokens = [draw(LOGITS, sampling, prompt=[], answer=(), source=source) for _ in range(4_000)]
    return [tokens.count(token) / len(tokens) for token in range(len(LOGITS))]


@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(1e-5, 2),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.none() | st.integers(1, 2**31),
            "min_p": st.floats(0, 1),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0.1, 10),
        },
    ),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_no_fields_raise_or_draw_a_token_that_is_not_allowed(
    fields: dict[str, Any], seed: int
) -> None:
    assert drawn(answer=(0, 0, 3), seed=seed, **fields) in range(4)


@pytest.mark.parametrize("fields", [{"temperature": 1e-5}, {"top_k": 1}, {"min_p": 1.0}])
def test_what_leaves_one_token_draws_it(fields: dict[str, Any]) -> None:
    assert shares(seed=1, **fields)[0] == 1.0


def test_temperature_and_bounds_give_the_shares_that_they_promise() -> None:
    weights = [math.exp(value) for value in LOGITS.tolist()]
    assert shares(seed=1) == pytest.approx([w / sum(weights) for w in weights], abs=0.03)
    assert shares(seed=1, top_k=2)[2:] == [0, 0, 0]
    assert shares(seed=1, top_p=0.7)[2:] == [0, 0, 0]
    assert shares(seed=1, min_p=0.3)[2:] == [0, 0, 0]


def test_penalties_lower_what_was_written() -> None:
    assert drawn(answer=(0,), temperature=0, presence_penalty=1.5) == 1
    assert drawn(answer=(0, 0, 0), temperature=0, frequency_penalty=0.5) == 1
    assert drawn(answer=(0,), temperature=0, repetition_penalty=4.0) == 1
    # Of a negative logit a division would be a reward.
    assert drawn(torch.tensor([-1.0, -1.5]), answer=(0,), temperature=0, repetition_penalty=2) == 1


def test_choices_of_a_line_have_chances_of_their_own() -> None:
    sampling = Sampling(seed=-1, n=3)
    firsts = {
        tuple(torch.rand(4, generator=generator(sampling, choice)).tolist()) for choice in range(3)
    }
    assert len(firsts) == 3
