"""Where the worker's own commands come from, for the envelopes of their events."""

from __future__ import annotations

from domain.log.unit_of_work import CommandContext


def system_context(part: str, *, work_id: str, causation: str) -> CommandContext:
    """A command of a part of the worker about one job, batch or file.

    The id is the same at each retry: what one part does to one thing for one cause is one command.
    """
    return CommandContext(
        actor=f"system:{part}",
        correlation_id=work_id,
        causation=causation,
        command_id=f"{part}/{causation}/{work_id}",
    )
