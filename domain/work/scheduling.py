"""Who gets the next free slot: a pure function of what waits and what runners say.

The scheduler calls it at each tick. Accounts take turns by what they already run, so that a large
batch never shuts others out; within an account the 24h window goes before 72h and the earlier
deadline first; among the runners that can serve a piece, one whose engine has its base loaded goes
first. It decides late: only as much as there are free slots.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from domain.stored import Attempt


@dataclass(frozen=True, slots=True)
class StartableWork:
    """A validated batch or a created job that waits for credit or its account's slot; it is worth
    another try when the account changed, which `account_position` in the log tells."""

    work_id: str
    account_id: str
    account_position: int


@dataclass(frozen=True, slots=True)
class WaitingWork:
    """A chunk or training that any runner with its base may run. `flexible` is the 72h window."""

    work_id: str
    chunk: int
    kind: str
    account_id: str
    base: str
    deadline: datetime
    flexible: bool = False


@dataclass(frozen=True, slots=True)
class AssignedWork:
    """An attempt that the log holds as current. `stopping`: its batch is cancelled or its window
    over, so that only what is finished still counts."""

    attempt: Attempt
    kind: str
    account_id: str
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class RunnerOffer:
    """What a runner can take: its free slots by kind, once all that is assigned to it is counted,
    running or not yet named by a heartbeat."""

    runner_id: str
    bases: frozenset[str]
    warm_base: str | None
    free_slots: Mapping[str, int]


@dataclass(slots=True)
class _Runner:
    offer: RunnerOffer
    free: dict[str, int]

    def can_take(self, work: WaitingWork) -> bool:
        return self.free.get(work.kind, 0) > 0 and work.base in self.offer.bases


def choose(
    waiting: Iterable[WaitingWork],
    runners: Sequence[RunnerOffer],
    *,
    running_by_account: Mapping[str, int],
) -> list[tuple[WaitingWork, str]]:
    """Pairs of a piece of work and the runner that gets it, in the order of the decisions.

    `running_by_account` counts the attempts that each account has assigned now.
    """
    free = [_Runner(offer, dict(offer.free_slots)) for offer in runners]
    queues = _queues(waiting)
    turns = [(running_by_account.get(account, 0), account) for account in queues]
    heapq.heapify(turns)
    chosen: list[tuple[WaitingWork, str]] = []
    while turns and any(count > 0 for runner in free for count in runner.free.values()):
        share, account = heapq.heappop(turns)
        placed = _place_next(queues[account], free)
        if placed is not None:
            chosen.append(placed)
            heapq.heappush(turns, (share + 1, account))
    return chosen


def _queues(waiting: Iterable[WaitingWork]) -> dict[str, deque[WaitingWork]]:
    ordered = sorted(waiting, key=lambda w: (w.flexible, w.deadline, w.work_id, w.chunk))
    queues: dict[str, deque[WaitingWork]] = {}
    for work in ordered:
        queues.setdefault(work.account_id, deque()).append(work)
    return queues


def _place_next(queue: deque[WaitingWork], free: list[_Runner]) -> tuple[WaitingWork, str] | None:
    """Takes the account's first piece that a runner can take; what none can is dropped, since slots
    only get fewer."""
    while queue:
        work = queue.popleft()
        able = [runner for runner in free if runner.can_take(work)]
        if able:
            best = min(able, key=lambda runner: _preference(runner, work))
            best.free[work.kind] -= 1
            return work, best.offer.runner_id
    return None


def _preference(runner: _Runner, work: WaitingWork) -> tuple[int, int, str]:
    """Loaded with this base, then with none, then with another, whose engine would have to go."""
    warm = runner.offer.warm_base
    fit = 0 if warm == work.base else 1 if warm is None else 2
    return fit, -runner.free[work.kind], runner.offer.runner_id
