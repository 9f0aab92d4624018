"""Who gets the next free slot: a pure function of what waits and what runners say.

The scheduler calls it at each tick. Of each kind of work accounts take turns by what they already
run of it, so that a large batch never shuts others out, and among equals by who was served longest
ago, so that nobody waits for more than the others' turns; within an account the 24h window goes
before 72h and the earlier deadline first; among the runners that can serve a piece, one whose
engine has its base loaded goes first. It decides late: only as much as there are free slots.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from domain.log.stored import Attempt

Queue = tuple[str, str]
"""A kind of work and the account whose it is."""


@dataclass(frozen=True, slots=True)
class StartableWork:
    """A validated batch or a created job that waits for credit or its account's slot; it is worth
    another try when the account changed, which `account_position` in the log tells."""

    work_id: str
    account_id: str
    account_position: int


@dataclass(frozen=True, slots=True)
class WaitingWork:
    """A chunk or training that any runner with its base and `memory_gb` of GPU memory may run.
    `flexible` is the 72h window; `attempts` were made of it before."""

    work_id: str
    chunk: int
    kind: str
    account_id: str
    base: str
    deadline: datetime
    memory_gb: int = 0
    flexible: bool = False
    attempts: int = 0

    @property
    def queue(self) -> Queue:
        """Where it takes its turn."""
        return self.kind, self.account_id


@dataclass(frozen=True, slots=True)
class AssignedWork:
    """An attempt that the log holds as current. `stopping`: its batch is cancelled or its window
    over, so that only what is finished still counts."""

    attempt: Attempt
    kind: str
    account_id: str
    stopping: bool = False

    @property
    def queue(self) -> Queue:
        """Whose turn it was."""
        return self.kind, self.account_id


@dataclass(frozen=True, slots=True)
class RunnerOffer:
    """What a runner can take: its free slots by kind, once all that is assigned to it is counted,
    running or not yet named by a heartbeat."""

    runner_id: str
    bases: frozenset[str]
    warm_base: str | None
    free_slots: Mapping[str, int]
    memory_gb: int = 0


@dataclass(slots=True)
class _Runner:
    offer: RunnerOffer
    free: dict[str, int]

    def can_take(self, work: WaitingWork) -> bool:
        return (
            self.free.get(work.kind, 0) > 0
            and work.base in self.offer.bases
            and work.memory_gb <= self.offer.memory_gb
        )


def choose(
    waiting: Iterable[WaitingWork],
    runners: Sequence[RunnerOffer],
    *,
    running: Mapping[Queue, int],
    served: Mapping[Queue, int],
) -> list[tuple[WaitingWork, str]]:
    """Pairs of a piece of work and the runner that gets it, in the order of the decisions.

    `running` counts the attempts of each queue that are assigned now; `served` tells the number of
    the turn at which each was served last: numbers grow, and who never was has none.
    """
    free = [_Runner(offer, dict(offer.free_slots)) for offer in runners]
    queues = _queues(waiting)
    turns = [(running.get(queue, 0), served.get(queue, -1), queue) for queue in queues]
    heapq.heapify(turns)
    turn = 1 + max(served.values(), default=0)
    chosen: list[tuple[WaitingWork, str]] = []
    while turns and any(count > 0 for runner in free for count in runner.free.values()):
        share, _, queue = heapq.heappop(turns)
        placed = _place_next(queues[queue], free)
        if placed is not None:
            chosen.append(placed)
            heapq.heappush(turns, (share + 1, turn, queue))
            turn += 1
    return chosen


def _queues(waiting: Iterable[WaitingWork]) -> dict[Queue, deque[WaitingWork]]:
    ordered = sorted(waiting, key=lambda w: (w.flexible, w.deadline, w.work_id, w.chunk))
    queues: dict[Queue, deque[WaitingWork]] = {}
    for work in ordered:
        queues.setdefault(work.queue, deque()).append(work)
    return queues


def _place_next(queue: deque[WaitingWork], free: list[_Runner]) -> tuple[WaitingWork, str] | None:
    """Takes the queue's first piece that a runner can take; what none can is dropped, since slots
    only get fewer."""
    while queue:
        work = queue.popleft()
        able = [runner for runner in free if runner.can_take(work)]
        if able:
            best = min(able, key=lambda runner: _preference(runner, work))
            best.free[work.kind] -= 1
            return work, best.offer.runner_id
    return None


def _preference(runner: _Runner, work: WaitingWork) -> tuple[int, int, int, str]:
    """Loaded with this base, then with none, then with another, whose engine would have to go; the
    least memory that suffices, so that larger cards stay free for what needs them."""
    warm = runner.offer.warm_base
    fit = 0 if warm == work.base else 1 if warm is None else 2
    return fit, runner.offer.memory_gb, -runner.free[work.kind], runner.offer.runner_id
