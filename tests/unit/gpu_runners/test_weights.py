"""Weights are unpacked once, whole or not at all, and what changed since is never loaded."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from domain.catalog import CATALOG
from domain.errors import NotFound
from gpu_runners.weights.store import Weights, WeightsUnavailable

EMBEDDER = "all-minilm-l6-v2"
NOT_HERE = "qwen2.5-0.5b-instruct"


def laid_down(root: Path, base: str) -> Path:
    directory = root / base
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_packaged_and_laid_down_bases_are_available_and_others_are_not(tmp_path: Path) -> None:
    assert Weights(tmp_path / "none").available() == ("smollm2-135m-instruct", EMBEDDER)
    laid_down(tmp_path, NOT_HERE)
    laid_down(tmp_path, "not-in-the-catalog")
    assert set(Weights(tmp_path).available()) == {"smollm2-135m-instruct", EMBEDDER, NOT_HERE}


def test_a_packaged_model_is_unpacked_once_by_several_at_a_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: Weights(tmp_path).path(EMBEDDER), range(4)))
    (directory,) = found
    assert (directory / "config.json").is_file()
    assert [d.name for d in directory.parent.iterdir()] == [directory.name]


def test_what_a_killed_unpacking_left_is_removed(tmp_path: Path) -> None:
    directory = Weights(tmp_path).path(EMBEDDER)
    leftover = directory.parent / f".{directory.name}.killed"
    directory.rename(leftover)
    assert Weights(tmp_path).path(EMBEDDER) == directory
    assert not leftover.exists()


@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_files_that_changed_since_their_first_use_are_refused_by_name(
    tmp_path: Path, damage: str
) -> None:
    directory = laid_down(tmp_path, NOT_HERE)
    assert Weights(tmp_path).path(NOT_HERE) == directory
    if damage == "changed":
        (directory / "model.safetensors").write_bytes(b"WEIGHTS")
    elif damage == "missing":
        (directory / "model.safetensors").unlink()
    else:
        (directory / "more.safetensors").write_bytes(b"more")
    with pytest.raises(WeightsUnavailable, match="safetensors"):
        Weights(tmp_path).path(NOT_HERE)


def test_a_file_that_was_only_touched_is_checked_again_and_taken(tmp_path: Path) -> None:
    directory = laid_down(tmp_path, NOT_HERE)
    Weights(tmp_path).path(NOT_HERE)
    (directory / "model.safetensors").write_bytes(b"weights")
    assert Weights(tmp_path).path(NOT_HERE) == directory


def test_missing_weights_are_an_error_that_says_what_to_lay_down(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable, match=f"directory {NOT_HERE}"):
        Weights(tmp_path).path(NOT_HERE)
    with pytest.raises(NotFound):
        Weights(tmp_path).path("no-such-model")


def test_the_revision_is_the_catalogs_and_else_the_files_own(tmp_path: Path) -> None:
    assert Weights(tmp_path).revision(NOT_HERE) == CATALOG[NOT_HERE].revision
    laid_down(tmp_path, "bge-m3")
    revision = Weights(tmp_path).revision("bge-m3")
    assert len(revision) == 64
    assert Weights(tmp_path).revision("bge-m3") == revision


def test_the_store_can_be_asked_without_loading_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from gpu_runners.weights.store import Weights; "
        "Weights(Path('/nonexistent')).available(); "
        "sys.exit(bool({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
