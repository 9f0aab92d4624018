"""A model of the same make as the small local base, small enough to train in a second, and rows."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from domain.catalog import CATALOG
from domain.messages import ObjectRef, TrainingHyperparameters, TrainTask
from gpu_runners.training.train_lora import TrainingBase

BASE = "smollm2-135m-instruct"
CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def save_tiny_model(directory: Path, tokenizer_from: Path) -> TrainingBase:
    """Random weights, always the same ones, with the real base's tokenizer and template."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer_from / name, directory / name)
    return training_base(directory)


def note_as_snapshot(directory: Path, commit: str) -> Path:
    """Notes of each file what `hf download --local-dir` notes: small files by git's digest."""
    notes = directory / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for file in sorted(path for path in directory.iterdir() if path.is_file()):
        content = file.read_bytes()
        digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if file.suffix == ".safetensors":
            digest = hashlib.sha256(content).hexdigest()
        (notes / f"{file.name}.metadata").write_text(f"{commit}\n{digest}\n1700000000.0\n")
    return directory


def training_base(directory: Path) -> TrainingBase:
    """The small base as the catalog has it, with the files of this directory."""
    record = CATALOG[BASE]
    return TrainingBase(
        id=BASE,
        revision=record.revision,
        source=record.source,
        commit=record.commit,
        directory=directory,
        control_tokens=CONTROL_TOKENS,
    )


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    """A row whose turns alternate, the user first."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": messages}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task(**changes: Any) -> TrainTask:
    """A small supervised LoRA task; fields of its hyperparameters may be given too."""
    ref = ObjectRef(key="files/file-1", bytes=1, sha256="0" * 64)
    parameters = {
        "n_epochs": 1,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "lora_rank": 4,
        "lora_alpha": 8,
        "max_seq_length": 128,
    }
    fields = {
        "base": BASE,
        "method": "supervised",
        "adapter": "lora",
        "seed": 1,
        "training": ref,
        "eval_rows": 1,
        "time_limit_seconds": 600,
        "output_prefix": "adapters/ftjob-1/1/",
    }
    for name, value in changes.items():
        (parameters if name in parameters else fields)[name] = value
    return TrainTask(hyperparameters=TrainingHyperparameters(**parameters), **fields)
