"""What every refusal of a create says, to the byte: clients match codes, people read the rest.

`refused_creates.json` has, for each answer, the changes of a good body that get it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from domain.catalog import CATALOG, fine_tuning_of
from domain.errors import InvalidRequest
from domain.inputs import batch_create, create_fields, hyperparameters, job_create
from domain.inputs.batch_create import parse_batch_create
from domain.inputs.body import Body
from domain.inputs.job_create import parse_fine_tuning_create

TABLE = json.loads((Path(__file__).parent / "refused_creates.json").read_text())
GOOD: dict[str, dict[str, Any]] = {
    "job": {"model": "qwen2.5-7b-instruct", "training_file": "file-1"},
    "batch": {
        "input_file_id": "file-1",
        "endpoint": "/v1/embeddings",
        "completion_window": "72h",
    },
}
READ: dict[str, Callable[[object], object]] = {
    "job": parse_fine_tuning_create,
    "batch": parse_batch_create,
}


def changed(kind: str, change: object) -> object:
    if not isinstance(change, dict):
        return change
    body = GOOD[kind] | change
    return {name: value for name, value in body.items() if value != "(absent)"}


def rows() -> Iterator[Any]:
    for answer in TABLE:
        for change in answer["changes"]:
            name = f"{answer['body']} {json.dumps(change)[:60]}"
            yield pytest.param(answer["body"], change, answer["param"], answer["message"], id=name)


@pytest.mark.parametrize(("kind", "change", "param", "message"), list(rows()))
def test_a_refused_create_says_what_it_always_said(
    kind: str, change: object, param: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        READ[kind](changed(kind, change))

    assert (refused.value.status, refused.value.code) == (400, "invalid_request")
    assert (refused.value.param, refused.value.message) == (param, message)


@pytest.mark.parametrize("kind", GOOD)
def test_the_bodies_that_the_table_changes_are_good(kind: str) -> None:
    READ[kind](GOOD[kind])


@pytest.mark.parametrize(
    "name", ["n_epochs", "lora_rank", "lora_alpha", "max_seq_length", "learning_rate"]
)
def test_a_number_of_any_length_is_out_of_range_and_no_failure(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_fine_tuning_create(GOOD["job"] | {"hyperparameters": {name: 10**400}})
    assert refused.value.param == name


def test_of_several_faults_the_unknown_name_comes_first() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_fine_tuning_create({"model": 7, "seed": -1, "n_epochs": 3})
    assert refused.value.param == "n_epochs"


def bodies() -> set[type[Body]]:
    return {
        each
        for module in (batch_create, create_fields, hyperparameters, job_create)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Body) and each is not Body
    }


TAGS = {"type"}
"""Read already when the body is chosen by it."""


@pytest.mark.parametrize("body", sorted(bodies(), key=lambda each: each.__name__))
def test_no_field_is_refused_in_words_of_the_library(body: type[Body]) -> None:
    tuning = hyperparameters._Tuning(
        base=CATALOG["qwen3-8b"], training=fine_tuning_of("qwen3-8b"), method="supervised"
    )
    nothing = object()
    with pytest.raises(ValidationError) as refused:
        body.model_validate(dict.fromkeys(body.model_fields, nothing), context=tuning)

    library = {
        fault["loc"]: fault["type"]
        for fault in refused.value.errors()
        if fault["type"] not in ("said", "none_required", "model_type")
        and fault["loc"][-1] not in TAGS
    }
    assert not library
