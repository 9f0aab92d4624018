"""Ties a child process to the life of its parent, so that no kill leaves work running.

Called first thing by the processes that a runner starts. It must never be called in a process that
is meant to outlive the one that started it.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that started it ends. Elsewhere does nothing:
    there the end of standard input, which every child watches, has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
