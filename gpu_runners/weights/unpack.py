"""Turns a quantised GGUF file into a plain bf16 model directory. Started by `weights.py` as a
process of its own, so that a runner never imports torch; it must never write anywhere but into the
directory it is given."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

from gpu_runners.lifeline import die_with_parent


def unpack_gguf(source: Path, target: Path) -> None:
    """Dequantises once: every later use, serving and merging included, sees the same bf16 bytes."""
    folder, name = str(source.parent), source.name
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)


if __name__ == "__main__":
    die_with_parent()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    unpack_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
