"""A loop of the worker goes on whatever ends it, and tells how it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from adapters.worker import loops
from adapters.worker.loops import Beat, Loops

WAIT_SECONDS_MAX = 5.0


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while not condition():  # noqa: ASYNC110 - a loop tells nobody that it was started again
            await asyncio.sleep(0.01)


async def cancelled_by_itself() -> None:
    """As aiokafka ends where a task of its own was cancelled while it stopped."""
    inner = asyncio.ensure_future(asyncio.sleep(60))
    inner.cancel()
    await inner


async def raises() -> None:
    raise ConnectionError("away")


async def returns() -> None:
    pass


async def fails_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(raises())


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (cancelled_by_itself, "CancelledError"),
        (raises, "ConnectionError"),
        (returns, "return"),
        (fails_in_a_group, "ConnectionError"),
    ],
)
async def test_any_end_that_nobody_asked_for_starts_the_loop_again(
    end: Callable[[], Awaitable[None]], kind: str
) -> None:
    kept = Loops()

    async def loop(beat: Beat) -> None:
        if kept.states["part"].restarts < 2:
            await end()
            return
        beat()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(kept.keep("part", loop))
        await reached(lambda: bool(kept.states) and kept.states["part"].rounds == 1)
        assert (kept.states["part"].restarts, kept.states["part"].error) == (2, kind)
        keeping.cancel()
    assert keeping.cancelled()


async def test_who_is_asked_to_end_ends_and_is_known_no_more() -> None:
    kept = Loops()

    async def loop(beat: Beat) -> None:
        await asyncio.Event().wait()

    keeping = asyncio.ensure_future(kept.keep("part", loop))
    await reached(lambda: "part" in kept.states)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert kept.states == {}


async def test_a_loop_that_goes_round_no_more_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "SILENCE_SECONDS_MAX", 0.05)
    kept = Loops()
    hang = asyncio.Event()

    async def loop(beat: Beat) -> None:
        while not hang.is_set():
            beat()
            await asyncio.sleep(0.001)
        await asyncio.Event().wait()

    keeping = asyncio.ensure_future(kept.keep("part", loop))
    await reached(lambda: "part" in kept.states and kept.states["part"].rounds > 3)
    assert kept.states["part"].is_well
    hang.set()
    await reached(lambda: not kept.states["part"].is_well)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
