"""One supervised program: started so that it cannot outlive its parent, its output in a log file.

The embedded PostgreSQL, the embedded broker and the supervisor start everything through here. Must
be called from the main thread only: the kernel sends the death signal when the *thread* that
started a program ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adapters.process.settings import Unusable

LAUNCH = Path(__file__).with_name("launch.py")

LOG_BYTES_MAX = 10_000_000
"""A log beyond this is moved to `<name>.log.1` at the next start of its program."""

BARE_ENVIRONMENT: Mapping[str, str] = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
"""For programs that are not ours: nothing of the caller's environment configures them."""


class CannotStart(Unusable):
    """A program did not start; the message says which, why and where its log is."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running program and the process group that it leads."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self, *, within_seconds: float) -> bool:
        """Waits at most this long for the program to end."""
        try:
            self.process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, *signals: signal.Signals, patience_seconds: float) -> None:
        """Sends the signals one after another, each with its share of patience, then kills the
        whole group, so that nothing of it is left."""
        for number in signals:
            if self.process.poll() is not None:
                break
            self.process.send_signal(number)
            if self.ended(within_seconds=patience_seconds):
                break
        self.kill_group()

    def kill_group(self) -> None:
        """Ends whatever the program left behind, and the program itself."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def log_tail(self, *, bytes_max: int = 2000) -> str:
        """The end of the log, for an error message."""
        text = self.log.read_bytes()[-bytes_max:] if self.log.exists() else b""
        return text.decode(errors="replace").strip()


def launch(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] = BARE_ENVIRONMENT,
    death_signal: signal.Signals = signal.SIGKILL,
    identity: Sequence[str] = (),
    inherited: Sequence[int] = (),
) -> Child:
    """Starts a program in a session of its own (a terminal's Ctrl-C reaches only the supervisor).

    `death_signal` is what it gets when this process dies; `identity` are the options of
    `launch.py` that give up root; `inherited` are files that stay open in it under their numbers.
    Raises OSError.
    """
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
        log.replace(log.with_name(f"{log.name}.1"))
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603
            launcher_command(command, death_signal=death_signal, identity=identity),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=inherited,
            start_new_session=True,
        )
    return Child(name=name, process=process, log=log)


def launcher_command(
    command: Sequence[str],
    *,
    death_signal: signal.Signals = signal.SIGKILL,
    identity: Sequence[str] = (),
) -> list[str]:
    """The command line that runs `command` so that it dies with this process."""
    launcher = [sys.executable, "-I", "-S", str(LAUNCH), f"--parent={os.getpid()}"]
    return [*launcher, f"--death-signal={int(death_signal)}", *identity, "--", *command]


def ask_to_end(children: Sequence[Child], *, patience_seconds: float) -> None:
    """Asks all of them to end and gives them this long between them."""
    deadline = time.monotonic() + patience_seconds
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
    for child in children:
        child.ended(within_seconds=max(0.0, deadline - time.monotonic()))


def free_port() -> int:
    """A TCP port of the loopback interface that is free just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
