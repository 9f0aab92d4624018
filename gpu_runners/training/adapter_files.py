"""The two files of an adapter, in the one form that the product trains, serves and hands out:
`adapter_config.json` and `adapter_model.safetensors`.

Plain LoRA on linear layers, lora_A and lora_B in bf16 and nothing else, so that peft and vLLM load
it as it is. Whatever departs from that is refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from domain.limits import ADAPTER_BYTES_MAX
from gpu_runners.rendering.training_rows import TrainingRefused

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
TARGET_MODULES = (
    "down_proj",
    "gate_proj",
    "k_proj",
    "o_proj",
    "q_proj",
    "up_proj",
    "v_proj",
)
"""Fine-tuning page, "Things to know about each model"."""

_PREFIX = "base_model.model."
# What would make the scale or the result differ from plain alpha / rank, as peft spells it.
_PLAIN: dict[str, object] = {
    "bias": "none",
    "lora_bias": False,
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What the config has to say. `source` is the base's Hugging Face repository and `commit` the
    one of its commits that training used, None if none is known: peft and others look them up."""

    source: str
    commit: str | None
    rank: int
    alpha: int


def write(directory: Path, shape: AdapterShape, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes both files, flushed to disk. Equal tensors give equal bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": shape.source,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": shape.rank,
        "revision": shape.commit,
        "target_modules": sorted(TARGET_MODULES),
        "task_type": "CAUSAL_LM",
        **_PLAIN,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_NAME).write_text(text)
    packed = {name: tensors[name].to("cpu", torch.bfloat16).contiguous() for name in tensors}
    save_file(packed, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())


def verify(directory: Path, shape: AdapterShape) -> None:
    """Reads both files back. Raises TrainingRefused with `adapter_invalid` or
    `adapter_too_large`, naming what is wrong."""
    size = (directory / WEIGHTS_NAME).stat().st_size
    if size > ADAPTER_BYTES_MAX:
        raise TrainingRefused(
            f"The adapter is {size} bytes, over the limit of {ADAPTER_BYTES_MAX}. Lower lora_rank.",
            code="adapter_too_large",
        )
    _verify_config(json.loads((directory / CONFIG_NAME).read_text()), shape)
    with safe_open(directory / WEIGHTS_NAME, framework="pt") as file:
        names = set(file.keys())
        if not names:
            raise _invalid("it holds no tensors")
        for name in sorted(names):
            _verify_tensor(name, file.get_tensor(name), shape, names)


def _verify_config(config: Mapping[str, Any], shape: AdapterShape) -> None:
    wanted: dict[str, object] = {
        **_PLAIN,
        "peft_type": "LORA",
        "base_model_name_or_path": shape.source,
        "revision": shape.commit,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": sorted(TARGET_MODULES),
    }
    for key, value in wanted.items():
        if config.get(key) != value:
            raise _invalid(f"{key} of its config is not {value!r}")


def _verify_tensor(name: str, tensor: torch.Tensor, shape: AdapterShape, names: set[str]) -> None:
    module, _, factor = name.removesuffix(".weight").rpartition(".")
    pair = {"lora_A": "lora_B", "lora_B": "lora_A"}.get(factor)
    if pair is None or not name.startswith(_PREFIX):
        raise _invalid(f"{name} is not a lora_A or lora_B weight")
    if module.rpartition(".")[2] not in TARGET_MODULES:
        raise _invalid(f"{name} adapts a layer that is not adapted")
    if f"{module}.{pair}.weight" not in names:
        raise _invalid(f"{name} has no {pair}")
    if tensor.dtype != torch.bfloat16:
        raise _invalid(f"{name} is not bf16")
    if tensor.dim() != 2 or tensor.shape[0 if factor == "lora_A" else 1] != shape.rank:
        raise _invalid(f"{name} is not of rank {shape.rank}")
    if not bool(torch.isfinite(tensor).all()):
        raise _invalid(f"{name} holds a value that is not finite")


def _invalid(why: str) -> TrainingRefused:
    return TrainingRefused(f"The trained adapter is not usable: {why}.", code="adapter_invalid")
