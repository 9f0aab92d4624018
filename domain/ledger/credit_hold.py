"""The one credit hold of a job or batch: a two-phase transfer.

    placed --capture--> captured      (charge <= maximum; the rest is returned)
       |----release---> released      (nothing is charged)
       +----expire----> expired       (nothing is charged)

A hold ends once. It is placed for the worst case, so that the capture cannot fail for want of
credit.
"""

from __future__ import annotations

from datetime import date, datetime
from typing import Literal

from domain.log.aggregate import Aggregate, Envelope, event

HoldState = Literal["placed", "captured", "released", "expired"]


class CreditHold(Aggregate, topic="gridline.credit_hold"):
    """`spend_day` is the UTC day in which the key's spend counts, fixed when credit is reserved."""

    account_id: str
    key_id: str
    work_id: str
    maximum_nano_usd: int
    price_version: int
    spend_day: date
    expires_at: datetime
    state: HoldState
    captured_nano_usd: int

    @event("Placed", topic="gridline.credit_hold.placed")
    def __init__(
        self,
        *,
        id: str,
        envelope: Envelope,
        account_id: str,
        key_id: str,
        work_id: str,
        maximum_nano_usd: int,
        price_version: int,
        spend_day: date,
        expires_at: datetime,
    ) -> None:
        self.account_id = account_id
        self.key_id = key_id
        self.work_id = work_id
        self.maximum_nano_usd = maximum_nano_usd
        self.price_version = price_version
        self.spend_day = spend_day
        self.expires_at = expires_at
        self.state = "placed"
        self.captured_nano_usd = 0

    @property
    def is_open(self) -> bool:
        return self.state == "placed"

    def capture(self, charge_nano_usd: int, *, envelope: Envelope) -> None:
        """Ends the hold with a charge of at most its maximum."""
        assert self.is_open
        assert 0 <= charge_nano_usd <= self.maximum_nano_usd
        self._captured(
            charge_nano_usd=charge_nano_usd,
            returned_nano_usd=self.maximum_nano_usd - charge_nano_usd,
            envelope=envelope,
        )

    def release(self, *, envelope: Envelope) -> None:
        """Ends the hold without a charge."""
        assert self.is_open
        self._released(returned_nano_usd=self.maximum_nano_usd, envelope=envelope)

    def expire(self, *, envelope: Envelope) -> None:
        """Ends a hold that outlived its work's deadline, without a charge."""
        assert self.is_open
        assert envelope.at >= self.expires_at
        self._expired(returned_nano_usd=self.maximum_nano_usd, envelope=envelope)

    @event("Captured", topic="gridline.credit_hold.captured")
    def _captured(
        self, *, charge_nano_usd: int, returned_nano_usd: int, envelope: Envelope
    ) -> None:
        self.state = "captured"
        self.captured_nano_usd = charge_nano_usd

    @event("Released", topic="gridline.credit_hold.released")
    def _released(self, *, returned_nano_usd: int, envelope: Envelope) -> None:
        self.state = "released"

    @event("Expired", topic="gridline.credit_hold.expired")
    def _expired(self, *, returned_nano_usd: int, envelope: Envelope) -> None:
        self.state = "expired"
