"""Batches over HTTP."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from domain.commands.batches import FailBatch, fail_batch
from domain.inputs.batch_line import LineError
from tests.acceptance.conftest import Served
from tests.acceptance.stand_in_worker import BASE, finish, run_batch

ENDPOINT = "/v1/chat/completions"


def test_a_batch_runs_to_its_files_usage_and_charge(served: Served) -> None:
    client = served.openai()
    file = client.files.create(file=b"{}\n" * 3, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=ENDPOINT,
        completion_window="24h",
        extra_body={"completion_window": "72h"},
        metadata={"night": "yes"},
    )
    assert batch.status == "validating"
    assert batch.completion_window == "72h"
    assert batch.expires_at == batch.created_at + 72 * 3600
    assert batch.metadata == {"night": "yes"}
    assert batch.request_counts is not None
    assert batch.request_counts.total == 0
    run_batch(served, batch.id, requests=3)
    finalizing = client.batches.retrieve(batch.id)
    assert finalizing.status == "finalizing"
    assert finalizing.model == BASE
    finish(served, batch.id, output=b'{"custom_id":"a"}\n{}\n', errors=b"{}\n")
    done = client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (
        30,
        10,
        40,
    )
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    assert done.gridline["charged_usd"] == "0.01"  # type: ignore[attr-defined]
    assert done.output_file_id is not None
    assert client.files.content(done.output_file_id).text.startswith('{"custom_id":"a"}')
    assert done.error_file_id is not None
    assert client.files.content(done.error_file_id).text == "{}\n"
    for file_id in (done.output_file_id, done.error_file_id):
        assert client.files.retrieve(file_id).purpose == "batch_output"
    assert done.gridline["api_key_id"] == served.tenant.key_id  # type: ignore[attr-defined]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_batch_is_cancelled_twice_as_once(served: Served) -> None:
    client = served.openai()
    file = client.files.create(file=b"{}", purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    first = client.batches.cancel(batch.id)
    assert first.status == "cancelling"
    assert client.batches.cancel(batch.id) == first


def test_a_failed_batch_lists_its_faults(served: Served) -> None:
    client = served.openai()
    file = client.files.create(file=b"nope", purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    fault = LineError(code="invalid_json_line", message="Line 1.", param=None, line=1)
    served.run(fail_batch, FailBatch(batch_id=batch.id, errors=(fault,)))
    failed = client.batches.retrieve(batch.id)
    assert failed.status == "failed"
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert [(each.code, each.line) for each in failed.errors.data] == [("invalid_json_line", 1)]


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"endpoint": "/v1/responses"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"color": "red"}, 400, "color"),
    ],
)
def test_a_refused_create_names_its_field(
    served: Served, changes: dict[str, Any], status: int, param: str
) -> None:
    file = served.openai().files.create(file=b"{}", purpose="batch")
    body = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"} | changes
    with served.http() as http:
        answer = http.post("/openai/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_the_asynchronous_sdk_creates_lists_and_cancels(served: Served) -> None:
    async with served.async_openai() as client:
        file = await client.files.create(file=b"{}", purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        assert [each.id async for each in client.batches.list()] == [batch.id]
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
