"""Published prices and the charges made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import domain
from domain.catalog import CATALOG
from domain.ledger.money import NANO_USD_PER_USD, nano_usd
from domain.ledger.prices import PriceList, charge_for_batch, charge_for_training
from domain.stored import TokenUsage

SHIPPED = (Path(domain.__file__).parent / "ledger" / "prices.json").read_text()
PRICES = PriceList.from_json(SHIPPED)
PAGE_BASES = ["llama-3.1-8b-instruct", "qwen2.5-7b-instruct", "mistral-7b-instruct-v0.3"]


def usage(model: str, input_tokens: int, output_tokens: int) -> TokenUsage:
    return TokenUsage(model=model, input_tokens=input_tokens, output_tokens=output_tokens)


@pytest.mark.parametrize("base", PAGE_BASES)
def test_the_pages_worked_example_comes_out_to_the_cent(base: str) -> None:
    training = charge_for_training(
        prices=PRICES.of(base), method="supervised", trained_tokens=750_000, with_minimum=True
    )
    batch = charge_for_batch(
        prices=PRICES,
        usage=[usage(f"ft:{base}:o3f9a1c2d4e5:7b2c9e41a0d3", 10_000_000, 1_000_000)],
        any_succeeded=True,
        with_minimum=True,
    )
    assert (training, batch) == (nano_usd("0.50"), nano_usd("0.605"))
    assert training + batch == nano_usd("1.105")


def test_a_small_batch_costs_its_minimum_once_a_line_succeeded() -> None:
    lines = [usage("qwen2.5-7b-instruct", 10, 10)]
    charge = charge_for_batch(prices=PRICES, usage=lines, any_succeeded=True, with_minimum=True)
    assert charge == nano_usd("0.20")
    cut = charge_for_batch(prices=PRICES, usage=lines, any_succeeded=True, with_minimum=False)
    assert cut == 10 * 49 + 10 * 115
    none = charge_for_batch(prices=PRICES, usage=lines, any_succeeded=False, with_minimum=True)
    assert none == 0


def test_a_failure_on_the_customers_side_pays_no_minimum() -> None:
    charge = charge_for_training(
        prices=PRICES.of("qwen3-8b"), method="dpo", trained_tokens=1_000, with_minimum=False
    )
    assert charge == 1_000 * 660


TOKENS = st.integers(min_value=0, max_value=10**10)


@given(TOKENS, TOKENS, TOKENS, TOKENS, st.booleans())
def test_more_tokens_never_cost_less(a: int, b: int, more_a: int, more_b: int, least: bool) -> None:
    def charge(input_tokens: int, output_tokens: int) -> int:
        return charge_for_batch(
            prices=PRICES,
            usage=[
                usage("qwen3-8b", input_tokens, output_tokens),
                usage("ft:qwen3-8b:o:0", output_tokens, input_tokens),
            ],
            any_succeeded=True,
            with_minimum=least,
        )

    assert charge(a, b) <= charge(a + more_a, b + more_b)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8))
def test_a_receipt_rounds_once(lines: list[tuple[int, int]]) -> None:
    charge = charge_for_batch(
        prices=PRICES,
        usage=[usage("smollm2-135m-instruct", *tokens) for tokens in lines],
        any_succeeded=True,
        with_minimum=False,
    )
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
