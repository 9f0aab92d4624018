"""Bodies of POST /batches, and the fields that several creates have. Their refusals, word by word,
are in `test_refused_creates.py`."""

from __future__ import annotations

from typing import Any

import pytest

from domain.errors import InvalidRequest
from domain.inputs.batch_create import parse_batch_create
from domain.inputs.body import read_body
from domain.inputs.create_fields import ExpiresAfter

BATCH = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "72h"}


def refused_batch(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        parse_batch_create({**BATCH, **fields})
    assert refused.value.code == "invalid_request"
    return refused.value


def test_a_batch_create_is_read() -> None:
    expiry = {"anchor": "created_at", "seconds": 3_600}
    create = parse_batch_create({**BATCH, "output_expires_after": expiry, "metadata": None})
    assert (create.endpoint, create.completion_window) == ("/v1/embeddings", "72h")
    assert create.output_expires_seconds == 3_600
    assert create.metadata is None


@pytest.mark.parametrize("endpoint", ["/v1/responses", "/v1/completions"])
def test_an_endpoint_that_answers_texts_elsewhere_is_told_the_one_to_use(endpoint: str) -> None:
    refused = refused_batch(endpoint=endpoint)
    assert refused.param == "endpoint"
    assert f"endpoint {endpoint} is not offered" in refused.message
    assert "Use endpoint /v1/chat/completions" in refused.message


@pytest.mark.parametrize("field", ["endpoint", "completion_window", "input_file_id"])
def test_null_is_the_absence_of_a_required_field(field: str) -> None:
    assert refused_batch(**{field: None}).message == f"Missing required parameter: {field}"


@pytest.mark.parametrize("seconds", [3_600, 2_592_000])
def test_files_may_expire_in_an_hour_to_thirty_days(seconds: int) -> None:
    create = parse_batch_create(
        {**BATCH, "output_expires_after": {"anchor": "created_at", "seconds": seconds}}
    )
    assert create.output_expires_seconds == seconds


def test_the_path_of_a_field_within_a_form_is_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_body(ExpiresAfter, {"anchor": "created_at", "seconds": "60"}, at="expires_after")
    assert refused.value.param == "expires_after.seconds"


def test_metadata_is_at_most_sixteen_short_pairs() -> None:
    full = {f"{n:064}": "v" * 512 for n in range(16)}
    assert parse_batch_create({**BATCH, "metadata": full}).metadata == full
    assert parse_batch_create({**BATCH, "metadata": {}}).metadata == {}
