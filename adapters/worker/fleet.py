"""The runners as their heartbeats show them, in the memory of the active worker.

Heartbeats come in through `hear`; scheduler and dispatcher ask. Leases are measured on the
machine's steady clock, never on the product's, and only over time in which we listened: a worker
that was frozen, restarted or cut off from the broker waits a whole lease before it calls a runner
lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from domain.catalog import GPU_CLASSES
from domain.log.stored import Attempt
from domain.messages import Heartbeat
from domain.work.scheduling import AssignedWork, RunnerOffer

FRESH_HEARTBEATS = 3
"""A runner gets new work only within this many heartbeat intervals of its last word."""
FORGET_LEASES = 10

SteadySeconds = Callable[[], float]


@dataclass(slots=True)
class _Seen:
    beat: Heartbeat
    at_seconds: float
    beats: int
    running: tuple[Attempt, ...]


class Fleet:
    """Newest heartbeat by runner. `steady_seconds` only ever grows; of one runner's slots of a kind
    at most `slots_max` are believed."""

    def __init__(
        self,
        *,
        lease_seconds: float,
        heartbeat_seconds: float,
        slots_max: int,
        steady_seconds: SteadySeconds,
    ) -> None:
        self._slots_max = slots_max
        self._lease_seconds = lease_seconds
        self._fresh_seconds = FRESH_HEARTBEATS * heartbeat_seconds
        self._now = steady_seconds
        self._listening_since = self._looked_at = steady_seconds()
        self._seen: dict[str, _Seen] = {}

    def hear(self, beat: Heartbeat) -> bool:
        """A heartbeat came in; of one runner the last one counts. False for one of a class that
        there is not: it has no topic, so nothing could be sent to it."""
        if beat.gpu_class not in GPU_CLASSES:
            return False
        before = self._seen.get(beat.runner_id)
        self._seen[beat.runner_id] = _Seen(
            beat=beat,
            at_seconds=self._now(),
            beats=before.beats + 1 if before else 1,
            running=tuple(attempt.to_log() for attempt in beat.running),
        )
        return True

    def listen_anew(self) -> None:
        """Heartbeats may have been missed until now: every lease starts again."""
        self._listening_since = self._now()

    def look(self) -> list[str]:
        """Called at each round: a long pause since the last means that we were frozen. Forgets
        runners that are long gone, and returns them."""
        now = self._now()
        if now - self._looked_at > self._lease_seconds / 2:
            self._listening_since = now
        self._looked_at = now
        oldest = now - FORGET_LEASES * self._lease_seconds
        gone = [runner_id for runner_id, seen in self._seen.items() if seen.at_seconds < oldest]
        for runner_id in gone:
            del self._seen[runner_id]
        return gone

    def has_abandoned(self, attempt: Attempt) -> bool:
        """Whether its runner's last word was that it stops and leaves it behind. What a last word
        does not name had ended: its report may still be on the way, and has a lease to come."""
        seen = self._seen.get(attempt.runner_id)
        return seen is not None and seen.beat.stopping and attempt in seen.running

    def is_leaving(self, runner_id: str) -> bool:
        """Whether it takes no new work."""
        seen = self._seen.get(runner_id)
        return seen is not None and (seen.beat.draining or seen.beat.stopping)

    def is_silent(self, runner_id: str) -> bool:
        """Whether its lease ended, for all that we could have heard."""
        seen = self._seen.get(runner_id)
        last = max(self._listening_since, seen.at_seconds if seen else 0.0)
        return self._now() - last > self._lease_seconds

    def present(self) -> int:
        """How many runners were heard of within a lease."""
        return sum(
            not seen.beat.stopping and not self.is_silent(runner_id)
            for runner_id, seen in self._seen.items()
        )

    def heartbeat(self, runner_id: str) -> Heartbeat | None:
        """Its newest heartbeat, if any came since we listen."""
        seen = self._seen.get(runner_id)
        return seen.beat if seen else None

    def beats(self, runner_id: str) -> int:
        """How many heartbeats of it came."""
        seen = self._seen.get(runner_id)
        return seen.beats if seen else 0

    def names(self, attempt: Attempt) -> bool:
        """Whether its runner's newest heartbeat says that it runs."""
        seen = self._seen.get(attempt.runner_id)
        return seen is not None and attempt in seen.running

    def named(self) -> list[Attempt]:
        """All attempts that run, as newest heartbeats have it."""
        present = [seen for seen in self._seen.values() if not seen.beat.stopping]
        return [attempt for seen in present for attempt in seen.running]

    def offers(self, assigned: Iterable[AssignedWork]) -> list[RunnerOffer]:
        """What present runners can take besides what is assigned to them. An attempt that a
        heartbeat still names but that is not assigned has ended, or is about to be revoked."""
        taken = Counter((work.attempt.runner_id, work.kind) for work in assigned)
        now = self._now()
        return [
            RunnerOffer(
                runner_id=runner_id,
                bases=frozenset(seen.beat.bases),
                warm_base=seen.beat.warm_base,
                free_slots={
                    kind: max(0, min(slots, self._slots_max) - taken[runner_id, kind])
                    for kind, slots in seen.beat.slots.items()
                },
                memory_gb=GPU_CLASSES[seen.beat.gpu_class],
            )
            for runner_id, seen in self._seen.items()
            if not self.is_leaving(runner_id) and now - seen.at_seconds <= self._fresh_seconds
        ]
