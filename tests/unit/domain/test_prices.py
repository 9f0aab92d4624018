"""Published prices and the charges made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import domain
from domain.catalog import CATALOG
from domain.ledger.money import NANO_USD_PER_USD, nano_usd
from domain.ledger.prices import PriceList, batch_lines, training_lines
from domain.ledger.receipt import End, Receipt, ReceiptLine, Terms, charge_of, settle
from domain.log.stored import TokenUsage

SHIPPED = (Path(domain.__file__).parent / "ledger" / "prices.json").read_text()
PRICES = PriceList.from_json(SHIPPED)
PAGE_BASES = ["llama-3.1-8b-instruct", "qwen2.5-7b-instruct", "mistral-7b-instruct-v0.3"]


def usage(model: str, input_tokens: int, output_tokens: int) -> TokenUsage:
    return TokenUsage(model=model, input_tokens=input_tokens, output_tokens=output_tokens)


def batch_charge(*used: TokenUsage, least: bool = True) -> int:
    minimum = PRICES.of(used[0].model).minimum_per_batch_nano_usd if least else 0
    return charge_of(batch_lines(prices=PRICES, usage=used), minimum_nano_usd=minimum)


def settled(lines: Sequence[ReceiptLine], end: End) -> Receipt:
    """Of work with a minimum of 0.0005 and a maximum of 0.001 USD."""
    terms = Terms(
        price_version=1,
        base="smollm2-135m-instruct",
        base_revision="pinned",
        minimum_nano_usd=500_000,
        maximum_nano_usd=1_000_000,
        input_sha256=("0" * 64,),
    )
    return settle(terms, lines, end)


@pytest.mark.parametrize("base", PAGE_BASES)
def test_the_pages_worked_example_comes_out_to_the_cent(base: str) -> None:
    training = charge_of(
        training_lines(prices=PRICES, base=base, method="supervised", trained_tokens=750_000),
        minimum_nano_usd=PRICES.of(base).minimum_per_job_nano_usd,
    )
    batch = batch_charge(usage(f"ft:{base}:o3f9a1c2d4e5:7b2c9e41a0d3", 10_000_000, 1_000_000))
    assert (training, batch) == (nano_usd("0.50"), nano_usd("0.605"))
    assert training + batch == nano_usd("1.105")


def test_a_small_batch_costs_its_minimum() -> None:
    lines = usage("qwen2.5-7b-instruct", 10, 10)
    assert batch_charge(lines) == nano_usd("0.20")
    assert batch_charge(lines, least=False) == 10 * 49 + 10 * 115


def test_a_failure_on_the_customers_side_pays_no_minimum() -> None:
    lines = training_lines(prices=PRICES, base="qwen3-8b", method="dpo", trained_tokens=1_000)
    receipt = settled(lines, End(ended="failed", minimum_applies=False, side="customer"))
    assert receipt.charge_nano_usd == 1_000 * 660
    assert (receipt.decided_by, receipt.side) == ("tokens", "customer")


@pytest.mark.parametrize(
    ("tokens", "minimum_applies", "charge", "decided_by"),
    [
        (1_000, True, 500_000, "minimum"),
        (1_000, False, 5_000, "tokens"),
        (100_001, True, 500_005, "tokens"),
        (100_000, True, 500_000, "tokens"),
        (1_000_000, True, 1_000_000, "maximum"),
        (1_000_000, False, 1_000_000, "maximum"),
    ],
)
def test_a_receipt_says_what_decided_its_charge(
    tokens: int, minimum_applies: bool, charge: int, decided_by: str
) -> None:
    lines = batch_lines(prices=PRICES, usage=[usage("smollm2-135m-instruct", tokens, 0)])
    receipt = settled(lines, End(ended="completed", minimum_applies=minimum_applies))
    assert (receipt.charge_nano_usd, receipt.decided_by) == (charge, decided_by)
    assert receipt.charge_nano_usd + receipt.returned_nano_usd == receipt.maximum_nano_usd
    assert (receipt.ended, receipt.code, receipt.side) == ("completed", None, None)


TOKENS = st.integers(min_value=0, max_value=10**10)


@given(TOKENS, TOKENS, TOKENS, TOKENS, st.booleans())
def test_more_tokens_never_cost_less(a: int, b: int, more_a: int, more_b: int, least: bool) -> None:
    def charge(input_tokens: int, output_tokens: int) -> int:
        return batch_charge(
            usage("qwen3-8b", input_tokens, output_tokens),
            usage("ft:qwen3-8b:o:0", output_tokens, input_tokens),
            least=least,
        )

    assert charge(a, b) <= charge(a + more_a, b + more_b)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8))
def test_a_receipt_rounds_once(lines: list[tuple[int, int]]) -> None:
    used = [usage("smollm2-135m-instruct", *tokens) for tokens in lines]
    charge = batch_charge(*used, least=False)
    exact_millionths = sum(i * 5_000_000 + o * 10_000_000 for i, o in lines)
    assert 0 <= charge * 1_000_000 - exact_millionths < 1_000_000


def test_prices_survive_storage_exactly() -> None:
    assert PriceList.model_validate_json(PRICES.model_dump_json()) == PRICES


def test_the_published_list_shows_the_decimals_of_the_file() -> None:
    wire = PRICES.to_wire()["models"]
    for model, prices in json.loads(SHIPPED)["models"].items():
        for name, amount in prices.items():
            assert nano_usd(wire[model][name]) == nano_usd(amount)


def test_every_base_that_trains_has_a_minimum_per_job() -> None:
    for name, base in CATALOG.items():
        if base.fine_tuning is not None:
            assert 0 < PRICES.of(name).minimum_per_job_nano_usd <= NANO_USD_PER_USD


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_usd_per_mtok", 0.049),
        ("input_usd_per_mtok", "-1"),
        ("input_usd_per_mtok", "0.0000000001"),
        ("input_usd_per_mtok", "free"),
        ("training_usd_per_mtok", None),
        ("discount", "0.1"),
    ],
)
def test_a_price_file_that_is_not_exact_is_refused(field: str, value: object) -> None:
    changed = json.loads(SHIPPED)
    changed["models"]["qwen3-8b"][field] = value
    with pytest.raises(pydantic.ValidationError):
        PriceList.from_json(json.dumps(changed))


def test_a_price_file_that_leaves_a_base_out_is_refused() -> None:
    changed = json.loads(SHIPPED)
    del changed["models"]["bge-m3"]
    with pytest.raises(pydantic.ValidationError, match="bge-m3"):
        PriceList.from_json(json.dumps(changed))


@pytest.mark.parametrize("base", PAGE_BASES)
def test_the_rates_of_three_bases_are_those_of_the_migration_page(base: str) -> None:
    prices = PRICES.to_wire()["models"][base]
    assert prices["training_usd_per_mtok"] == "0.29"
    assert prices["input_usd_per_mtok"] == "0.049"
    assert prices["output_usd_per_mtok"] == "0.115"
    assert (prices["minimum_per_job_usd"], prices["minimum_per_batch_usd"]) == ("0.50", "0.20")
