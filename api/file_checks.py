"""Reads customers' files for what is wrong in them, so that it costs nobody else anything.

Uploads and the create of jobs use it. Looking at 64 MiB of rows is seconds of work for the
interpreter: it is done in one thread of its own, a piece at a time, and accounts take turns. What
was found in a file is remembered, refusals too, since a file never changes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from domain.errors import InvalidFile, RateLimited
from domain.inputs.training_file import FileRole
from domain.limits import FILES_READ_AT_ONCE

P = ParamSpec("P")
T = TypeVar("T")

VERDICTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Asked:
    """What a verdict depends on. The role is named in the refusal."""

    sha256: str
    base: str
    role: FileRole


class Turns:
    """One at a time for each account."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, account_id: str) -> asyncio.Lock:
        """To be held; it is forgotten once nobody holds it or waits for it."""
        return self._locks.setdefault(account_id, asyncio.Lock())


class FileChecks:
    """Of one running API; used on its event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gridline-checks")
        self._turns = Turns()
        self._verdicts: OrderedDict[Asked, InvalidFile | None] = OrderedDict()
        self._reading: dict[Asked, asyncio.Task[InvalidFile | None]] = {}
        self._readings_of: Counter[str] = Counter()

    async def in_turn(
        self, account_id: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs one piece of work in the thread, after those of other accounts that wait."""
        async with self._turns.of(account_id):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def must_pass(
        self, account_id: str, asked: Asked, read: Callable[[], Awaitable[None]]
    ) -> None:
        """Runs `read`, which raises InvalidFile for what it finds, unless that is known or being
        found out. Raises it, RateLimited for one reading of the account too many, and what else
        `read` raises."""
        if asked in self._verdicts:
            self._verdicts.move_to_end(asked)
            verdict = self._verdicts[asked]
        else:
            reading = self._reading.get(asked) or self._begin(account_id, asked, read)
            verdict = await asyncio.shield(reading)
        if verdict is not None:
            raise verdict.again()

    def close(self) -> None:
        """Waits for the piece that is being looked at."""
        self._thread.shutdown(cancel_futures=True)

    def _begin(
        self, account_id: str, asked: Asked, read: Callable[[], Awaitable[None]]
    ) -> asyncio.Task[InvalidFile | None]:
        if self._readings_of[account_id] >= FILES_READ_AT_ONCE:
            raise RateLimited(
                f"{FILES_READ_AT_ONCE} of your account's files are being read for creates just "
                "now. Send the request again in a moment.",
                retry_after_seconds=1,
            )
        self._readings_of[account_id] += 1
        reading = asyncio.ensure_future(self._find_out(account_id, asked, read))
        self._reading[asked] = reading
        return reading

    async def _find_out(
        self, account_id: str, asked: Asked, read: Callable[[], Awaitable[None]]
    ) -> InvalidFile | None:
        verdict = None
        try:
            await read()
        except InvalidFile as found:
            verdict = found
        finally:
            del self._reading[asked]
            self._readings_of[account_id] -= 1
            self._readings_of += Counter()  # keeps what is above zero
        self._verdicts[asked] = verdict
        if len(self._verdicts) > VERDICTS_MAX:
            self._verdicts.popitem(last=False)
        return verdict
