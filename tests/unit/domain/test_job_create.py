"""Bodies of POST /fine_tuning/jobs. Their refusals, word by word, are in
`test_refused_creates.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from domain.catalog import CATALOG
from domain.errors import InvalidRequest
from domain.inputs.hyperparameters import Hyperparameters
from domain.inputs.job_create import FineTuneCreate, parse_fine_tuning_create
from domain.log.stored import exact
from tests.unit.case_files import case_bytes, case_names

BARE = {"model": "qwen2.5-0.5b-instruct", "training_file": "file-1"}


def job(model: str = "qwen2.5-0.5b-instruct", **fields: Any) -> FineTuneCreate:
    return parse_fine_tuning_create({"model": model, "training_file": "file-1", **fields})


def refused_job(model: str = "qwen2.5-0.5b-instruct", **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        job(model, **fields)
    assert refused.value.code == "invalid_request"
    return refused.value


REFUSED_BODIES = {
    "01-top-level-n_epochs": ("n_epochs", "Unsupported parameter"),
    "02-both-places": ("hyperparameters", "twice"),
    "06-integrations-wandb": ("integrations", "integrations"),
    "08-suffix-65": ("suffix", "64"),
    "09-seed-minus-1": ("seed", "2,147,483,647"),
    "10-seed-2147483648": ("seed", "2,147,483,647"),
    "11-seed-true": ("seed", "integer"),
    "12-metadata-17": ("metadata", "16"),
    "13-metadata-number": ("metadata", "strings"),
    "15-method-reinforcement": ("method", "supervised"),
    "16-lr-and-multiplier": ("learning_rate_multiplier", "one or the other"),
    "17-epochs-string": ("n_epochs", "1 to 10"),
    "18-epochs-true": ("n_epochs", "1 to 10"),
    "19-epochs-11": ("n_epochs", "1 to 10"),
    "20-rank-65": ("lora_rank", "1 to 64"),
    "21-unknown-hyperparameter": ("warmup_ratio", "Unsupported parameter"),
    "22-gpt-model": ("model", "qwen2.5-7b-instruct"),
    "23-seq-8192-rank-32": ("lora_rank", "16 or lower"),
    "24-seq-4096-small-base": ("max_seq_length", "2,048"),
}


@pytest.mark.parametrize("name", case_names("job_bodies"))
def test_job_bodies_as_people_have_them(name: str) -> None:
    body = json.loads(case_bytes("job_bodies", name))
    expected = REFUSED_BODIES.get(name.removesuffix(".json"))
    if expected is None:
        assert parse_fine_tuning_create(body).training_file == "FILE_ID"
        return
    with pytest.raises(InvalidRequest) as refused:
        parse_fine_tuning_create(body)
    param, word = expected
    assert refused.value.param == param
    assert word in refused.value.message


def test_a_bare_body_takes_every_default_of_the_page() -> None:
    create = job()
    assert create.method == "supervised"
    assert create.adapter == "qlora"
    assert create.seed == 0
    assert create.hyperparameters == Hyperparameters(
        n_epochs=1,
        batch_size=8,
        learning_rate_multiplier=exact(1.0),
        learning_rate=exact(2e-4),
        lora_rank=16,
        lora_alpha=32,
        max_seq_length=2_048,
        beta=None,
    )
    auto = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    assert job(hyperparameters=auto) == create


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("qwen2.5-1.5b-instruct", "qlora"),
        ("qwen2.5-7b-instruct", "lora"),
        ("mistral-7b-instruct-v0.3", "lora"),
        ("qwen3-8b", "lora"),
        ("llama-3.1-8b-instruct", "lora"),
        ("gpt-oss-20b", "lora"),
        ("smollm2-135m-instruct", "lora"),
    ],
)
def test_the_default_adapter_is_the_bases(model: str, adapter: str) -> None:
    assert job(model).adapter == adapter


def test_null_is_absence() -> None:
    empty: dict[str, Any] = dict.fromkeys(
        (
            "validation_file",
            "hyperparameters",
            "method",
            "suffix",
            "seed",
            "metadata",
            "integrations",
        )
    )
    assert parse_fine_tuning_create(BARE | empty) == job()
    assert job(hyperparameters={"n_epochs": None, "learning_rate": None}) == job()


@pytest.mark.parametrize("name", ["dpo", "reinforcement"])
def test_null_is_the_absence_of_what_openai_has_and_is_not_asked_for(name: str) -> None:
    method = {"type": "supervised", "supervised": None, name: None}
    assert job(method=method) == job()


def test_null_is_the_absence_of_beta_where_it_has_no_meaning() -> None:
    assert job(hyperparameters={"beta": None}) == job()


def test_an_empty_object_beside_the_hyperparameters_is_no_second_one() -> None:
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}}
    assert job(hyperparameters={}, method=method).hyperparameters.n_epochs == 3
    method["supervised"] = {"hyperparameters": {}}
    assert job(hyperparameters={"n_epochs": 2}, method=method).hyperparameters.n_epochs == 2


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"suffixes": None}, "suffixes"),
        ({"hyperparameters": {"warmup_ratio": None}}, "warmup_ratio"),
        ({"method": {"type": "supervised", "full": None}}, "method.full"),
        (
            {"method": {"type": "supervised", "supervised": {"rank": None}}},
            "method.supervised.rank",
        ),
        ({"method": {"type": "dpo", "dpo": {"rank": None}}}, "method.dpo.rank"),
    ],
)
def test_an_unknown_name_is_refused_also_when_it_is_null(fields: dict[str, Any], path: str) -> None:
    refused = refused_job(**fields)
    assert refused.param == path
    assert refused.message.startswith(f"Unsupported parameter: {path}")


def test_the_pages_examples_are_accepted() -> None:
    python = job(
        "qwen2.5-7b-instruct",
        method={
            "type": "supervised",
            "supervised": {"adapter": "qlora", "hyperparameters": {"n_epochs": 2, "lora_rank": 32}},
        },
    )
    assert python.adapter == "qlora"
    assert (python.hyperparameters.n_epochs, python.hyperparameters.lora_rank) == (2, 32)
    node = job("qwen2.5-7b-instruct", hyperparameters={"n_epochs": 2, "lora_rank": 32})
    assert node.hyperparameters == python.hyperparameters
    dpo = job(
        "qwen2.5-7b-instruct", method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1}}}
    )
    assert (dpo.method, dpo.hyperparameters.beta) == ("dpo", exact(0.1))
    assert dpo.hyperparameters.learning_rate == exact(5e-6)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_a_method_can_be_the_name_of_an_adapter(adapter: str) -> None:
    named = job("qwen2.5-7b-instruct", method=adapter)
    assert (named.method, named.adapter) == ("supervised", adapter)


def test_the_ends_of_every_range_are_in_it_and_auto_is_the_default() -> None:
    for name, least, most in (
        ("n_epochs", 1, 10),
        ("learning_rate", 1e-6, 1e-2),
        ("learning_rate_multiplier", 0.01, 10),
        ("lora_rank", 1, 64),
    ):
        for value in (least, most):
            assert job("qwen2.5-7b-instruct", hyperparameters={name: value})
    auto = job(hyperparameters={"n_epochs": "auto", "learning_rate_multiplier": "auto"})
    assert auto.hyperparameters == job().hyperparameters
    assert (auto.hyperparameters.n_epochs, auto.hyperparameters.learning_rate) == (1, exact(2e-4))


def test_the_pages_lora_example_is_accepted() -> None:
    created = job(
        "qwen2.5-1.5b-instruct",
        method={
            "type": "supervised",
            "supervised": {"adapter": "lora", "hyperparameters": {"n_epochs": 2}},
        },
    )
    assert (created.method, created.adapter) == ("supervised", "lora")
    assert created.hyperparameters.n_epochs == 2


DPO = {"type": "dpo"}


@pytest.mark.parametrize("beta", [0, 2.01, -1, "high", True, "0.1"])
def test_a_beta_out_of_range_is_refused(beta: Any) -> None:
    assert refused_job(method=DPO, hyperparameters={"beta": beta}).param == "beta"


@pytest.mark.parametrize(("beta", "used"), [(2, 2.0), (0.001, 0.001), ("auto", 0.1)])
def test_a_beta_in_range_is_used(beta: Any, used: float) -> None:
    assert job(method=DPO, hyperparameters={"beta": beta}).hyperparameters.beta == exact(used)


@pytest.mark.parametrize("model", [name for name, base in CATALOG.items() if base.fine_tuning])
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_ranks_end_at_the_bases_maximum(model: str, method: Any) -> None:
    training = CATALOG[model].fine_tuning
    assert training is not None
    most = training.rank_max(method, seq_length=2_048)
    body = {"method": {"type": method}, "hyperparameters": {"lora_rank": most}}
    assert job(model, **body).hyperparameters.lora_rank == most
    body["hyperparameters"] = {"lora_rank": most + 1}
    refused = refused_job(model, **body)
    assert refused.param == "lora_rank"
    assert str(most) in refused.message


@pytest.mark.parametrize(
    ("hyperparameters", "param"),
    [
        ({"n_epochs": 0}, "n_epochs"),
        ({"n_epochs": 1.0}, "n_epochs"),
        ({"batch_size": 65}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"learning_rate_multiplier": 0.009}, "learning_rate_multiplier"),
        ({"learning_rate_multiplier": 10.1}, "learning_rate_multiplier"),
        ({"learning_rate_multiplier": True}, "learning_rate_multiplier"),
        ({"learning_rate": 9e-7}, "learning_rate"),
        ({"learning_rate": 0.011}, "learning_rate"),
        ({"learning_rate": "auto"}, "learning_rate"),
        ({"lora_rank": "auto"}, "lora_rank"),
        ({"lora_alpha": 257}, "lora_alpha"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"max_seq_length": 127}, "max_seq_length"),
        ({"max_seq_length": 8_193}, "max_seq_length"),
        ({"beta": 0.1}, "beta"),
    ],
)
def test_a_hyperparameter_out_of_range_is_named(
    hyperparameters: dict[str, Any], param: str
) -> None:
    assert refused_job("qwen2.5-7b-instruct", hyperparameters=hyperparameters).param == param


def test_dpo_takes_smaller_learning_rates_and_no_long_rows() -> None:
    assert job(method=DPO, hyperparameters={"learning_rate": 5e-8}).hyperparameters.learning_rate
    refused = refused_job(
        "qwen2.5-7b-instruct", method=DPO, hyperparameters={"max_seq_length": 4_096}
    )
    assert refused.param == "max_seq_length"


def test_long_rows_lower_no_rank_silently() -> None:
    long = job("qwen3-8b", hyperparameters={"max_seq_length": 8_192})
    assert long.hyperparameters.lora_rank == 16


@pytest.mark.parametrize(
    ("method", "param"),
    [
        ("full", "method"),
        ("supervised", "method"),
        ({}, "method"),
        ({"supervised": {}}, "method"),
        ([], "method"),
        ({"type": "supervised", "dpo": {}}, "method.dpo"),
        ({"type": "supervised", "supervised": []}, "method.supervised"),
        ({"type": "dpo", "dpo": {"rank": 1}}, "method.dpo.rank"),
        ({"type": "dpo", "dpo": {"adapter": "full"}}, "method.dpo.adapter"),
        (
            {"type": "supervised", "supervised": {"hyperparameters": []}},
            "method.supervised.hyperparameters",
        ),
    ],
)
def test_a_method_that_is_not_offered_is_named(method: Any, param: str) -> None:
    assert refused_job(method=method).param == param


def test_qlora_is_refused_where_only_lora_trains() -> None:
    assert refused_job("gpt-oss-20b", method="qlora").param == "method"


@pytest.mark.parametrize("model", ["qwen3.8-27b", "bge-m3", "ft:qwen3-8b:o1:0", ""])
def test_only_bases_that_train_are_accepted(model: str) -> None:
    assert refused_job(model).param == "model"


@pytest.mark.parametrize("field", ["model", "training_file"])
@pytest.mark.parametrize("value", [None, 7, "", []])
def test_required_fields_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_fine_tuning_create({"model": "qwen3-8b", "training_file": "file-1", field: value})
    assert refused.value.param == field
