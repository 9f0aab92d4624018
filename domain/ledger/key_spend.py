"""One API key: its life, its limits, and its spend by UTC day.

Work counts from the moment it starts and reserves credit, in the day of that moment; the later
charge replaces the hold in the same day's bucket, so that midnight moves and doubles nothing
(migration page, "Usage and limits by API key").
"""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from typing import ClassVar

from domain.errors import InvalidApiKey, InvalidRequest, LimitExceeded
from domain.ledger.money import NANO_USD_PER_USD, usd_number, usd_text
from domain.limits import KEY_DAILY_SPEND_USD_MAX, KEY_TOTAL_SPEND_USD_MAX
from domain.log.aggregate import Aggregate, Envelope, event
from domain.log.stored import StoredModel


class SpendLimits(StoredModel):
    """Maxima in nano-USD; null for none."""

    daily_nano_usd: int | None = None
    total_nano_usd: int | None = None


class DaySpend(StoredModel):
    """A key's spend in one UTC day."""

    charged_nano_usd: int = 0
    held_nano_usd: int = 0

    @property
    def spend_nano_usd(self) -> int:
        return self.charged_nano_usd + self.held_nano_usd


class OpenSpend(StoredModel):
    """A hold that counts toward a day."""

    day: date
    amount_nano_usd: int


class KeySpend(Aggregate, topic="gridline.key_spend"):
    """`days` maps ISO days to that day's spend; `open` work ids to what they hold. `secret_digest`
    is the SHA-256 of what is kept of the key's text, itself a SHA-256: by it the audit knows whose
    secret a row of `api_key_secrets` is."""

    snapshot_interval: ClassVar[int] = 200

    account_id: str
    secret_digest: str
    revoked: bool
    limits: SpendLimits
    days: dict[str, DaySpend]
    open: dict[str, OpenSpend]
    total_nano_usd: int

    @event("Registered", topic="gridline.key_spend.registered")
    def __init__(self, *, id: str, envelope: Envelope, account_id: str, secret_digest: str) -> None:
        self.account_id = account_id
        self.secret_digest = secret_digest
        self.revoked = False
        self.limits = SpendLimits()
        self.days = {}
        self.open = {}
        self.total_nano_usd = 0

    def set_limits(self, limits: SpendLimits, *, envelope: Envelope) -> None:
        """Puts other limits in force for the creates that follow. Raises InvalidRequest for one
        past the most that it can be set to (migration page, "Usage and limits by API key")."""
        for name, limit, most_usd in (
            ("daily", limits.daily_nano_usd, KEY_DAILY_SPEND_USD_MAX),
            ("total", limits.total_nano_usd, KEY_TOTAL_SPEND_USD_MAX),
        ):
            if limit is not None and not 0 <= limit <= most_usd * NANO_USD_PER_USD:
                raise InvalidRequest(
                    f"A key's {name} limit is from 0 to {most_usd:,} USD.", param=f"{name}_usd"
                )
        self._limits_set(limits=limits, envelope=envelope)

    def revoke(self, *, envelope: Envelope) -> None:
        """The key opens nothing more; its running work goes on."""
        if not self.revoked:
            self._revoked(envelope=envelope)

    def spent_on(self, day: date) -> int:
        """Charged plus held of a UTC day, in nano-USD."""
        return self.days.get(day.isoformat(), DaySpend()).spend_nano_usd

    def must_allow(self, maximum_nano_usd: int | None, *, now: datetime) -> None:
        """The rule at create (`docs/limits.md`): a fine-tune is refused if spend plus its maximum
        passes a limit, a batch (maximum null) if spend has reached it. Raises LimitExceeded, and
        InvalidApiKey for a key that was revoked since the request came in."""
        if self.revoked:
            raise InvalidApiKey("The API key was revoked.")
        midnight = datetime.combine(now.date() + timedelta(days=1), time(), now.tzinfo)
        for name, limit, spent, retry_after in (
            (
                "api_key_daily_spend_usd",
                self.limits.daily_nano_usd,
                self.spent_on(now.date()),
                int((midnight - now).total_seconds()) + 1,
            ),
            ("api_key_total_spend_usd", self.limits.total_nano_usd, self.total_nano_usd, None),
        ):
            if limit is None:
                continue
            if maximum_nano_usd is None:
                passes = spent >= limit
            else:
                passes = spent + maximum_nano_usd > limit
            if passes:
                raise LimitExceeded(
                    f"This API key's {name} limit is {usd_text(limit)} USD, and {usd_text(spent)} "
                    "USD is spent or held. Raise the limit, or use another key.",
                    limit={
                        "name": name,
                        "api_key_id": self.id,
                        "spend_usd": usd_number(spent),
                        "limit_usd": usd_number(limit),
                    },
                    retry_after_seconds=retry_after,
                )

    def reserve(self, work_id: str, amount_nano_usd: int, *, envelope: Envelope) -> None:
        """Counts a hold in the day of the envelope."""
        assert work_id not in self.open
        self._spend_reserved(
            work_id=work_id,
            day=envelope.at.date(),
            amount_nano_usd=amount_nano_usd,
            envelope=envelope,
        )

    def charge(self, work_id: str, charge_nano_usd: int, *, envelope: Envelope) -> None:
        """Replaces a hold by its charge, in the hold's day."""
        reserved = self.open[work_id]
        assert 0 <= charge_nano_usd <= reserved.amount_nano_usd
        self._spend_charged(
            work_id=work_id,
            day=reserved.day,
            charge_nano_usd=charge_nano_usd,
            returned_nano_usd=reserved.amount_nano_usd - charge_nano_usd,
            envelope=envelope,
        )

    def release(self, work_id: str, *, envelope: Envelope) -> None:
        """Removes a hold from its day."""
        reserved = self.open[work_id]
        self._spend_released(
            work_id=work_id,
            day=reserved.day,
            returned_nano_usd=reserved.amount_nano_usd,
            envelope=envelope,
        )

    @event("LimitsSet", topic="gridline.key_spend.limits_set")
    def _limits_set(self, *, limits: SpendLimits, envelope: Envelope) -> None:
        self.limits = limits

    @event("Revoked", topic="gridline.key_spend.revoked")
    def _revoked(self, *, envelope: Envelope) -> None:
        self.revoked = True

    @event("SpendReserved", topic="gridline.key_spend.spend_reserved")
    def _spend_reserved(
        self, *, work_id: str, day: date, amount_nano_usd: int, envelope: Envelope
    ) -> None:
        self.open[work_id] = OpenSpend(day=day, amount_nano_usd=amount_nano_usd)
        self._add_to_day(day, charged=0, held=amount_nano_usd)

    @event("SpendCharged", topic="gridline.key_spend.spend_charged")
    def _spend_charged(
        self,
        *,
        work_id: str,
        day: date,
        charge_nano_usd: int,
        returned_nano_usd: int,
        envelope: Envelope,
    ) -> None:
        del self.open[work_id]
        self._add_to_day(day, charged=charge_nano_usd, held=-charge_nano_usd - returned_nano_usd)

    @event("SpendReleased", topic="gridline.key_spend.spend_released")
    def _spend_released(
        self, *, work_id: str, day: date, returned_nano_usd: int, envelope: Envelope
    ) -> None:
        del self.open[work_id]
        self._add_to_day(day, charged=0, held=-returned_nano_usd)

    def _add_to_day(self, day: date, *, charged: int, held: int) -> None:
        before = self.days.get(day.isoformat(), DaySpend())
        self.days[day.isoformat()] = DaySpend(
            charged_nano_usd=before.charged_nano_usd + charged,
            held_nano_usd=before.held_nano_usd + held,
        )
        self.total_nano_usd += charged + held
