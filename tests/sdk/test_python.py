"""The customer's whole loop through the synchronous Python SDK, every call as its pages show it.

Once with a client that is built without arguments, once with one that validates every answer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from openai.types.fine_tuning import FineTuningJob

from tests.sdk.conftest import Customer, Product
from tests.sdk.customer_files import (
    BASE,
    QUESTIONS,
    ROWS,
    WORK_SECONDS_MAX,
    answers_by_id,
    nano_usd,
    request_lines,
    write_training_file,
)


@pytest.fixture(params=["environment only", "strict"])
def client(
    request: pytest.FixtureRequest, customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenAI]:
    if request.param == "strict":
        strict = OpenAI(
            base_url=customer.base_url + "/",
            api_key=customer.api_key,
            _strict_response_validation=True,
        )
        with strict:
            yield strict
        return
    for name, value in customer.environment().items():
        monkeypatch.setenv(name, value)
    with OpenAI() as plain:
        yield plain


def ended_job(client: OpenAI, job_id: str) -> FineTuningJob:
    deadline = time.monotonic() + WORK_SECONDS_MAX
    while (job := client.fine_tuning.jobs.retrieve(job_id)).finished_at is None:
        assert time.monotonic() < deadline, job
        time.sleep(0.2)
    return job


def running_job(client: OpenAI, job_id: str) -> None:
    deadline = time.monotonic() + WORK_SECONDS_MAX
    while (job := client.fine_tuning.jobs.retrieve(job_id)).status != "running":
        assert time.monotonic() < deadline, job
        time.sleep(0.2)


def batch_in(client: OpenAI, batch_id: str, *statuses: str) -> Batch:
    deadline = time.monotonic() + WORK_SECONDS_MAX
    while (batch := client.batches.retrieve(batch_id)).status not in statuses:
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    return batch


def create_batch(client: OpenAI, lines: bytes) -> Batch:
    requests = client.files.create(file=("requests.jsonl", lines), purpose="batch")
    return client.batches.create(
        input_file_id=requests.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"from": "python"},
    )


def receipt_of(client: OpenAI, work_id: str) -> dict[str, Any]:
    receipt = client.get(f"/gridline/receipts/{work_id}", cast_to=object)
    assert isinstance(receipt, dict)
    return receipt


def test_files_go_up_as_streams_and_come_back_as_they_were(client: OpenAI, tmp_path: Path) -> None:
    path = write_training_file(tmp_path, name="entraînement.jsonl")
    with path.open("rb") as stream:
        first = client.files.create(
            file=stream,
            purpose="fine-tune",
            expires_after={"anchor": "created_at", "seconds": 86_400},
        )
    assert (first.filename, first.bytes) == (path.name, path.stat().st_size)
    assert first.expires_at == first.created_at + 86_400
    assert client.files.wait_for_processing(first.id).status == "processed"
    assert client.files.retrieve(first.id) == first
    assert client.files.content(first.id).read() == path.read_bytes()
    others = [client.files.create(file=path, purpose="fine-tune") for _ in range(4)]
    requests = client.files.create(file=request_lines(BASE), purpose="batch")
    expected = [file.id for file in reversed([first, *others, requests])]
    assert [file.id for file in client.files.list(limit=2)] == expected
    assert [file.id for file in client.files.list(limit=2, order="asc")] == expected[::-1]
    assert [file.id for file in client.files.list(purpose="batch")] == [requests.id]
    assert client.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError) as gone:
        client.files.content(first.id)
    assert gone.value.code == "not_found"


def test_a_model_is_trained_served_downloaded_explained_and_deleted(
    client: OpenAI, tmp_path: Path
) -> None:
    path = write_training_file(tmp_path)
    with path.open("rb") as stream:
        training = client.files.create(file=stream, purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=BASE,
        training_file=training.id,
        suffix="tickets",
        seed=7,
        metadata={"team": "support"},
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 4}},
        },
    )
    quote = job.gridline["quote"]  # type: ignore[attr-defined]
    assert (job.seed, job.metadata) == (7, {"team": "support"})
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (2, 4)
    done = ended_job(client, job.id)
    assert (done.status, done.error) == ("succeeded", None)
    name = done.fine_tuned_model
    assert name is not None
    assert name.startswith(f"ft:{BASE}:{done.organization_id}:")
    check_history(client, done)
    check_model(client, name)
    batch_receipt = check_mixed_batch(client, name)
    check_adapter(client, name)
    receipt = receipt_of(client, job.id)
    assert receipt["charge_usd"] == done.gridline["charged_usd"]  # type: ignore[attr-defined]
    assert receipt["charge"]["lines"][0]["tokens"] == done.trained_tokens
    assert float(receipt["charge_usd"]) <= quote["per_token"]["max_charge_usd"]
    check_books(client, receipt, batch_receipt)
    assert client.models.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name)
    assert name not in [model.id for model in client.models.list()]


def check_history(client: OpenAI, job: FineTuningJob) -> None:
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    assert len(events) == len({event.id for event in events}) > 3
    assert [event.created_at for event in events] == sorted(
        (event.created_at for event in events), reverse=True
    )
    assert any(event.type == "metrics" for event in events)
    [checkpoint] = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert checkpoint.fine_tuned_model_checkpoint == job.fine_tuned_model
    assert checkpoint.step_number == 2 * -(-(ROWS - 2) // 4)
    assert checkpoint.metrics.full_valid_loss is not None
    assert [each.id for each in client.fine_tuning.jobs.list(limit=1)] == [job.id]


def check_model(client: OpenAI, name: str) -> None:
    models = {model.id: model for model in client.models.list()}
    assert {BASE, name} <= models.keys()
    assert client.models.retrieve(name) == models[name]
    assert client.models.retrieve(BASE).id == BASE


def check_mixed_batch(client: OpenAI, name: str) -> dict[str, Any]:
    """Runs a batch of which every other line names the fine-tuned model; its receipt."""
    batch = create_batch(client, request_lines(BASE, name))
    assert batch.status == "validating"
    batch = batch_in(client, batch.id, "completed")
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {
        "total": QUESTIONS, "completed": QUESTIONS, "failed": 0,
    }  # fmt: skip
    assert (batch.error_file_id, batch.metadata) == (None, {"from": "python"})
    assert batch.output_file_id is not None
    answers = answers_by_id(client.files.content(batch.output_file_id).text)
    assert [answers[f"q{n}"]["model"] for n in range(QUESTIONS)] == [BASE, name] * (QUESTIONS // 2)
    texts = [answers[f"q{n}"]["choices"][0]["message"]["content"] for n in range(QUESTIONS)]
    assert {text.partition(":")[0] for text in texts[::2]} == {"base"}
    assert "base" not in {text.partition(":")[0] for text in texts[1::2]}
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(
        answer["usage"]["total_tokens"] for answer in answers.values()
    )
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    return receipt_of(client, batch.id)


def check_adapter(client: OpenAI, name: str) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        answer = client.get(f"/gridline/adapters/{name}/files/{file}", cast_to=httpx2.Response)
        assert answer.headers["x-gridline-sha256"] == hashlib.sha256(answer.content).hexdigest()


def check_books(client: OpenAI, *receipts: dict[str, Any]) -> None:
    """The statement and the balances are what the receipts say."""
    charged = sum(nano_usd(receipt["charge_usd"]) for receipt in receipts)
    credit: Any = client.get("/gridline/credits", cast_to=object)
    assert nano_usd(credit["charged_usd"]) == charged
    assert nano_usd(credit["available_usd"]) == nano_usd(credit["granted_usd"]) - charged
    assert (credit["holds"], nano_usd(credit["held_usd"])) == ([], 0)
    deadline = time.monotonic() + WORK_SECONDS_MAX
    statement: Any = {"is_current": False}
    while not statement["is_current"]:
        assert time.monotonic() < deadline
        statement = client.get("/gridline/statement", cast_to=object)
    assert sum(nano_usd(line["charged_usd"]) for line in statement["data"]) == charged
    assert statement["closing"]["available_usd"] == credit["available_usd"]


def test_work_is_cancelled_and_each_refusal_is_asked_for_once(
    client: OpenAI, product: Product, tmp_path: Path
) -> None:
    with write_training_file(tmp_path, step_ms=1_000).open("rb") as stream:
        training = client.files.create(file=stream, purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=BASE, training_file=training.id, hyperparameters={"n_epochs": 9}
    )
    batch = create_batch(client, request_lines(BASE, delay_ms=300, questions=60))
    with product.refused(openai.RateLimitError, "POST", "/batches", tries=3) as limited:
        create_batch(client, request_lines(BASE))
    assert limited.value.code == "limit_exceeded"
    batch_in(client, batch.id, "in_progress")
    running_job(client, job.id)
    with product.refused(openai.ConflictError, "DELETE", "/files/{file_id}") as in_use:
        client.files.delete(training.id)
    assert in_use.value.code == "invalid_state"
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = batch_in(client, batch.id, "cancelled")
    assert batch.request_counts is not None
    assert batch.request_counts.completed + batch.request_counts.failed == 60
    with product.refused(
        openai.ConflictError, "POST", "/fine_tuning/jobs/{job_id}/cancel"
    ) as job_ended:
        client.fine_tuning.jobs.cancel(job.id)
    assert job_ended.value.code == "invalid_state"
    with product.refused(openai.ConflictError, "POST", "/batches/{batch_id}/cancel") as batch_ended:
        client.batches.cancel(batch.id)
    assert batch_ended.value.code == "invalid_state"
    assert receipt_of(client, job.id)["charge_usd"] == "0.00"
    check_books(client, receipt_of(client, job.id), receipt_of(client, batch.id))


def test_refusals_are_the_exceptions_that_openai_documents(client: OpenAI, tmp_path: Path) -> None:
    training = client.files.create(file=write_training_file(tmp_path), purpose="fine-tune")
    with pytest.raises(openai.AuthenticationError) as unknown_key:
        client.with_options(api_key="gl_wrong").models.list()
    assert unknown_key.value.code == "invalid_api_key"
    assert unknown_key.value.request_id
    with pytest.raises(openai.BadRequestError) as bad_row:
        client.files.create(file=("t.jsonl", b'{"messages": []}\n'), purpose="fine-tune")
    assert (bad_row.value.code, bad_row.value.type) == ("invalid_messages", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as unknown_field:
        client.fine_tuning.jobs.create(
            model=BASE, training_file=training.id, extra_body={"turbo": True}
        )
    assert (unknown_field.value.code, unknown_field.value.param) == ("invalid_request", "turbo")
    with pytest.raises(openai.BadRequestError) as out_of_range:
        client.fine_tuning.jobs.create(
            model=BASE, training_file=training.id, hyperparameters={"n_epochs": 0}
        )
    assert out_of_range.value.param == "n_epochs"
    with pytest.raises(openai.NotFoundError) as no_file:
        client.batches.create(
            input_file_id="file-none", endpoint="/v1/chat/completions", completion_window="24h"
        )
    assert (no_file.value.code, no_file.value.param) == ("not_found", "input_file_id")
    with pytest.raises(openai.NotFoundError) as not_offered:
        client.chat.completions.create(model=BASE, messages=[{"role": "user", "content": "Hi"}])
    assert not_offered.value.code == "not_offered"
    failed = create_batch(client, b'{"custom_id": "a"}\n')
    failed = batch_in(client, failed.id, "failed")
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert failed.errors.data[0].line == 1
    assert failed.request_counts is not None
    assert failed.request_counts.total == 0
