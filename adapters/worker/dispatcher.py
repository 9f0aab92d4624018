"""Makes what runs be what the log says: the level-triggered half of the active worker.

Each round it compares the attempts of the log with the newest heartbeats and sends what is missing:
an Assign that no heartbeat names, a Cancel whose report has not come, a Revoke for what should not
run; and it gives up the attempts of runners that left or fell silent. No message is precious, since
the next round sends it again. Whatever is about to change something asks the log first, so that a
read model that lags does no harm.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import structlog

from adapters.worker import measures
from adapters.worker.errands import each
from adapters.worker.fleet import Fleet
from adapters.worker.system_context import system_context
from domain import messages
from domain.commands.work import LoseAttempt, current_task, give_attempt_back, lose_attempt
from domain.log.stored import Attempt
from domain.log.unit_of_work import CommandWriter
from domain.messages import WORK_TOPIC, Assign, Cancel, Revoke, Task
from domain.ports import Producer
from domain.work.scheduling import AssignedWork

log = structlog.stdlib.get_logger(__name__)

BEATS_BEFORE_REPEAT = 2
ASSIGNS_MAX = 30
"""A runner that beats, but neither names nor answers an attempt that it was sent so often, cannot
take it: another one gets it."""
ASSIGNS_TO_A_LEAVING_RUNNER_MAX = 2
"""One that ended the attempt answers with its report; one that never had it will not begin it."""
ROUND_SECONDS_MAX = 0.5
"""What is not sent by then goes on by itself, and the next round leaves its runner out."""
PART = "dispatcher"

BrokerAnswers = Callable[[], Awaitable[bool]]


@dataclass(slots=True)
class _Due:
    """What there is to see to of one runner: current attempts, and others that it names."""

    assigned: list[AssignedWork] = field(default_factory=list)
    unknown: list[Attempt] = field(default_factory=list)


class Dispatcher:
    """`reconcile` once a round. `broker_answers` is asked before a silent runner is called lost:
    while the broker is away, silence says nothing."""

    def __init__(
        self,
        *,
        writer: CommandWriter,
        producer: Producer,
        fleet: Fleet,
        broker_answers: BrokerAnswers,
    ) -> None:
        self._writer = writer
        self._producer = producer
        self._fleet = fleet
        self._broker_answers = broker_answers
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._assigned_at: dict[Attempt, int] = {}
        self._unanswered: dict[Attempt, int] = {}
        self._cancelled_at: dict[Attempt, int] = {}
        self._revoked_at: dict[Attempt, int] = {}

    async def reconcile(self, assigned: Sequence[AssignedWork]) -> None:
        """One round. `assigned` are the attempts that the log holds as current."""
        current = {work.attempt for work in assigned}
        named = self._fleet.named()
        self._forget_all_but(current | set(named))
        await self._give_up_lost([work.attempt for work in assigned])
        by_runner: dict[str, _Due] = defaultdict(_Due)
        for work in assigned:
            by_runner[work.attempt.runner_id].assigned.append(work)
        for attempt in named:
            if attempt not in current:
                by_runner[attempt.runner_id].unknown.append(attempt)
        started = []
        for runner_id, due in by_runner.items():
            if runner_id not in self._under_way and self._fleet.heartbeat(runner_id) is not None:
                task = asyncio.create_task(self._see_to_runner(runner_id, due))
                self._under_way[runner_id] = task
                started.append(task)
        if started:
            await asyncio.wait(started, timeout=ROUND_SECONDS_MAX)

    async def close(self) -> None:
        """Stops what is still being sent."""
        under_way = list(self._under_way.values())
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _see_to_runner(self, runner_id: str, due: _Due) -> None:
        """Each runner by itself: one whose messages the broker does not take delays no other."""
        try:
            await each(PART, due.assigned, self._see_to)
            await each(PART, due.unknown, self._revoke_if_stale)
        finally:
            del self._under_way[runner_id]

    async def _see_to(self, work: AssignedWork) -> None:
        attempt = work.attempt
        if self._fleet.names(attempt):
            self._unanswered.pop(attempt, None)
        elif self._is_due(self._assigned_at, attempt):
            task = await self._current_task(attempt)
            if task is None:
                return
            if self._unanswered.get(attempt, 0) >= self._assigns_max(attempt):
                # A training that began stays, and is asked for its report again.
                self._unanswered[attempt] = 0
                await self._give_back(attempt)
                return
            await self._send(Assign(attempt=messages.Attempt.of(attempt), task=task))
            self._note(self._assigned_at, attempt)
            self._unanswered[attempt] = self._unanswered.get(attempt, 0) + 1
        if work.stopping and self._is_due(self._cancelled_at, attempt):
            await self._send(Cancel(attempt=messages.Attempt.of(attempt)))
            self._note(self._cancelled_at, attempt)

    def _assigns_max(self, attempt: Attempt) -> int:
        leaving = self._fleet.is_leaving(attempt.runner_id)
        return ASSIGNS_TO_A_LEAVING_RUNNER_MAX if leaving else ASSIGNS_MAX

    async def _revoke_if_stale(self, attempt: Attempt) -> None:
        if not self._is_due(self._revoked_at, attempt):
            return
        if await self._current_task(attempt) is None:
            await self._send(Revoke(attempt=messages.Attempt.of(attempt)))
            self._note(self._revoked_at, attempt)

    async def _give_up_lost(self, attempts: Sequence[Attempt]) -> None:
        silent = [a for a in attempts if self._fleet.is_silent(a.runner_id)]
        if silent and not await self._broker_answers():
            self._fleet.listen_anew()
            silent = []
        lost = [*{*silent, *(a for a in attempts if self._fleet.has_abandoned(a))}]
        for attempt in lost:
            log.warning(
                "attempt lost with its runner",
                work_id=attempt.work_id,
                runner_id=attempt.runner_id,
            )
        await each(PART, lost, self._lose)

    async def _lose(self, attempt: Attempt) -> None:
        await self._writer.execute(
            lose_attempt,
            LoseAttempt(attempt=attempt),
            system_context(
                PART,
                work_id=attempt.work_id,
                causation=f"lost/{attempt.chunk}/{attempt.attempt}/{attempt.runner_id}",
            ),
        )
        measures.ATTEMPTS.labels("lost").inc()

    async def _give_back(self, attempt: Attempt) -> None:
        log.warning(
            "runner does not take its attempt",
            work_id=attempt.work_id,
            runner_id=attempt.runner_id,
        )
        context = system_context(
            PART,
            work_id=attempt.work_id,
            causation=f"untaken/{attempt.chunk}/{attempt.attempt}/{attempt.runner_id}",
        )
        await self._writer.execute(give_attempt_back, LoseAttempt(attempt=attempt), context)

    async def _current_task(self, attempt: Attempt) -> Task | None:
        return await self._writer.execute(
            current_task,
            attempt,
            system_context(PART, work_id=attempt.work_id, causation="read"),
        )

    async def _send(self, message: Assign | Cancel | Revoke) -> None:
        attempt = message.attempt
        beat = self._fleet.heartbeat(attempt.runner_id)
        assert beat is not None
        await self._producer.send(
            f"{WORK_TOPIC}.{beat.gpu_class}",
            key=attempt.runner_id,
            value=message.model_dump_json().encode(),
        )
        log.info(
            "work message sent",
            type=message.type,
            work_id=attempt.work_id,
            chunk=attempt.chunk,
            attempt=attempt.attempt,
            runner_id=attempt.runner_id,
        )

    def _is_due(self, sent: dict[Attempt, int], attempt: Attempt) -> bool:
        """At first, and again when so many heartbeats came since and it is still needed."""
        before = sent.get(attempt)
        beats = self._fleet.beats(attempt.runner_id)
        return before is None or beats - before >= BEATS_BEFORE_REPEAT

    def _note(self, sent: dict[Attempt, int], attempt: Attempt) -> None:
        sent[attempt] = self._fleet.beats(attempt.runner_id)

    def _forget_all_but(self, attempts: set[Attempt]) -> None:
        for sent in (self._assigned_at, self._unanswered, self._cancelled_at, self._revoked_at):
            for attempt in sent.keys() - attempts:
                del sent[attempt]
