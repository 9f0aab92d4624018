"""A runner's private directory for the files of its work, removed whatever ends the runner.

`runner.py` makes one for its life. A killed runner cannot clean up after itself, and what it leaves
are customers' rows: so each one removes what dead ones left. It must never touch the directory of a
runner that lives, which holds the lock in it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "gridline-runner-"
LOCK = "lock"


class WorkDirectory:
    """Exists, and is locked, until `remove` or the end of the process. `root` is where runners of
    this machine have their directories."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or Path(tempfile.gettempdir())
        _remove_left_ones(root)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        # Locked before it has the name by which others find it.
        unnamed = self.path / f"{LOCK}.new"
        self._lock = unnamed.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)

    def remove(self) -> None:
        """With all that is in it; again does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_left_ones(root: Path) -> None:
    for path in root.glob(f"{PREFIX}*"):
        if _is_our_directory(path) and _is_unlocked(path / LOCK):
            shutil.rmtree(path, ignore_errors=True)


def _is_our_directory(path: Path) -> bool:
    """Others may write where temporary files are."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_unlocked(lock: Path) -> bool:
    try:
        with lock.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
