"""What one API key may spend, as the migration page has it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from domain.errors import InvalidRequest, LimitExceeded
from domain.ledger.key_spend import KeySpend, SpendLimits
from domain.ledger.money import nano_usd
from domain.log.aggregate import Envelope

NOON = datetime(2027, 3, 4, 12, 0, tzinfo=UTC)


def envelope(at: datetime = NOON) -> Envelope:
    return Envelope(at=at, actor="key_1", command_id="c", correlation_id="r", causation="test")


def key(*, daily: str | None = None, total: str | None = None) -> KeySpend:
    made = KeySpend(id="key_1", envelope=envelope(), account_id="acct_1", secret_digest="0" * 64)
    limits = SpendLimits(
        daily_nano_usd=nano_usd(daily) if daily else None,
        total_nano_usd=nano_usd(total) if total else None,
    )
    made.set_limits(limits, envelope=envelope())
    return made


def refusal(of: KeySpend, maximum_usd: str | None, *, now: datetime = NOON) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as refused:
        of.must_allow(nano_usd(maximum_usd) if maximum_usd else None, now=now)
    return refused.value


def test_a_fine_tune_is_refused_when_its_maximum_would_pass_the_limit() -> None:
    mine = key(daily="2")
    mine.reserve("ftjob-1", nano_usd("1.50"), envelope=envelope())
    mine.must_allow(nano_usd("0.50"), now=NOON)
    refused = refusal(mine, "0.51")
    assert refused.code == "limit_exceeded"
    assert refused.limit == {
        "name": "api_key_daily_spend_usd",
        "api_key_id": "key_1",
        "spend_usd": 1.5,
        "limit_usd": 2.0,
    }


def test_a_batch_is_refused_once_the_limit_is_reached() -> None:
    mine = key(total="2")
    mine.reserve("batch_1", nano_usd("1.99"), envelope=envelope())
    mine.must_allow(None, now=NOON)
    mine.reserve("batch_2", nano_usd("0.01"), envelope=envelope())
    refused = refusal(mine, None)
    assert refused.limit is not None
    assert refused.limit["name"] == "api_key_total_spend_usd"
    assert refused.retry_after_seconds is None


def test_a_refusal_by_the_daily_limit_says_when_the_next_day_begins() -> None:
    mine = key(daily="1")
    mine.reserve("batch_1", nano_usd("1"), envelope=envelope())
    refused = refusal(mine, None, now=NOON + timedelta(hours=11, minutes=59))
    assert refused.retry_after_seconds is not None
    assert 60 <= refused.retry_after_seconds <= 61
    mine.must_allow(None, now=NOON + timedelta(hours=12))


def test_the_total_limit_never_resets() -> None:
    mine = key(total="1")
    mine.reserve("batch_1", nano_usd("1"), envelope=envelope())
    assert refusal(mine, None, now=NOON + timedelta(days=400)).limit


def test_a_charge_takes_its_holds_place_in_the_holds_day() -> None:
    mine = key(daily="1")
    mine.reserve("batch_1", nano_usd("1"), envelope=envelope())
    mine.charge("batch_1", nano_usd("0.30"), envelope=envelope(NOON + timedelta(days=1)))
    assert mine.spent_on(NOON.date()) == nano_usd("0.30")
    assert mine.spent_on((NOON + timedelta(days=1)).date()) == 0
    assert mine.total_nano_usd == nano_usd("0.30")


def test_a_released_hold_counts_nothing() -> None:
    mine = key(daily="1", total="1")
    mine.reserve("batch_1", nano_usd("1"), envelope=envelope())
    mine.release("batch_1", envelope=envelope())
    mine.must_allow(nano_usd("1"), now=NOON)


def test_a_limit_is_at_most_what_the_page_allows() -> None:
    mine = key(daily="1000", total="100000")
    for daily, total in (("1000.01", None), (None, "100000.01"), ("-1", None)):
        limits = SpendLimits(
            daily_nano_usd=nano_usd(daily) if daily else None,
            total_nano_usd=nano_usd(total) if total else None,
        )
        with pytest.raises(InvalidRequest):
            mine.set_limits(limits, envelope=envelope())
    assert mine.limits.daily_nano_usd == nano_usd("1000")
