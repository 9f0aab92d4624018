"""Weights are unpacked once, whole or not at all, and what changed since is never loaded."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

from adapters.process.telemetry import speak_through_logging
from domain.catalog import CATALOG
from domain.errors import NotFound
from gpu_runners.weights.store import FoundWeights, Weights, WeightsUnavailable
from tests.unit.gpu_runners.tiny_model import note_as_snapshot

SMALL = "smollm2-135m-instruct"
EMBEDDER = "all-minilm-l6-v2"
PINNED = "qwen2.5-0.5b-instruct"
NOT_PINNED = "bge-m3"
COMMIT = CATALOG[PINNED].revision


def laid_down(root: Path, base: str) -> Path:
    directory = root / base
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_packaged_and_laid_down_bases_are_available_and_others_are_not(tmp_path: Path) -> None:
    assert Weights(tmp_path / "none").available() == (SMALL, EMBEDDER)
    laid_down(tmp_path, NOT_PINNED)
    laid_down(tmp_path, "not-in-the-catalog")
    assert set(Weights(tmp_path).available()) == {SMALL, EMBEDDER, NOT_PINNED}


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
    directory = laid_down(tmp_path, NOT_PINNED)
    assert Weights(tmp_path).path(NOT_PINNED) == directory
    if damage == "changed":
        (directory / "model.safetensors").write_bytes(b"WEIGHTS")
    elif damage == "missing":
        (directory / "model.safetensors").unlink()
    else:
        (directory / "more.safetensors").write_bytes(b"more")
    with pytest.raises(WeightsUnavailable, match="safetensors"):
        Weights(tmp_path).path(NOT_PINNED)


def test_a_file_that_was_only_touched_is_checked_again_and_taken(tmp_path: Path) -> None:
    directory = laid_down(tmp_path, NOT_PINNED)
    Weights(tmp_path).path(NOT_PINNED)
    (directory / "model.safetensors").write_bytes(b"weights")
    assert Weights(tmp_path).path(NOT_PINNED) == directory


def test_missing_weights_are_an_error_that_says_what_to_lay_down(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable, match=f"directory {NOT_PINNED}"):
        Weights(tmp_path).path(NOT_PINNED)
    with pytest.raises(NotFound):
        Weights(tmp_path).path("no-such-model")


def test_a_snapshot_of_the_pinned_commit_is_found_as_that_commit(tmp_path: Path) -> None:
    directory = note_as_snapshot(laid_down(tmp_path, PINNED), COMMIT)
    assert Weights(tmp_path).find(PINNED) == FoundWeights(directory, COMMIT)
    assert PINNED in Weights(tmp_path).usable()


def test_a_link_into_hugging_faces_cache_is_found_as_the_commit_it_leads_to(tmp_path: Path) -> None:
    files = laid_down(tmp_path / "files", PINNED)
    repository = tmp_path / "cache" / "models--Qwen--Qwen2.5-0.5B-Instruct"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in files.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(repository / "blobs" / digest)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", digest))
    root = tmp_path / "weights"
    root.mkdir()
    (root / PINNED).symlink_to(snapshot)
    assert Weights(root).find(PINNED).revision == COMMIT


def _as_they_were(_: Path) -> None:
    """No notes at all."""


def _of_another_commit(directory: Path) -> None:
    note_as_snapshot(directory, "f" * 40)


def _with_another_file(directory: Path) -> None:
    note_as_snapshot(directory, COMMIT)
    (directory / "tokenizer.json").write_text("{}")


def _with_large_content_changed(directory: Path) -> None:
    note_as_snapshot(directory, COMMIT)
    (directory / "model.safetensors").write_bytes(b"WEIGHTS")


def _with_small_content_changed(directory: Path) -> None:
    note_as_snapshot(directory, COMMIT)
    (directory / "config.json").write_text("[]")


@pytest.mark.parametrize(
    "make",
    [
        _as_they_were,
        _of_another_commit,
        _with_another_file,
        _with_large_content_changed,
        _with_small_content_changed,
    ],
    ids=lambda make: make.__name__.strip("_").replace("_", " "),
)
def test_what_is_not_the_pinned_commit_is_not_served_and_the_log_says_how_to_get_it(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    speak_through_logging()
    make(laid_down(tmp_path, PINNED))
    with pytest.raises(WeightsUnavailable, match=f"hf download .* --revision {COMMIT}"):
        Weights(tmp_path).find(PINNED)
    assert PINNED not in Weights(tmp_path).usable()
    assert f"--revision {COMMIT}" in caplog.text


def test_a_base_that_no_page_pins_is_recorded_by_its_commit_or_its_bytes(tmp_path: Path) -> None:
    directory = laid_down(tmp_path, NOT_PINNED)
    by_bytes = Weights(tmp_path).find(NOT_PINNED).revision
    assert len(by_bytes) == 64
    note_as_snapshot(directory, COMMIT)
    assert Weights(tmp_path).find(NOT_PINNED).revision == COMMIT


def test_packaged_weights_are_recorded_by_the_packages_version(weights_root: Path) -> None:
    found = {base: Weights(weights_root).find(base).revision for base in (SMALL, EMBEDDER)}
    assert found == {base: version(CATALOG[base].weights_package or "") for base in found}
    assert found == {base: CATALOG[base].revision for base in found}
    assert Weights(weights_root).usable() == (SMALL, EMBEDDER)


def test_unpacked_files_without_a_record_of_their_unpacking_are_unpacked_anew(
    tmp_path: Path,
) -> None:
    directory = Weights(tmp_path).path(EMBEDDER)
    shutil.rmtree(tmp_path / ".digests")
    (directory / "model.safetensors").write_bytes(b"other weights")
    assert Weights(tmp_path).path(EMBEDDER) == directory
    assert (directory / "model.safetensors").stat().st_size > 1_000_000


def test_the_store_can_be_asked_without_loading_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from gpu_runners.weights.store import Weights; "
        "Weights(Path('/nonexistent')).available(); "
        "sys.exit(bool({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
