"""All prices ever published, in one stream. A version never changes: quotes and receipts pin it."""

from __future__ import annotations

from datetime import datetime

from domain.errors import InvalidRequest
from domain.ledger.prices import PriceList
from domain.log.aggregate import Aggregate, Envelope, event


class PriceBook(Aggregate, topic="gridline.price_book"):
    """`lists` maps versions to price lists."""

    lists: dict[int, PriceList]

    @event("Opened", topic="gridline.price_book.opened")
    def __init__(self, *, id: str, envelope: Envelope, prices: PriceList) -> None:
        self.lists = {prices.version: prices}

    def in_force(self, now: datetime) -> PriceList:
        """What new quotes pin: the newest version that is effective by now; the first one until any
        is."""
        effective = (v for v, prices in self.lists.items() if prices.effective_from <= now)
        return self.lists[max(effective, default=min(self.lists))]

    def of_version(self, version: int) -> PriceList:
        """A pinned version."""
        return self.lists[version]

    def publish(self, prices: PriceList, *, envelope: Envelope) -> None:
        """Adds a version; the same list again is no change. Raises InvalidRequest for a version
        that is not the next one, or is there with other prices."""
        known = self.lists.get(prices.version)
        if known == prices:
            return
        if prices.version != max(self.lists) + 1:
            raise InvalidRequest(
                f"The next price list has version {max(self.lists) + 1}, not {prices.version}.",
                param="version",
            )
        self._published(prices=prices, envelope=envelope)

    @event("Published", topic="gridline.price_book.published")
    def _published(self, *, prices: PriceList, envelope: Envelope) -> None:
        self.lists[prices.version] = prices
