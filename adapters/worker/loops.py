"""Keeps the loops of a worker going, and tells how each of them is.

Each part of the worker is a loop that is started again, with a word in the log, whatever ends it:
an error, a return, or a cancellation that nobody asked for, as some clients raise while they close.
Only who cancels the task of `keep` ends it. Nothing here knows what a loop does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog

from adapters.worker import measures

log = structlog.stdlib.get_logger(__name__)

RESTART_SECONDS_MIN = 0.1
RESTART_SECONDS_MAX = 5.0
STEADY_SECONDS = 30.0
"""A loop that ran this long has its earlier failures forgiven."""
SILENCE_SECONDS_MAX = 30.0
"""A loop that finished no round for this long is not well: it hangs, or fails at once each time."""

Beat = Callable[[], None]
"""Called by a loop at the end of each round."""
Loop = Callable[[Beat], Awaitable[None]]


@dataclass(slots=True)
class LoopState:
    """How one loop is. `error` is the kind of its last failure, "" before any."""

    name: str
    beat_at_seconds: float
    rounds: int = 0
    restarts: int = 0
    error: str = ""

    def beat(self) -> None:
        """A round is finished."""
        self.beat_at_seconds = time.monotonic()
        self.rounds += 1
        measures.LOOP_ROUNDS.labels(self.name).inc()

    @property
    def silent_seconds(self) -> float:
        """Since its last round, or since it was first started."""
        return time.monotonic() - self.beat_at_seconds

    @property
    def is_well(self) -> bool:
        """Whether it goes round."""
        return self.silent_seconds <= SILENCE_SECONDS_MAX


class Loops:
    """The loops of one process that are to run now."""

    def __init__(self) -> None:
        self._states: dict[str, LoopState] = {}

    @property
    def states(self) -> Mapping[str, LoopState]:
        """By the loop's name."""
        return dict(self._states)

    async def keep(self, name: str, loop: Loop) -> None:
        """Starts the loop again whenever it ends, until this is cancelled; the waits between grow
        while it keeps failing."""
        state = self._states[name] = LoopState(name, beat_at_seconds=time.monotonic())
        wait = RESTART_SECONDS_MIN
        try:
            while True:
                began = time.monotonic()
                error = await _end_of(loop, state.beat)
                state.restarts += 1
                measures.LOOP_ENDS.labels(name).inc()
                state.error = _kind(error)
                log.warning(
                    "loop ended; it starts again", loop=name, error=state.error, exc_info=error
                )
                if time.monotonic() - began > STEADY_SECONDS:
                    wait = RESTART_SECONDS_MIN
                await asyncio.sleep(wait)
                wait = min(RESTART_SECONDS_MAX, wait * 2)
        finally:
            del self._states[name]


async def _end_of(loop: Loop, beat: Beat) -> BaseException | None:
    """What ended the loop. Raises CancelledError only where our own task was cancelled."""
    task = asyncio.current_task()
    assert task is not None
    try:
        await loop(beat)
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        return error
    except Exception as error:  # noqa: BLE001 - the loop outlives whatever happens
        return error
    return None


def _kind(error: BaseException | None) -> str:
    if error is None:
        return "return"
    if isinstance(error, BaseExceptionGroup):
        return " and ".join(sorted({_kind(each) for each in error.exceptions}))
    return type(error).__name__
