"""What an operator types as an amount."""

from __future__ import annotations

import pytest

from domain.ledger.money import nano_usd


@pytest.mark.parametrize(
    ("text", "amount"), [("0.50", 500_000_000), ("1000", 10**12), ("-1", -(10**9))]
)
def test_an_amount_is_exact(text: str, amount: int) -> None:
    assert nano_usd(text) == amount


NO_AMOUNTS = "x 1,5 NaN sNaN Infinity 1e999999999 0.0000000001 1e3 1_0 １０ ٣ +1 1. .5 0x1 --1"


@pytest.mark.parametrize("text", ["", " 1", *NO_AMOUNTS.split()])
def test_what_is_no_amount_is_refused_as_one(text: str) -> None:
    with pytest.raises(ValueError, match="USD"):
        nano_usd(text)
