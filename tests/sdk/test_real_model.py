"""The loop once with a real model: trained and served on this machine, through the Python SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.sdk.conftest import QUICK, Customer, running_product
from tests.sdk.customer_files import BASE, QUESTIONS, answers_by_id, nano_usd, request_lines
from tests.sdk.test_python import batch_in, check_books, create_batch, ended_job, receipt_of

TICKETS = Path(__file__).parents[2] / "docs" / "demo" / "train.jsonl"
ROWS = 40


@pytest.fixture
def customer(weights_root: Path) -> Iterator[Customer]:
    """Of an instance with the transformers engine, whose books are audited in the end."""
    settings = {"GRIDLINE_ENGINE": "transformers", "GRIDLINE_WEIGHTS_DIR": str(weights_root)}
    with running_product(**QUICK | settings) as product:
        yield product.new_customer()
        product.audit()


def test_a_real_model_learns_answers_and_is_charged_within_its_quote(
    customer: Customer, tmp_path: Path
) -> None:
    tickets = tmp_path / "tickets.jsonl"
    tickets.write_bytes(b"".join(TICKETS.read_bytes().splitlines(keepends=True)[:ROWS]))
    with OpenAI(base_url=customer.base_url, api_key=customer.api_key) as client:
        with tickets.open("rb") as stream:
            training = client.files.create(file=stream, purpose="fine-tune")
        job = client.fine_tuning.jobs.create(
            model=BASE,
            training_file=training.id,
            hyperparameters={"n_epochs": 1, "batch_size": 4, "learning_rate_multiplier": 5},
        )
        maximum_usd = job.gridline["quote"]["per_token"]["max_charge_usd"]  # type: ignore[attr-defined]
        job = ended_job(client, job.id)
        assert job.status == "succeeded", job.error
        result = job.gridline["result"]  # type: ignore[attr-defined]
        assert result["eval_loss"] < result["eval_loss_before"]
        assert result["rows_trained"] + result["eval_rows"] == ROWS
        name = job.fine_tuned_model
        assert name is not None
        batch = create_batch(client, request_lines(BASE, name))
        batch = batch_in(client, batch.id, "completed")
        assert batch.output_file_id is not None
        answers = answers_by_id(client.files.content(batch.output_file_id).text)
        models = [answers[f"q{number}"]["model"] for number in range(QUESTIONS)]
        assert models == [BASE, name] * (QUESTIONS // 2)
        texts = [answers[f"q{n}"]["choices"][0]["message"]["content"] for n in range(QUESTIONS)]
        assert all(texts)
        assert texts[::2] != texts[1::2]
        receipts = [receipt_of(client, work_id) for work_id in (job.id, batch.id)]
        assert 0 < nano_usd(receipts[0]["charge_usd"]) <= maximum_usd * 10**9
        for receipt in receipts:
            assert nano_usd(receipt["charge_usd"]) <= nano_usd(receipt["hold"]["maximum_usd"])
        check_books(client, *receipts)
