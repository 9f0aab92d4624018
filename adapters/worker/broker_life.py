"""Notices a broker that came back as another one, for the loops that read from it."""

from __future__ import annotations

import time

from adapters import kafka
from adapters.settings import Settings
from domain.ports import Consumer

POLL_SECONDS = 1.0
BROKER_CHECK_SECONDS = 5.0


class BrokerLife:
    """Notices a broker that came back as another one: it may answer a consumer of the last one
    with silence for ever."""

    def __init__(self, settings: Settings, consumer: Consumer) -> None:
        self._settings = settings
        self._consumer = consumer
        self._next_check = time.monotonic() + BROKER_CHECK_SECONDS

    async def check(self) -> None:
        """Raises BrokerChanged, and KafkaError while it is away."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + BROKER_CHECK_SECONDS
        if await kafka.current_cluster_id(self._settings) != self._consumer.cluster_id:
            raise BrokerChanged


class BrokerChanged(Exception):
    """The consumer must be made anew, with the positions of the new broker."""
