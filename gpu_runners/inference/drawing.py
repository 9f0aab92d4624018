"""Draws the next token of one answer from its logits. The fields apply in vLLM's order: penalties,
temperature, `min_p`, `top_k`, `top_p`.

`generation.py` calls it. No value that validation lets through may raise here or give another token
than one that is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from domain.inputs.requests.sampling import Sampling


def generator(sampling: Sampling, choice: int) -> torch.Generator:
    """The source of chance of one of a line's choices."""
    source = torch.Generator()
    seed = sampling.engine_seed(choice)
    if seed is None:
        source.seed()
    else:
        source.manual_seed(seed)
    return source


def draw(
    logits: torch.Tensor,
    sampling: Sampling,
    *,
    prompt: Sequence[int],
    answer: Sequence[int],
    source: torch.Generator,
) -> int:
    """The next token of `answer`. Tokens that are not allowed have -inf in `logits`."""
    logits = _penalised(logits, sampling, prompt, answer)
    if sampling.greedy:
        return int(logits.argmax())
    # Shifted first, so that no temperature makes an infinity of a finite logit.
    scaled = (logits - logits.max()) / sampling.temperature
    probabilities = _narrowed(torch.softmax(scaled, dim=-1), sampling)
    return int(torch.multinomial(probabilities, 1, generator=source))


def _penalised(
    logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> torch.Tensor:
    """`repetition_penalty` looks at prompt and answer, the other two at the answer only."""
    if sampling.repetition_penalty != 1:
        seen = torch.tensor([*prompt, *answer]).unique()
        found = logits[seen]
        factor = sampling.repetition_penalty
        logits = logits.index_copy(0, seen, torch.where(found > 0, found / factor, found * factor))
    if answer and (sampling.frequency_penalty or sampling.presence_penalty):
        seen, counts = torch.tensor(answer).unique(return_counts=True)
        penalty = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits = logits.index_add(0, seen, -penalty.to(logits.dtype))
    return logits


def _narrowed(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The likeliest token is always left."""
    if sampling.min_p > 0:
        probabilities = probabilities.where(
            probabilities >= sampling.min_p * probabilities.max(), 0.0
        )
    if sampling.top_k is None and sampling.top_p == 1:
        return probabilities
    ordered, order = probabilities.sort(descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[sampling.top_k :] = 0.0
    if sampling.top_p < 1:
        before = ordered.cumsum(0) - ordered
        ordered[before > sampling.top_p * ordered.sum()] = 0.0
    return torch.zeros_like(probabilities).index_copy(0, order, ordered)
