"""What the active worker asks of the read models, as a protocol.

`bootstrap.py` builds the real one over the projections. Every answer may be a moment old: a command
looks again before it decides, and a repeated one changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from domain.messages import Heartbeat
from domain.work.scheduling import AssignedWork, StartableWork, WaitingWork


class WorkQueue(Protocol):
    """Each method asks the database; raises Overloaded where it is away."""

    async def startable(self) -> Sequence[StartableWork]:
        """Validated batches and created jobs that did not start, in the order of creation."""
        ...

    async def waiting(self) -> Sequence[WaitingWork]:
        """Started work without an attempt."""
        ...

    async def assigned(self) -> Sequence[AssignedWork]:
        """All current attempts."""
        ...

    async def to_validate(self) -> Sequence[str]:
        """Batches whose input file was not read yet."""
        ...

    async def to_finalize(self) -> Sequence[str]:
        """Batches of which nothing runs and nothing more will."""
        ...

    async def windows_over(self, now: datetime) -> Sequence[str]:
        """Batches whose completion window ended and that still run."""
        ...

    async def stops_overdue(self, now: datetime) -> Sequence[str]:
        """Batches that are ending and of which an attempt did not stop in time."""
        ...

    async def jobs_overdue(self, now: datetime) -> Sequence[str]:
        """Jobs past the wait for a runner, or past their deadline."""
        ...

    async def files_expired(self, now: datetime) -> Sequence[str]:
        """Some files whose time is over and that nothing uses."""
        ...

    async def own_models(self, account_id: str) -> Mapping[str, str]:
        """The account's servable fine-tuned models and their bases."""
        ...

    async def save_heartbeat(self, beat: Heartbeat, *, at: datetime) -> None:
        """Shows a runner to the other processes; only the newest is kept."""
        ...

    async def forget_runner(self, runner_id: str) -> None:
        """It left or was lost."""
        ...

    async def forget_fingerprints(self, now: datetime) -> None:
        """Deletes the records of creates that are too old to be retries."""
        ...
