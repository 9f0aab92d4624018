"""vLLM's LoRA operations for the CPU, regrouped: one matrix product per distinct adapter in a step.

`engine_vllm.py` puts them in the place of vLLM's own, which copy a whole adapter matrix for every
token and, worse, take the index -1 of a base-model row for the last adapter. Here rows without an
adapter are left alone. The four arguments shared by all are the row's inputs, the stacked weights
of all slots, the output, and each row's slot (-1: none).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper import punica_cpu


class GroupedPunicaWrapper(punica_cpu.PunicaWrapperCPU):  # type: ignore[misc]
    """Keeps, for each step, which rows belong to which adapter slot."""

    def update_metadata(self, *arguments: Any, **keywords: Any) -> None:
        super().update_metadata(*arguments, **keywords)
        self._token_groups = _groups(self.token_lora_indices)
        self._sampler_groups = _groups(self.sampler_indices)

    def add_lora_linear(self, *arguments: Any, **keywords: Any) -> None:
        """Base rows alone cost nothing, not even the buffers."""
        if self._token_groups:
            super().add_lora_linear(*arguments, **keywords)

    def _apply_shrink(
        self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float
    ) -> None:
        _shrink(self._token_groups, x, w_t_all, y.view(-1, y.shape[-1]), scale)

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        assert add_inputs
        _expand(self._token_groups, x, w_t_all, y[:, y_offset : y_offset + y_slice_size])

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **_: Any,
    ) -> None:
        assert add_inputs
        _expand(self._token_groups, x, lora_b_stacked, y)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        rank = lora_b_stacked.size(-1)
        shrunk = torch.zeros((x.size(0), rank), dtype=torch.float32) if buffer is None else buffer
        _shrink(self._sampler_groups, x, lora_a_stacked, shrunk, scale)
        _expand(self._sampler_groups, shrunk, lora_b_stacked, y)


Groups = list[tuple[int, torch.Tensor | None]]


def install() -> None:
    """Makes vLLM's CPU platform build this wrapper; call it before the engine is made."""
    punica_cpu.PunicaWrapperCPU = GroupedPunicaWrapper


def _groups(slots: torch.Tensor) -> Groups:
    """Slot and its rows, for each slot but -1; None for the rows when they are all of them."""
    distinct = torch.unique(slots).tolist()
    if len(distinct) == 1:
        return [(distinct[0], None)] if distinct[0] >= 0 else []
    return [(slot, (slots == slot).nonzero().flatten()) for slot in distinct if slot >= 0]


def _shrink(
    groups: Groups, x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor, scale: float
) -> None:
    """y = scale · x·Aᵀ for the rows with an adapter."""
    for slot, rows in groups:
        matrix = weights[slot].squeeze(0)
        product = scale * ((x if rows is None else x[rows]) @ matrix.T).to(y.dtype)
        width = product.shape[1]
        if rows is None:
            y[: product.shape[0], :width] = product
        else:
            y[rows, :width] = product


def _expand(groups: Groups, x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> None:
    """y += x·Bᵀ for the rows with an adapter."""
    for slot, rows in groups:
        matrix = weights[slot].squeeze(0).to(y.dtype)
        product = (x if rows is None else x[rows]).to(y.dtype) @ matrix.T
        width = min(product.shape[1], y.shape[1])
        if rows is None:
            y[: product.shape[0], :width] += product[:, :width]
        else:
            y[rows, :width] += product[:, :width]
