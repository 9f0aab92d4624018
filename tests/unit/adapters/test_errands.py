"""Longer work of several accounts: who is next, and what a stop leaves."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from adapters.worker.errands import LARGE_BYTES, Errands
from projections.work.open_work import DueBatch

WAIT_SECONDS_MAX = 5.0


class Work:
    """What `act` was called for, and the end of each when the test says so."""

    def __init__(self, *, at_once: int = 4, large_at_once: int = 2, grace: float = 0.0) -> None:
        self.began: list[str] = []
        self.finished: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.errands = Errands(
            "test", self._act, at_once=at_once, large_at_once=large_at_once, grace=lambda: grace
        )

    async def _act(self, subject: str) -> None:
        self.began.append(subject)
        self.ends[subject] = asyncio.Event()
        await self.ends[subject].wait()
        self.finished.append(subject)

    async def send(self, *due: DueBatch) -> None:
        self.errands.send(due)
        await asyncio.sleep(0)

    async def end(self, subject: str) -> None:
        self.ends[subject].set()
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while subject not in self.finished:  # noqa: ASYNC110 - the next step of the loop
                await asyncio.sleep(0)


def small(subject: str, account: str) -> DueBatch:
    return DueBatch(subject, account, 1_000)


def large(subject: str, account: str) -> DueBatch:
    return DueBatch(subject, account, LARGE_BYTES + 1)


async def test_four_large_files_of_one_account_delay_nobodys_single_line() -> None:
    work = Work()
    files = [large(f"big{n}", "a") for n in range(4)]
    async with work.errands:
        await work.send(*files)
        assert work.began == ["big0", "big1"]
        await work.send(*files, small("line", "b"))
        assert work.began == ["big0", "big1", "line"]


async def test_large_files_of_several_accounts_take_turns() -> None:
    work = Work(large_at_once=1)
    due = [large(f"{account}{n}", account) for account in "ab" for n in range(2)]
    async with work.errands:
        order = []
        while due:
            await work.send(*due)
            order.append(work.began[-1])
            await work.end(order[-1])
            due = [batch for batch in due if batch.work_id != order[-1]]
    assert order == ["a0", "b0", "a1", "b1"]


@given(st.permutations("abcde"), st.integers(1, 3))
def test_each_account_gets_its_turn_within_a_round_of_all(
    accounts: list[str], at_once: int
) -> None:
    async def run() -> list[str]:
        work = Work(at_once=at_once)
        async with work.errands:
            for number in range(20):
                await work.send(*(small(f"{account}{number}", account) for account in accounts))
                while len(work.finished) < len(work.began):
                    await work.end(work.began[len(work.finished)])
        return [subject[0] for subject in work.began]

    served = asyncio.run(run())
    for start in range(len(served) - len(accounts) + 1):
        assert Counter(served[start : start + len(accounts)]) == Counter(accounts)


async def test_what_runs_at_a_stop_finishes_within_the_grace() -> None:
    work = Work(grace=WAIT_SECONDS_MAX)
    async with work.errands:
        await work.send(small("one", "a"))
        asyncio.get_running_loop().call_soon(work.ends["one"].set)
    assert work.finished == ["one"]


async def test_what_does_not_finish_within_the_grace_is_ended() -> None:
    work = Work(grace=0.05)
    async with work.errands:
        await work.send(small("one", "a"))
    assert work.finished == []
