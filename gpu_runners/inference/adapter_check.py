"""Looks at an adapter's two files before an engine does.

The engines call it, because neither of theirs can be relied on: peft changes the base's layers
before it finds that tensors do not fit, and vLLM takes tensors of another rank than the config's
without a word and scales them wrongly. It reads the header of the weights, never the weights.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_runners.inference.engine import AdapterUnusable

HEADER_BYTES_MAX = 16 << 20
"""Room for a hundred thousand tensors; a damaged length must not be believed."""
_RANK_AXIS = {"lora_A": 0, "lora_B": 1}


def check_adapter(directory: Path, *, rank_max: int) -> None:
    """Raises AdapterUnusable for files that are not there, damaged, cut short, of a rank that the
    base does not allow, or of another rank than their config says."""
    try:
        rank = json.loads((directory / "adapter_config.json").read_bytes())["r"]
        tensors = _tensors(directory / "adapter_model.safetensors")
        fits = 0 < rank <= rank_max and bool(tensors)
        fits = fits and all(_has_rank(name, entry, rank) for name, entry in tensors.items())
    except (OSError, ValueError, TypeError, LookupError, struct.error) as error:
        raise AdapterUnusable("The fine-tuned model's files cannot be read.") from error
    if not fits:
        raise AdapterUnusable("The fine-tuned model does not fit this base.")


def _tensors(path: Path) -> Mapping[str, Any]:
    """The header's entries. Raises ValueError unless the file ends where they say."""
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        if header_bytes > HEADER_BYTES_MAX:
            raise ValueError("the header is too long")
        header = json.loads(file.read(header_bytes))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if path.stat().st_size != 8 + header_bytes + end:
        raise ValueError("the file does not end with its last tensor")
    return tensors


def _has_rank(name: str, entry: Mapping[str, Any], rank: int) -> bool:
    axis = _RANK_AXIS[name.removesuffix(".weight").rpartition(".")[2]]
    size: int = entry["shape"][axis]
    return size == rank
