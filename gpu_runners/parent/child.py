"""The runner's end of the pipes to one child process: messages of JSON in both directions.

The runner's tasks use it for engines and trainings. A child that is gone is an exception for the
one who talks to it, and never more than that. The child leads a session of its own, so that a
Ctrl-C in a terminal reaches the runner alone, which then stops its children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any, cast

from gpu_runners.child_pipes import LINE_BYTES_MAX, MESSAGE_BYTES_MAX, PIECE

STOP_GRACE_SECONDS = 2.0


class ChildGone(Exception):
    """The child ended, or was ended because it said nothing for too long.

    `killed` tells that it ended by SIGKILL from outside, as when memory runs out.
    """

    def __init__(self, *, killed: bool) -> None:
        super().__init__("the child process is gone")
        self.killed = killed


class Child:
    """A running child process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str]) -> Child:
        """Raises OSError when the program cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES_MAX + 1, start_new_session=True
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send(self, message: dict[str, Any]) -> None:
        """Raises ChildGone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise await self._gone() from None

    async def receive(self, *, silence_seconds_max: float) -> dict[str, Any]:
        """The child's next message. Raises ChildGone; a child that is silent for longer than that
        is killed."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(silence_seconds_max):
                text = await self._message(self._process.stdout)
            if text is not None:
                return cast(dict[str, Any], json.loads(text))
        except (TimeoutError, ValueError):
            await self.stop(grace_seconds=0)
            raise ChildGone(killed=False) from None
        raise await self._gone()

    async def stop(self, *, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """Closes its input, which ends a well-behaved child, and kills it when time is up."""
        if self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._process.wait()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _message(self, out: asyncio.StreamReader) -> bytes | None:
        """The text of one message, from one line or from its pieces; None where the child's output
        ends. Raises ValueError past the bounds."""
        pieces = bytearray()
        while (line := await out.readline()).startswith(PIECE.encode()):
            pieces += line[len(PIECE) : -1]
            if len(pieces) > MESSAGE_BYTES_MAX:
                raise ValueError("the message has no end")
        return bytes(pieces) + line if line.endswith(b"\n") else None

    async def _gone(self) -> ChildGone:
        try:
            async with asyncio.timeout(STOP_GRACE_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            await self.stop(grace_seconds=0)
            return ChildGone(killed=False)
        return ChildGone(killed=code == -signal.SIGKILL)
