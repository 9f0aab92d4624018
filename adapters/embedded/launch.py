"""The last step before a supervised program: ties its life to its parent's, gives up root, execs.

`process.py` runs this file as a script (`python -I -S launch.py … -- program arguments`), with any
interpreter; it needs the standard library only and must never outlive its exec. It exists because
the kernel forgets the death signal whenever credentials change, so the order matters: credentials
first, death signal second, exec last.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
CLONE_NEWUSER = 0x10000000

CANNOT_LAUNCH = 125
"""Exit status when the program was never reached."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--death-signal", type=int, required=True)
    parser.add_argument("--user-namespace", default="")
    parser.add_argument("--user", default="")
    split = sys.argv.index("--")
    arguments, program = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    try:
        if arguments.user_namespace:
            _enter_user_namespace(*_ids(arguments.user_namespace))
        if arguments.user:
            _become(*_ids(arguments.user))
        _die_with(arguments.parent, arguments.death_signal)
        os.execv(program[0], program)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot launch {program[0]}: {error}\n")
        raise SystemExit(CANNOT_LAUNCH) from error


def _ids(text: str) -> tuple[int, int]:
    uid, gid = text.split(":")
    return int(uid), int(gid)


def _libc_call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _enter_user_namespace(uid: int, gid: int) -> None:
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    _libc_call("unshare", CLONE_NEWUSER)
    # A process may map only its own ids, and its group only once it can no longer change groups.
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{uid} {outer_uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{gid} {outer_gid} 1", encoding="ascii")


def _become(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def _die_with(parent: int, death_signal: int) -> None:
    _libc_call("prctl", PR_SET_PDEATHSIG, death_signal)
    # The parent may have died before the kernel was told.
    if os.getppid() != parent:
        raise SystemExit(CANNOT_LAUNCH)


if __name__ == "__main__":
    main()
