"""The small base's real tokenizer, and a tiny model behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from gpu_runners.training.train_lora import TrainingBase
from gpu_runners.weights.store import Weights
from tests.unit.gpu_runners.tiny_model import BASE, save_tiny_model


@pytest.fixture(scope="session")
def tokenizer_dir(weights_root: Path) -> Path:
    return Weights(weights_root).path(BASE)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_dir)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> TrainingBase:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer_dir)
