"""The customer's whole loop through the asynchronous Python SDK, with everything at once."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import Batch
from openai.types.fine_tuning import FineTuningJob

from tests.sdk.conftest import Customer, Product
from tests.sdk.customer_files import (
    BASE,
    QUESTIONS,
    WORK_SECONDS_MAX,
    answers_by_id,
    nano_usd,
    request_lines,
    write_training_file,
)


@pytest_asyncio.fixture
async def client(customer: Customer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncOpenAI]:
    """Built without arguments."""
    for name, value in customer.environment().items():
        monkeypatch.setenv(name, value)
    async with AsyncOpenAI() as plain:
        yield plain


async def job_in(client: AsyncOpenAI, job_id: str, status: str) -> FineTuningJob:
    deadline = time.monotonic() + WORK_SECONDS_MAX
    while (job := await client.fine_tuning.jobs.retrieve(job_id)).status != status:
        assert time.monotonic() < deadline, job
        assert job.finished_at is None, job
        await asyncio.sleep(0.2)
    return job


async def batch_in(client: AsyncOpenAI, batch_id: str, status: str) -> Batch:
    deadline = time.monotonic() + WORK_SECONDS_MAX
    while (batch := await client.batches.retrieve(batch_id)).status != status:
        assert time.monotonic() < deadline, batch
        await asyncio.sleep(0.2)
    return batch


async def create_batch(client: AsyncOpenAI, lines: bytes) -> Batch:
    requests = await client.files.create(file=("requests.jsonl", lines), purpose="batch")
    return await client.batches.create(
        input_file_id=requests.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


async def ours(client: AsyncOpenAI, path: str) -> dict[str, Any]:
    answer = await client.get(f"/gridline{path}", cast_to=object)
    assert isinstance(answer, dict)
    return answer


async def test_many_files_at_once_are_listed_paged_read_and_deleted(
    client: AsyncOpenAI, tmp_path: Path
) -> None:
    path = write_training_file(tmp_path)
    with path.open("rb") as stream:
        first = await client.files.create(file=stream, purpose="fine-tune")
    assert (first.filename, first.bytes) == (path.name, path.stat().st_size)
    others = await asyncio.gather(
        *(client.files.create(file=path, purpose="fine-tune") for _ in range(6))
    )
    expected = {first.id, *(file.id for file in others)}
    listed = [file.id async for file in client.files.list(limit=2)]
    assert (len(listed), set(listed)) == (7, expected)
    assert (await client.files.wait_for_processing(first.id)).status == "processed"
    assert await client.files.retrieve(first.id) == first
    assert (await client.files.content(first.id)).read() == path.read_bytes()
    assert (await client.files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(first.id)


async def test_a_model_is_trained_served_downloaded_explained_and_deleted(
    client: AsyncOpenAI, tmp_path: Path
) -> None:
    training = await client.files.create(file=write_training_file(tmp_path), purpose="fine-tune")
    job = await client.fine_tuning.jobs.create(
        model=BASE, training_file=training.id, hyperparameters={"n_epochs": 2, "batch_size": 4}
    )
    done, first = await asyncio.gather(
        job_in(client, job.id, "succeeded"), create_batch(client, request_lines(BASE))
    )
    name = done.fine_tuned_model
    assert name is not None
    await batch_in(client, first.id, "completed")
    second = await create_batch(client, request_lines(BASE, name))
    batch = await batch_in(client, second.id, "completed")
    assert batch.output_file_id is not None
    answers = answers_by_id((await client.files.content(batch.output_file_id)).text)
    assert [answers[f"q{n}"]["model"] for n in range(QUESTIONS)] == [BASE, name] * (QUESTIONS // 2)
    assert [each.id async for each in client.batches.list(limit=1)] == [second.id, first.id]
    assert [each.id async for each in client.fine_tuning.jobs.list(limit=1)] == [job.id]
    events = [event.id async for event in client.fine_tuning.jobs.list_events(job.id, limit=2)]
    assert len(events) == len(set(events)) > 3
    [checkpoint] = [each async for each in client.fine_tuning.jobs.checkpoints.list(job.id)]
    assert checkpoint.fine_tuned_model_checkpoint == name
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        path = f"/gridline/adapters/{name}/files/{file}"
        answer = await client.get(path, cast_to=httpx2.Response)
        assert answer.headers["x-gridline-sha256"] == hashlib.sha256(answer.content).hexdigest()
    receipts = await asyncio.gather(
        *(ours(client, f"/receipts/{work_id}") for work_id in (job.id, first.id, second.id))
    )
    credit = await ours(client, "/credits")
    charged = sum(nano_usd(receipt["charge_usd"]) for receipt in receipts)
    assert nano_usd(credit["charged_usd"]) == charged
    assert nano_usd(credit["available_usd"]) == nano_usd(credit["granted_usd"]) - charged
    assert (await client.models.retrieve(name)).id == name
    assert (await client.models.delete(name)).deleted
    assert name not in [model.id async for model in client.models.list()]


async def test_work_is_cancelled_and_each_refusal_is_asked_for_once(
    client: AsyncOpenAI, product: Product, tmp_path: Path
) -> None:
    path = write_training_file(tmp_path, step_ms=1_000)
    training = await client.files.create(file=path, purpose="fine-tune")
    job = await client.fine_tuning.jobs.create(model=BASE, training_file=training.id)
    batch = await create_batch(client, request_lines(BASE, delay_ms=300, questions=60))
    await asyncio.gather(
        job_in(client, job.id, "running"), batch_in(client, batch.id, "in_progress")
    )
    cancelled, _ = await asyncio.gather(
        client.fine_tuning.jobs.cancel(job.id), client.batches.cancel(batch.id)
    )
    assert cancelled.status == "cancelled"
    await batch_in(client, batch.id, "cancelled")
    with product.refused(
        openai.ConflictError, "POST", "/fine_tuning/jobs/{job_id}/cancel"
    ) as job_ended:
        await client.fine_tuning.jobs.cancel(job.id)
    assert job_ended.value.code == "invalid_state"
    with product.refused(openai.ConflictError, "POST", "/batches/{batch_id}/cancel") as batch_ended:
        await client.batches.cancel(batch.id)
    assert batch_ended.value.code == "invalid_state"


async def test_refusals_are_the_exceptions_that_openai_documents(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown_key:
        await client.with_options(api_key="gl_wrong").models.list()
    assert unknown_key.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as bad_row:
        await client.files.create(file=("t.jsonl", b'{"messages": []}\n'), purpose="fine-tune")
    assert bad_row.value.code == "invalid_messages"
    with pytest.raises(openai.NotFoundError) as no_job:
        await client.fine_tuning.jobs.retrieve("ftjob-none")
    assert (no_job.value.code, no_job.value.param) == ("not_found", "fine_tuning_job_id")
