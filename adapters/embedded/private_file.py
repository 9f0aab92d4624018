"""Files that hold secrets, or that others read while they are replaced.

The embedded parts and the supervisor write their passwords, the first API key and the ready file
with it.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read; it appears whole or not at all."""
    unfinished = path.with_name(f"{path.name}.new")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as output:
        output.write(text)
        output.flush()
        os.fsync(output.fileno())
    unfinished.replace(path)
