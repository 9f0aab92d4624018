"""Starts what may start and gives waiting work to free runners: the deciding half of the active
worker's round.

Whether work may start is decided by its own command, against the account; this only says when to
try. Who gets a slot is decided by `domain.work.scheduling.choose`; this only brings together what
waits and what is free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from adapters.worker.errands import each
from adapters.worker.fleet import Fleet, SteadySeconds
from adapters.worker.system_context import system_context
from domain.commands.work import (
    AssignWork,
    StartWork,
    WaitForRunner,
    assign_work,
    start_work,
    wait_for_runner,
)
from domain.log.stored import Attempt
from domain.log.unit_of_work import CommandWriter
from domain.work.kinds import kind_of
from domain.work.scheduling import AssignedWork, Queue, StartableWork, WaitingWork, choose
from projections.read_model import Read
from projections.work import open_work

START_AGAIN_SECONDS = 5.0
"""Waiting work is tried again after this even if nothing is known to have changed."""
EXPLAIN_AFTER_SECONDS = 3.0
"""A training that no runner took for this long is told what it waits for."""
WAITING_OF_EACH = 200
"""Waiting chunks of one account and base that are looked at: more than any fleet's free slots."""
PART = "scheduler"


class Scheduler:
    """`start_waiting` and `assign_free` once a round."""

    def __init__(
        self,
        *,
        writer: CommandWriter,
        read: Read,
        fleet: Fleet,
        steady_seconds: SteadySeconds,
    ) -> None:
        self._writer = writer
        self._read = read
        self._fleet = fleet
        self._now = steady_seconds
        self._served: dict[Queue, int] = {}
        self._turns = 0
        self._tried: dict[str, tuple[int, float]] = {}
        self._queued_since: dict[str, float] = {}

    async def start_waiting(self) -> None:
        """Tries what is new, what has an account that changed, and what was not tried for long; in
        the order of creation, so that credit goes to who came first."""
        startable = await self._read(open_work.startable)
        ids = {work.work_id for work in startable}
        self._tried = {key: tried for key, tried in self._tried.items() if key in ids}
        due = [work for work in startable if self._is_due(work)]
        await each(PART, due, self._start)

    async def assign_free(self, assigned: Sequence[AssignedWork]) -> list[AssignedWork]:
        """Gives free slots away; returns the new attempts."""
        offers = self._fleet.offers(assigned)
        if not any(free for offer in offers for free in offer.free_slots.values()):
            return []
        chosen = choose(
            await self._waiting(),
            offers,
            running=Counter(work.queue for work in assigned),
            served=self._served,
        )
        self._served |= {work.queue: turn for turn, (work, _) in enumerate(chosen, self._turns)}
        self._turns += len(chosen)
        return [
            AssignedWork(attempt=attempt, kind=work.kind, account_id=work.account_id)
            for (work, _), attempt in await each(PART, chosen, self._assign)
            if attempt is not None
        ]

    async def explain_waits(self) -> None:
        """Records on work that no runner takes, where its kind says so, that it waits for one."""
        now = self._now()
        waiting = {
            work.work_id
            for work in await self._waiting()
            if kind_of(work.work_id).says_what_it_waits_for
        }
        self._queued_since = {key: self._queued_since.get(key, now) for key in waiting}
        due = [key for key, at in self._queued_since.items() if now - at >= EXPLAIN_AFTER_SECONDS]
        for work_id in due:
            self._queued_since[work_id] = math.inf
        await each(PART, due, self._explain)

    async def _waiting(self) -> Sequence[WaitingWork]:
        return await self._read(open_work.waiting, each=WAITING_OF_EACH)

    async def _explain(self, work_id: str) -> None:
        await self._writer.execute(
            wait_for_runner,
            WaitForRunner(work_id),
            system_context(PART, work_id=work_id, causation="wait"),
        )

    def _is_due(self, work: StartableWork) -> bool:
        tried = self._tried.get(work.work_id)
        if tried is None:
            return True
        position, at_seconds = tried
        return position != work.account_position or self._now() - at_seconds >= START_AGAIN_SECONDS

    async def _start(self, work: StartableWork) -> None:
        self._tried[work.work_id] = (work.account_position, self._now())
        context = system_context(PART, work_id=work.work_id, causation="start")
        await self._writer.execute(start_work, StartWork(work.work_id), context)

    async def _assign(self, chosen: tuple[WaitingWork, str]) -> Attempt | None:
        work, runner_id = chosen
        return await self._writer.execute(
            assign_work,
            AssignWork(work_id=work.work_id, chunk=work.chunk, runner_id=runner_id),
            system_context(
                PART,
                work_id=work.work_id,
                causation=f"assign/{work.chunk}/{work.attempts + 1}",
            ),
        )
