"""The one place where a charge is computed."""

from __future__ import annotations

from typing import Any

import pytest

from domain.ledger.receipt import End, Receipt, ReceiptLine, Terms, charge_of, settle


def line(tokens: int, rate: int) -> ReceiptLine:
    return ReceiptLine(what="input", model="m", tokens=tokens, rate_nano_usd_per_mtok=rate)


def terms(*, minimum: int = 0, maximum: int = 1_000) -> Terms:
    return Terms(
        price_version=3,
        base="m",
        base_revision="abc",
        minimum_nano_usd=minimum,
        maximum_nano_usd=maximum,
        input_sha256=("f" * 64,),
    )


def settled(used: int, *, minimum: int, maximum: int, applies: bool = True) -> Receipt:
    return settle(
        terms(minimum=minimum, maximum=maximum),
        [line(used, 1_000_000)],
        End(ended="completed", minimum_applies=applies),
    )


@pytest.mark.parametrize(
    ("lines", "charge"),
    [
        ([(1, 1)], 1),
        ([(1_000_000, 1)], 1),
        ([(1_000_001, 1)], 2),
        ([(500_000, 1), (500_000, 1)], 1),
        ([(1, 1), (1, 1), (1, 1)], 1),
        ([(0, 5)], 0),
        ([], 0),
    ],
)
def test_all_lines_are_rounded_up_together_once(lines: list[tuple[int, int]], charge: int) -> None:
    assert charge_of([line(*each) for each in lines], minimum_nano_usd=0) == charge


@pytest.mark.parametrize(
    ("used", "fields", "charge", "decided_by"),
    [
        (50, {"minimum": 20, "maximum": 100}, 50, "tokens"),
        (20, {"minimum": 20, "maximum": 100}, 20, "tokens"),
        (19, {"minimum": 20, "maximum": 100}, 20, "minimum"),
        (19, {"minimum": 20, "maximum": 100, "applies": False}, 19, "tokens"),
        (100, {"minimum": 20, "maximum": 100}, 100, "tokens"),
        (101, {"minimum": 20, "maximum": 100}, 100, "maximum"),
        (101, {"minimum": 20, "maximum": 100, "applies": False}, 100, "maximum"),
        (5, {"minimum": 20, "maximum": 10}, 10, "maximum"),
    ],
)
def test_a_charge_is_the_tokens_the_minimum_or_the_maximum_and_says_which(
    used: int, fields: dict[str, Any], charge: int, decided_by: str
) -> None:
    receipt = settled(used, **fields)
    assert (receipt.charge_nano_usd, receipt.decided_by) == (charge, decided_by)
    assert receipt.returned_nano_usd == fields["maximum"] - charge


def test_a_receipt_keeps_what_was_fixed_before_and_how_it_ended() -> None:
    end = End(ended="failed", minimum_applies=False, code="adapter_too_large", side="customer")
    receipt = settle(terms(), [line(1, 1)], end)
    assert (receipt.price_version, receipt.base, receipt.base_revision) == (3, "m", "abc")
    assert receipt.input_sha256 == ("f" * 64,)
    assert (receipt.ended, receipt.code, receipt.side) == (
        "failed",
        "adapter_too_large",
        "customer",
    )
    assert receipt.lines == (line(1, 1),)
