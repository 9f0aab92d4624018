"""What Hugging Face's own tools noted of a directory that they downloaded: which commit each file
is of, and its digest there.

`store.py` compares it with the files. Both forms are known: the cache's `snapshots/<commit>`, whose
files are links into `blobs/<digest>`, and a plain directory (`hf download --local-dir`), which has
notes in `.cache/huggingface`. It must never trust a note without the file's own digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NOTES = Path(".cache", "huggingface", "download")
SHA256_CHARACTERS = 64
"""The digest of a large file; that of a small one is git's, of 40."""


@dataclass(frozen=True, slots=True)
class FileNote:
    """Of one file."""

    commit: str
    digest: str


def commit_of(directory: Path, digests: Mapping[str, str]) -> str | None:
    """The one commit that all files are of, byte for byte; None if one has no note, is of another
    commit or has other content. `digests` has the SHA-256 of each file by its name."""
    commits = set()
    for name, sha256 in digests.items():
        note = _note(directory, name)
        if note is None or not _has_digest(directory / name, note.digest, sha256=sha256):
            return None
        commits.add(note.commit)
    return commits.pop() if len(commits) == 1 else None


def is_note(name: str) -> bool:
    """Whether a file of the directory is about it rather than of it."""
    return name.startswith(".cache/")


def _note(directory: Path, name: str) -> FileNote | None:
    """The cache names commit and digest in its paths; the other form writes them down."""
    resolved = directory.resolve()
    file = resolved / name
    if resolved.parent.name == "snapshots" and file.is_symlink():
        return FileNote(commit=resolved.name, digest=file.readlink().name)
    try:
        commit, digest, *_ = (resolved / NOTES / f"{name}.metadata").read_text().splitlines()
    except (OSError, ValueError):
        return None
    return FileNote(commit=commit, digest=digest)


def _has_digest(file: Path, digest: str, *, sha256: str) -> bool:
    if len(digest) == SHA256_CHARACTERS:
        return digest == sha256
    content = file.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
    blob.update(content)
    return digest == blob.hexdigest()
