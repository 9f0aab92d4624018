"""Each way of pooling gives the same vectors on every engine: those of the model's own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from gpu_runners.child_pipes import unpack_vector
from gpu_runners.weights.store import Weights
from tests.contract.conftest import EMBEDDING_BASE, MODEL_ENGINES
from tests.contract.engine_child import EngineChild, engine_child

TEXTS = ["Hello world", "a much longer text than that one, of more tokens", "x"]


@pytest.fixture(scope="module", params=MODEL_ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["cls", "last"])
def pooling_and_child(
    request: pytest.FixtureRequest,
    engine: str,
    weights_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, EngineChild]]:
    work_dir = tmp_path_factory.mktemp("engine")
    with engine_child(
        engine, EMBEDDING_BASE, weights_root, work_dir, pooling=request.param
    ) as child:
        yield request.param, child


def test_the_catalogs_pooling_is_the_engines(
    pooling_and_child: tuple[str, EngineChild], weights_root: Path
) -> None:
    pooling, child = pooling_and_child
    directory = Weights(weights_root).path(EMBEDDING_BASE)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(directory),
        AutoModel.from_pretrained(directory),
    )
    vectors = child.answer((None, {"input": TEXTS}))[0]["vectors"]
    for text, packed in zip(TEXTS, vectors, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([tokenizer(text).input_ids])
            hidden = model(input_ids=ids).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(hidden[0 if pooling == "cls" else -1], dim=0)
        assert float(torch.tensor(unpack_vector(packed)) @ wanted) == pytest.approx(1, abs=1e-3)
