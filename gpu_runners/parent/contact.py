"""Whether the runner's two ways to the broker still work: its heartbeats and its work messages.

`runner.py` tells what works and looks at it regularly. A broker that is away comes back, and costs
nobody work meanwhile. A way that is dead for a lease while the broker answers others does not come
back by itself, and by then the worker has given this runner's work to another: so the process has
to end, and is started anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

BrokerAnswers = Callable[[], Awaitable[bool]]
"""Asks over connections of its own."""
ANSWER_SECONDS_MAX = 10.0


class RunnerBroken(Exception):
    """This runner cannot go on and must be started anew; the message says what broke."""


class Contact:
    """One way to the broker, by its name for the log. Time counts only while it is looked at: a
    process that was frozen has missed nothing that it could have done."""

    def __init__(self, name: str, *, lease_seconds: float, broker_answers: BrokerAnswers) -> None:
        self._name = name
        self._lease_seconds = lease_seconds
        self._broker_answers = broker_answers
        self._worked_at = self._looked_at = time.monotonic()

    def worked(self) -> None:
        """The broker took or gave what it was asked."""
        self._worked_at = time.monotonic()

    async def look(self) -> None:
        """Raises RunnerBroken when it has not worked for a lease and that is not the broker's
        fault."""
        now = time.monotonic()
        if now - self._looked_at > self._lease_seconds / 2:
            self._worked_at = now
        dead = now - self._worked_at > self._lease_seconds
        if dead and await self._others_are_answered():
            raise RunnerBroken(f"{self._name} are dead while the broker answers")
        self._looked_at = time.monotonic()

    async def _others_are_answered(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                return await self._broker_answers()
        except TimeoutError:
            return False
