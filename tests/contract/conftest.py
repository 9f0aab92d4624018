"""Engine children that the contract tests share: each is started once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_runners.weights.store import Weights
from tests.contract.engine_child import (
    VLLM_PYTHON,
    EngineChild,
    engine_child,
    write_random_adapter,
)

CHAT_BASE = "smollm2-135m-instruct"
EMBEDDING_BASE = "all-minilm-l6-v2"
MODEL_ENGINES = ["transformers"]
MODEL_ENGINES += [pytest.param("vllm", marks=pytest.mark.engines)] if VLLM_PYTHON.exists() else []
ENGINES = ["echo", *MODEL_ENGINES]
ADAPTERS = 9
"""As many as vLLM has slots, so that none of them is empty."""


@pytest.fixture(scope="session")
def adapters(weights_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = Weights(weights_root).path(CHAT_BASE)
    root = tmp_path_factory.mktemp("adapters")
    return [write_random_adapter(root / str(i), base, seed=i) for i in range(ADAPTERS)]


@pytest.fixture(scope="session", params=ENGINES)
def child(
    request: pytest.FixtureRequest, weights_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineChild]:
    work_dir = tmp_path_factory.mktemp("engine")
    with engine_child(request.param, CHAT_BASE, weights_root, work_dir) as child:
        yield child


@pytest.fixture(scope="session", params=ENGINES)
def embedder(
    request: pytest.FixtureRequest, weights_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineChild]:
    work_dir = tmp_path_factory.mktemp("engine")
    with engine_child(request.param, EMBEDDING_BASE, weights_root, work_dir) as child:
        yield child


@pytest.fixture
def model(child: EngineChild) -> EngineChild:
    """A chat child with a real model."""
    if child.engine == "echo":
        pytest.skip("an engine without a model")
    return child


@pytest.fixture
def embedding_model(embedder: EngineChild) -> EngineChild:
    """An embedding child with a real model."""
    if embedder.engine == "echo":
        pytest.skip("an engine without a model")
    return embedder
