"""Vectors of texts on transformers: one of the three ways of the catalog, always of length 1.

`engine_transformers.py` calls it. It must give what vLLM gives for the same base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from domain.catalog import Pooling

TOKENS_A_PASS = 16_384
"""Padding included. One input may have more, up to the base's window."""
INPUTS_A_PASS = 32


def pooled(model: Any, prompts: Sequence[list[int]], pooling: Pooling) -> list[list[float]]:
    """A vector for each, in their order."""
    vectors: list[list[float]] = []
    for some in _passes(prompts):
        hidden, mask = _hidden(model, some)
        vectors += torch.nn.functional.normalize(_POOLED[pooling](hidden, mask)).tolist()
    return vectors


def _passes(prompts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """In their order, so that no vector must be put back in place."""
    some: list[list[int]] = []
    for prompt in prompts:
        width = max(len(each) for each in [*some, prompt])
        if some and (len(some) == INPUTS_A_PASS or (len(some) + 1) * width > TOKENS_A_PASS):
            yield some
            some = []
        some.append(prompt)
    yield some


def _hidden(model: Any, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, : len(prompt)] = 1
    ids, mask = ids.to(model.device), mask.to(model.device)
    return model(input_ids=ids, attention_mask=mask).last_hidden_state, mask


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def _first(hidden: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
    return hidden[:, 0]


def _last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, mask.sum(1) - 1]


_POOLED = {"mean": _mean, "cls": _first, "last": _last}
