"""What work can cost and how long it can take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import domain
from api.schemas.quotes import fine_tune_quote_object
from domain.catalog import CATALOG
from domain.errors import InvalidFile, InvalidRequest
from domain.inputs.job_create import parse_fine_tuning_create
from domain.inputs.training_file import TrainingFacts
from domain.ledger.money import nano_usd
from domain.ledger.prices import PriceList, training_lines
from domain.ledger.receipt import charge_of
from domain.log.stored import TokenUsage
from domain.work.quote import FineTuneQuote, JobInput, hold_out_rows, quote_batch, quote_fine_tune

PRICES = PriceList.from_json((Path(domain.__file__).parent / "ledger" / "prices.json").read_text())
TRAINABLE = [name for name, base in CATALOG.items() if base.fine_tuning]


def job_input(
    *,
    rows: int = 100,
    estimate: int = 20_000,
    bound: int = 80_000,
    kind: Any = "chat",
    size: int = 100_000,
    not_alternating: int | None = None,
    samples: dict[str, int] | None = None,
) -> JobInput:
    facts = TrainingFacts(
        kind=kind,
        rows=rows,
        messages=rows * 2,
        token_bounds=dict.fromkeys(TRAINABLE, bound),
        token_estimates=dict.fromkeys(TRAINABLE, estimate),
        sample_estimates=samples or {},
        first_row_that_does_not_alternate=not_alternating,
    )
    return JobInput(facts=facts, bytes=size)


def quote(
    model: str = "qwen2.5-7b-instruct",
    *,
    training: JobInput | None = None,
    validation: JobInput | None = None,
    **fields: Any,
) -> FineTuneQuote:
    create = parse_fine_tuning_create({"model": model, "training_file": "file-1", **fields})
    return quote_fine_tune(
        create,
        training=training if training is not None else job_input(),
        validation=validation,
        prices=PRICES,
    )


def refusal(*args: Any, **fields: Any) -> InvalidFile:
    with pytest.raises(InvalidFile) as refused:
        quote(*args, **fields)
    return refused.value


def test_a_quote_has_every_field_of_the_page() -> None:
    wire = fine_tune_quote_object(
        quote(hyperparameters={"n_epochs": 3}, training=job_input(bound=250_000))
    )
    assert wire["estimate"] is True
    assert wire["training_tokens_per_epoch_upper_bound"] == 250_000
    assert wire["training_tokens_upper_bound"] == 750_000
    assert (wire["n_epochs"], wire["eval_rows"]) == (3, 5)
    assert wire["per_token"] == {
        "trained_usd_per_mtok": 0.29,
        "minimum_usd": 0.5,
        "max_charge_usd": 0.5,
    }
    assert wire["gpu_memory_class_gb"] == 48
    assert wire["estimated_seconds"] > 600
    assert 0 < wire["estimated_usd"] < wire["per_token"]["minimum_usd"]
    assert "epoch" in wire["basis"]


def test_the_maximum_counts_the_upper_bound_and_the_time_the_estimate() -> None:
    small = quote(training=job_input(estimate=1_000, bound=10_000_000))
    large = quote(training=job_input(estimate=1_000_000, bound=10_000_000))
    assert small.maximum_nano_usd == large.maximum_nano_usd == nano_usd("2.90")
    assert small.estimated_seconds < large.estimated_seconds


@given(st.integers(1, 10**8), st.integers(1, 10), st.integers(0, 10**9), st.booleans())
def test_no_charge_within_the_bound_passes_the_maximum(
    bound: int, epochs: int, trained: int, dpo: bool
) -> None:
    kind = "preference" if dpo else "chat"
    found = quote(
        training=job_input(bound=bound, kind=kind),
        method={"type": "dpo" if dpo else "supervised"},
        hyperparameters={"n_epochs": epochs},
    )
    charge = charge_of(
        training_lines(
            prices=PRICES,
            base="qwen2.5-7b-instruct",
            method="dpo" if dpo else "supervised",
            trained_tokens=min(trained, bound * epochs),
        ),
        minimum_nano_usd=found.minimum_nano_usd,
    )
    assert charge <= found.maximum_nano_usd


@pytest.mark.parametrize(
    ("rows", "held"), [(11, 1), (39, 1), (40, 2), (100, 5), (20_000, 1_000), (50_000, 1_000)]
)
def test_five_percent_is_held_out(rows: int, held: int) -> None:
    assert hold_out_rows(rows) == held
    assert quote(training=job_input(rows=rows)).eval_rows == held


def test_ten_rows_must_remain_besides_those_held_out() -> None:
    refused = refusal(training=job_input(rows=10))
    assert refused.code == "invalid_file_format"
    assert "10 rows" in refused.message
    assert quote(training=job_input(rows=11)).eval_rows == 1
    validated = quote(training=job_input(rows=10), validation=job_input(rows=3))
    assert validated.eval_rows == 3
    assert refusal(training=job_input(rows=9), validation=job_input(rows=3)).param == (
        "training_file"
    )


def test_both_files_are_at_most_64_mebibytes() -> None:
    most = 64 * 1024 * 1024
    quote(training=job_input(size=most), validation=job_input(size=most))
    assert "64 MiB" in refusal(training=job_input(size=most + 1)).message
    assert refusal(validation=job_input(size=most + 1)).param == "validation_file"


def test_kind_of_rows_and_method_must_match() -> None:
    pairs = job_input(kind="preference")
    assert refusal(training=pairs).code == "invalid_file_format"
    assert refusal(method={"type": "dpo"}).code == "invalid_file_format"
    assert refusal(validation=pairs).param == "validation_file"
    quote(training=pairs, method={"type": "dpo"})


def test_only_mistral_needs_alternating_roles() -> None:
    crooked = job_input(not_alternating=3)
    refused = refusal("mistral-7b-instruct-v0.3", training=crooked)
    assert (refused.code, refused.line) == ("invalid_file_format", 3)
    assert "line 3" in refused.message
    assert refusal("mistral-7b-instruct-v0.3", validation=crooked).param == "validation_file"
    quote("qwen2.5-0.5b-instruct", training=crooked)


PAGE_SIZES = [
    ("qwen2.5-0.5b-instruct", "qlora", 16_500_000),
    ("qwen2.5-1.5b-instruct", "qlora", 5_940_000),
    ("qwen2.5-7b-instruct", "lora", 5_280_000),
    ("qwen2.5-7b-instruct", "qlora", 1_980_000),
    ("mistral-7b-instruct-v0.3", "lora", 4_950_000),
    ("mistral-7b-instruct-v0.3", "qlora", 1_848_000),
    ("qwen3-8b", "lora", 4_620_000),
    ("qwen3-8b", "qlora", 1_650_000),
    ("llama-3.1-8b-instruct", "lora", 4_752_000),
    ("llama-3.1-8b-instruct", "qlora", 1_782_000),
    ("gpt-oss-20b", "lora", 858_000),
    ("qwen3.5-9b", "lora", 2_640_000),
]


@pytest.mark.parametrize(("model", "adapter", "tokens"), PAGE_SIZES)
def test_the_pages_largest_sizes_are_where_the_time_limit_is(
    model: str, adapter: str, tokens: int
) -> None:
    # A validation file of next to nothing, so that evaluation takes a second.
    little = job_input(rows=1, estimate=1)
    speed = tokens // 6_600
    quote(model, training=job_input(estimate=tokens - speed), validation=little, method=adapter)
    refused = refusal(
        model, training=job_input(estimate=tokens + 1), validation=little, method=adapter
    )
    assert refused.code == "job_too_large"
    remedies = ("fewer rows or epochs", "a smaller base model")
    for fact in ("7,200", f"{tokens + 1:,}", f"{tokens - speed:,}", *remedies):
        assert fact in refused.message
    duration = re.search(r"could take about ([\d,]+) seconds", refused.message)
    assert duration is not None
    assert 7_200 < int(duration[1].replace(",", "")) <= 7_202


def test_exactly_what_the_refusal_says_fits_is_accepted() -> None:
    refused = refusal(
        training=job_input(estimate=3_000_000),
        validation=job_input(estimate=300_000),
        hyperparameters={"n_epochs": 2},
    )
    fit = re.search(r"About ([\d,]+) training tokens fit", refused.message)
    assert fit is not None
    tokens = int(fit.group(1).replace(",", ""))
    validation = job_input(estimate=300_000)
    quote(training=job_input(estimate=tokens), validation=validation)
    refusal(training=job_input(estimate=tokens + 800), validation=validation)


def test_dpo_fits_half_as_much() -> None:
    little = job_input(rows=1, estimate=1, kind="preference")
    method = {"type": "dpo"}
    fits = job_input(kind="preference", estimate=2_639_200)
    over = job_input(kind="preference", estimate=2_640_001)
    quote(training=fits, validation=little, method=method)
    assert refusal(training=over, validation=little, method=method).code == "job_too_large"


def test_a_job_that_trains_turn_by_turn_is_refused_in_the_tokens_that_are_billed() -> None:
    def turns(billed: int) -> JobInput:
        return job_input(estimate=billed, samples={"qwen3-8b": 3 * billed})

    little = job_input(rows=10, estimate=100)
    refused = refusal("qwen3-8b", training=turns(2_000_000), validation=little)
    assert refused.code == "job_too_large"
    assert "an estimated 2,000,000 training tokens, which train turn by turn" in refused.message
    assert "the time of 6,000,000;" in refused.message
    fit = re.search(r"About ([\d,]+) training tokens fit", refused.message)
    assert fit is not None
    tokens = int(fit.group(1).replace(",", ""))
    quote("qwen3-8b", training=turns(tokens), validation=little)
    refusal("qwen3-8b", training=turns(tokens + 1_000), validation=little)


def test_a_base_without_a_published_price_is_refused_by_name() -> None:
    models = {name: each for name, each in PRICES.models.items() if name != "qwen2.5-7b-instruct"}
    create = parse_fine_tuning_create({"model": "qwen2.5-7b-instruct", "training_file": "file-1"})
    with pytest.raises(InvalidRequest, match="has no published price") as refused:
        quote_fine_tune(
            create,
            training=job_input(),
            validation=None,
            prices=PRICES.model_copy(update={"models": models}),
        )
    assert (refused.value.status, refused.value.param) == (400, "model")
    with pytest.raises(InvalidRequest, match="has no published price"):
        quote_batch(
            base=CATALOG["qwen2.5-7b-instruct"],
            requests=1,
            worst_case=(TokenUsage(model="qwen2.5-7b-instruct", input_tokens=1, output_tokens=1),),
            prices=PRICES.model_copy(update={"models": models}),
        )


def test_a_machine_without_a_published_price_is_refused() -> None:
    create = parse_fine_tuning_create({"model": "qwen2.5-7b-instruct", "training_file": "file-1"})
    with pytest.raises(InvalidRequest, match="no published price") as refused:
        quote_fine_tune(
            create,
            training=job_input(),
            validation=None,
            prices=PRICES.model_copy(update={"machine_hour_usd": {}}),
        )
    assert refused.value.param == "model"


def test_a_file_that_is_older_than_the_base_is_to_be_uploaded_again() -> None:
    given = job_input()
    for name in ("token_bounds", "token_estimates"):
        counted = {n: v for n, v in getattr(given.facts, name).items() if n != "qwen3-8b"}
        given = JobInput(facts=given.facts.model_copy(update={name: counted}), bytes=given.bytes)
    refused = refusal("qwen3-8b", training=given)
    assert (refused.code, refused.param) == ("invalid_file_format", "training_file")
    assert "Upload it again" in refused.message


def test_samples_count_for_time_and_never_for_money() -> None:
    plain = quote("qwen3-8b", training=job_input(estimate=700_000))
    sampled = quote(
        "qwen3-8b", training=job_input(estimate=700_000, samples={"qwen3-8b": 1_400_000})
    )
    assert sampled.estimated_seconds >= plain.estimated_seconds + 1_000
    assert sampled.maximum_nano_usd == plain.maximum_nano_usd


@pytest.mark.parametrize(
    ("model", "fields", "memory"),
    [
        ("qwen2.5-0.5b-instruct", {}, 24),
        ("qwen2.5-7b-instruct", {"method": "qlora"}, 48),
        ("qwen2.5-7b-instruct", {"hyperparameters": {"max_seq_length": 8_192}}, 48),
        ("smollm2-135m-instruct", {}, None),
    ],
)
def test_the_quote_says_which_machine_trains(
    model: str, fields: dict[str, Any], memory: int | None
) -> None:
    assert quote(model, **fields).gpu_memory_class_gb == memory


def test_dpo_trains_on_48_gb_at_its_own_rate() -> None:
    found = quote(
        "qwen2.5-0.5b-instruct", training=job_input(kind="preference"), method={"type": "dpo"}
    )
    assert found.gpu_memory_class_gb == 48
    assert found.trained_rate_nano_usd_per_mtok == nano_usd("0.16")


def test_a_batch_is_held_at_its_worst_case_or_its_minimum() -> None:
    base = CATALOG["qwen2.5-7b-instruct"]
    small = quote_batch(
        base=base,
        requests=1,
        worst_case=(TokenUsage(model=base.id, input_tokens=10, output_tokens=10),),
        prices=PRICES,
    )
    assert small.maximum_nano_usd == small.minimum_nano_usd == nano_usd("0.20")
    large = quote_batch(
        base=base,
        requests=2,
        worst_case=(
            TokenUsage(model=base.id, input_tokens=5_000_000, output_tokens=0),
            TokenUsage(model=f"ft:{base.id}:o:0", input_tokens=5_000_000, output_tokens=1_000_000),
        ),
        prices=PRICES,
    )
    assert large.maximum_nano_usd == nano_usd("0.605")
