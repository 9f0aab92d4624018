"""The one base of all aggregates: text ids, typed frozen events, explicit time and origin.

A public method decides (its guards name the rule), then calls a private method decorated with
`event`, which only assigns: its body also runs on replay, so it never checks, reads a clock or
draws a random number. State is annotated on the class, which is also what a snapshot holds.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Self

from eventsourcing.domain import (
    BaseAggregate,
    CanInitAggregate,
    CanMutateAggregate,
    event,
)
from eventsourcing.utils import register_topic
from pydantic import BaseModel, ConfigDict

__all__ = ["Aggregate", "Envelope", "event"]


class Envelope(BaseModel):
    """Where an event comes from.

    `at` is the effective time in UTC; `actor` is a key id, a user id or `system:<process part>`;
    `command_id` identifies the command (a retried one keeps it); `correlation_id` ties together
    all that one request set off; `causation` names what was answered: a route, or the coordinates
    of a broker message.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: datetime
    actor: str
    command_id: str
    correlation_id: str
    causation: str


def _is_event(member: object) -> bool:
    return isinstance(member, type) and issubclass(member, CanMutateAggregate)


class Aggregate(BaseAggregate[str]):
    """Base of the product's aggregates. Each event's TOPIC is explicit, so moving code keeps
    history readable."""

    class Event(BaseModel, CanMutateAggregate[str]):
        """Base of an aggregate's events."""

        # The library sets each event's TOPIC as a plain class attribute.
        model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(str,))

        originator_id: str
        originator_version: int
        timestamp: datetime
        envelope: Envelope

        def _as_dict(self) -> dict[str, Any]:
            return dict(self)

    class Created(Event, CanInitAggregate[str]):
        """Base of an aggregate's first event."""

        originator_topic: str

    TOPIC: ClassVar[str]

    def __init_subclass__(cls, *, topic: str) -> None:
        """Registers the aggregate and its events under their explicit topics.

        Raises TypeError for an event without one: its module path would then be its name in the
        log, and moving the file would break history.
        """
        super().__init_subclass__()
        for name, member in vars(cls).items():
            if not _is_event(member):
                continue
            event_topic = vars(member).get("TOPIC")
            if not event_topic:
                if name in ("Event", "Created"):  # the bases that every aggregate class gets
                    continue
                raise TypeError(f"{cls.__name__}.{name} has no explicit topic")
            register_topic(event_topic, member)
        cls.TOPIC = topic
        register_topic(topic, cls)

    @classmethod
    def _create(
        cls,
        event_class: type[CanInitAggregate[str]],
        *,
        id: str | None = None,
        **kwargs: Any,
    ) -> Self:
        envelope: Envelope = kwargs["envelope"]
        return super()._create(event_class, id=id, **{**kwargs, "timestamp": envelope.at})

    def trigger_event(self, event_class: type[CanMutateAggregate[str]], **kwargs: Any) -> None:
        """Appends one event; its time is the envelope's, never the clock's."""
        envelope: Envelope = kwargs["envelope"]
        super().trigger_event(event_class, **{**kwargs, "timestamp": envelope.at})
