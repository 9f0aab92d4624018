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
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from gpu_runners.child_pipes import LINE_BYTES_MAX

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
        self._payload_left = 0

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

    async def send(self, message: dict[str, Any], *, body: bytes | None = None) -> None:
        """`body` is JSON that becomes the message's field of that name, unread. Raises
        ChildGone."""
        assert self._process.stdin is not None
        text = json.dumps(message).encode()
        parts = [text] if body is None else [text[:-1], b',"body":', body, b"}"]
        try:
            self._process.stdin.writelines([*parts, b"\n"])
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            raise await self._gone() from None

    async def receive(self, *, silence_seconds_max: float) -> dict[str, Any]:
        """The child's next message. What was left of the payload of the last one is passed over.
        Raises ChildGone; a child that is silent for longer than that is killed."""
        async for _ in self.payload(silence_seconds_max=silence_seconds_max):
            pass
        line = await self._read(None, silence_seconds_max)
        if not line.endswith(b"\n"):
            raise await self._gone()
        try:
            message = cast(dict[str, Any], json.loads(line))
        except ValueError:
            raise await self._unusable() from None
        self._payload_left = message.get("payload_bytes", 0)
        return message

    async def payload(self, *, silence_seconds_max: float) -> AsyncIterator[bytes]:
        """What follows the last message, in pieces. Raises as `receive`."""
        while self._payload_left:
            most = min(self._payload_left, LINE_BYTES_MAX)
            piece = await self._read(most, silence_seconds_max)
            if not piece:
                raise await self._gone()
            self._payload_left -= len(piece)
            yield piece

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

    async def _read(self, bytes_max: int | None, silence_seconds_max: float) -> bytes:
        """So many bytes at most, or a line."""
        out = self._process.stdout
        assert out is not None
        try:
            async with asyncio.timeout(silence_seconds_max):
                return await (out.readline() if bytes_max is None else out.read(bytes_max))
        except (TimeoutError, ValueError):  # silence, or a line without end
            raise await self._unusable() from None

    async def _unusable(self) -> ChildGone:
        await self.stop(grace_seconds=0)
        return ChildGone(killed=False)

    async def _gone(self) -> ChildGone:
        try:
            async with asyncio.timeout(STOP_GRACE_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            await self.stop(grace_seconds=0)
            return ChildGone(killed=False)
        return ChildGone(killed=code == -signal.SIGKILL)
