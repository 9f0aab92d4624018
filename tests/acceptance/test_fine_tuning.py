"""Fine-tuning jobs over HTTP, from create to the checkpoint and the model's deletion."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from structlog.testing import capture_logs

from domain.limits import SLOT_RETRY_SECONDS
from tests.acceptance.conftest import Served
from tests.acceptance.stand_in_worker import (
    BASE,
    CONFIG,
    STEP_METRICS,
    WEIGHTS,
    fail_training,
    finish,
    plan_batch,
    run_batch,
    start,
    store_away,
    succeed_training,
)
from tests.acceptance.training_files import chat_file, preference_file


def _file(client: OpenAI, rows: bytes | None = None) -> str:
    data = chat_file() if rows is None else rows
    return client.files.create(file=("t.jsonl", data), purpose="fine-tune").id


def test_a_job_is_created_with_its_quote_listed_and_cancelled(served: Served) -> None:
    client = served.openai()
    training = _file(client)
    job = client.fine_tuning.jobs.create(
        model=BASE,
        training_file=training,
        validation_file=_file(client),
        suffix="tickets",
        metadata={"run": "7"},
        seed=5,
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "lora_rank": 8}},  # type: ignore[typeddict-unknown-key]
        },
    )
    assert job.status == "validating_files"
    assert job.hyperparameters.n_epochs == 2
    assert job.method is not None
    assert job.method.supervised is not None
    assert job.method.supervised.adapter == "lora"  # type: ignore[attr-defined]
    gridline: dict[str, Any] = job.gridline  # type: ignore[attr-defined]
    assert gridline["suffix"] == "tickets"
    assert gridline["quote"]["per_token"]["max_charge_usd"] >= 0.05
    assert job.estimated_finish == job.created_at + gridline["quote"]["estimated_seconds"]
    assert client.fine_tuning.jobs.retrieve(job.id) == job
    assert client.fine_tuning.jobs.list().data == [job]
    assert client.fine_tuning.jobs.list(metadata={"run": "7"}).data == [job]
    assert client.fine_tuning.jobs.list(metadata={"run": "8"}).data == []
    assert client.fine_tuning.jobs.list(extra_query={"metadata": "null"}).data == []
    assert client.fine_tuning.jobs.list(extra_query={"metadata": ""}).data == [job]
    events = client.fine_tuning.jobs.list_events(job.id).data
    assert [event.data for event in events] == [{"code": "suffix_ignored"}, None]
    assert client.fine_tuning.jobs.checkpoints.list(job.id).data == []
    cancelled = client.fine_tuning.jobs.cancel(job.id)
    assert cancelled.status == "cancelled"
    assert cancelled.estimated_finish is None
    with pytest.raises(openai.ConflictError) as refused:
        client.fine_tuning.jobs.cancel(job.id)
    assert refused.value.code == "invalid_state"
    assert client.files.delete(training).deleted


def test_a_dpo_job_shows_beta_where_dpo_has_it(served: Served) -> None:
    client = served.openai()
    training = _file(client, preference_file())
    job = client.fine_tuning.jobs.create(
        model=BASE,
        training_file=training,
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5}}},
    )
    assert job.method is not None
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert job.method.dpo.hyperparameters.beta == 0.5
    assert job.hyperparameters.n_epochs == 1


def test_a_succeeded_jobs_result_file_is_the_csv_of_its_steps(served: Served) -> None:
    """As Weights & Biases' sync and OpenAI's cookbook read it."""
    client = served.openai()
    job = client.fine_tuning.jobs.create(model=BASE, training_file=_file(client))
    assert job.result_files == []
    succeed_training(served, job.id)
    [result_file] = client.fine_tuning.jobs.retrieve(job.id).result_files
    text = client.files.content(result_file).text
    assert text.encode() == STEP_METRICS
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [int(row["step"]) for row in rows] == [1, 2]
    assert float(rows[-1]["valid_mean_token_accuracy"]) == 0.75
    file = client.files.retrieve(result_file)
    assert (file.purpose, file.filename) == ("fine-tune-results", "step_metrics.csv")
    assert file.expires_at == file.created_at + 30 * 86_400
    assert [each.id for each in client.files.list(purpose="fine-tune-results")] == [result_file]
    client.files.delete(result_file)
    with pytest.raises(openai.NotFoundError):
        client.files.content(result_file)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x.csv", STEP_METRICS), purpose="fine-tune-results")  # type: ignore[arg-type]


def test_a_succeeded_jobs_progress_is_its_whole_training(served: Served) -> None:
    """A short one ends before any report of it is due."""
    client = served.openai()
    job = client.fine_tuning.jobs.create(model=BASE, training_file=_file(client))
    succeed_training(served, job.id)
    gridline: dict[str, Any] = client.fine_tuning.jobs.retrieve(job.id).gridline  # type: ignore[attr-defined]
    assert gridline["progress"] == {
        "step": 2,
        "total_steps": 2,
        "trained_tokens": 600,
        "train_loss": 1.5,
        "eval_loss_before": 3.0,
    }


@pytest.mark.parametrize("with_file", [True, False], ids=["validation file", "held-out rows"])
def test_a_succeeded_jobs_result_and_metrics_event_have_the_same_figures(
    served: Served, with_file: bool
) -> None:
    client = served.openai()
    validation = _file(client) if with_file else None
    job = client.fine_tuning.jobs.create(
        model=BASE, training_file=_file(client), validation_file=validation
    )
    assert job.validation_file == validation
    succeed_training(served, job.id)
    gridline: dict[str, Any] = client.fine_tuning.jobs.retrieve(job.id).gridline  # type: ignore[attr-defined]
    figures = {
        "eval_loss_before": 3.0,
        "eval_loss": 1.25,
        "eval_rows": 1,
        "eval_source": "validation_file" if with_file else "holdout",
        "train_loss": 1.5,
        "steps": 2,
        "seconds": 2.5,
    }
    assert {name: gridline["result"][name] for name in figures} == figures
    events = client.fine_tuning.jobs.list_events(job.id).data
    last = next(event for event in events if event.type == "metrics")
    assert isinstance(last.data, dict)
    assert {name: last.data.get(name) for name in figures} == figures


def test_a_succeeded_job_has_a_model_a_checkpoint_and_an_adapter(served: Served) -> None:
    client = served.openai()
    job = client.fine_tuning.jobs.create(model=BASE, training_file=_file(client))
    succeed_training(served, job.id)
    done = client.fine_tuning.jobs.retrieve(job.id)
    assert done.status == "succeeded"
    assert done.trained_tokens == 600
    name = done.fine_tuned_model
    assert name is not None
    assert name == f"ft:{BASE}:{done.organization_id}:{job.id.removeprefix('ftjob-')[:12]}"
    gridline: dict[str, Any] = done.gridline  # type: ignore[attr-defined]
    assert gridline["fine_tuned_adapter"] == {"model": name, "servable": True, "reason": None}
    assert gridline["result"]["eval_loss_before"] > gridline["result"]["eval_loss"]
    assert gridline["charged_usd"] == "0.05"
    [checkpoint] = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert checkpoint.fine_tuned_model_checkpoint == name
    assert checkpoint.metrics.full_valid_loss == 1.25
    assert any(event.type == "metrics" for event in client.fine_tuning.jobs.list_events(job.id))
    assert name in [model.id for model in client.models.list()]
    with served.http() as http:
        receipt = http.get(f"/openai/v1/gridline/receipts/{job.id}").json()
        assert receipt["charge_usd"] == "0.05"
        assert receipt["hold"]["state"] == "captured"
        assert receipt["charge"]["lines"][0]["tokens"] == 600
        account = http.get("/openai/v1/gridline/credits").json()
        assert (account["available_usd"], account["held_usd"]) == ("24.95", "0.00")


def model_of(served: Served) -> tuple[str, str]:
    """The id of a job that succeeded, and the name of its model."""
    client = served.openai()
    job = client.fine_tuning.jobs.create(model=BASE, training_file=_file(client))
    succeed_training(served, job.id)
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert name is not None
    return job.id, name


def test_a_model_and_its_adapter_are_found_by_their_name_and_by_no_other(served: Served) -> None:
    job_id, name = model_of(served)
    with served.http() as http:
        for form in (name, name.replace(":", "%3A")):
            assert http.get(f"/openai/v1/models/{form}").json()["id"] == name
            for file, data in (
                ("adapter_config.json", CONFIG),
                ("adapter_model.safetensors", WEIGHTS),
            ):
                sent = http.get(f"/openai/v1/gridline/adapters/{form}/files/{file}")
                assert sent.content == data
                assert sent.headers["x-gridline-sha256"] == hashlib.sha256(data).hexdigest()
        for wrong in (
            f"models/{name.replace(':', '%253A')}",
            f"models/{name.upper()}",
            f"models/{job_id}",
            "models/ft:",
            f"gridline/adapters/{name}/files/adapter_model.bin",
            f"gridline/adapters/{name}/files/%2e%2e%2fadapter_config.json",
            f"gridline/adapters/{job_id}/files/adapter_config.json",
        ):
            answer = http.get(f"/openai/v1/{wrong}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        other = served.new_tenant()
        theirs = http.get(
            f"/openai/v1/models/{name}", headers={"authorization": f"Bearer {other.key}"}
        )
        assert theirs.json() == http.get("/openai/v1/models/ft:").json()


def test_a_deleted_model_is_gone_with_its_adapter_and_its_job_shows_it(served: Served) -> None:
    client = served.openai()
    job_id, name = model_of(served)
    assert client.models.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name)
    with pytest.raises(openai.NotFoundError):
        client.models.delete(name)
    with served.http() as http:
        gone = http.get(f"/openai/v1/gridline/adapters/{name}/files/adapter_config.json")
        assert gone.status_code == 404
        assert http.delete(
            f"/openai/v1/models/{name.replace(':', '%3A')}",
            headers={"x-stainless-retry-count": "1"},
        ).json() == {"id": name, "object": "model", "deleted": True}
    assert client.fine_tuning.jobs.retrieve(job_id).fine_tuned_model is None
    left = [key.split("/")[-1] for key in served.stored_objects() if job_id in key]
    assert left == ["step_metrics.csv"]


def test_a_base_model_cannot_be_deleted(served: Served) -> None:
    client = served.openai()
    with pytest.raises(openai.BadRequestError):
        client.models.delete(BASE)
    assert client.models.retrieve(BASE).id == BASE


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"training_file": "file-none"}, "not_found", "training_file"),
        ({"validation_file": "file-none"}, "not_found", "validation_file"),
        ({"model": "gpt-4o-mini"}, "invalid_request", "model"),
        ({"n_epochs": 3}, "invalid_request", "n_epochs"),
        ({"seed": True}, "invalid_request", "seed"),
        ({"dry_run": True}, "invalid_request", "dry_run"),
    ],
)
def test_a_refused_create_names_its_field_and_makes_no_job(
    served: Served, changes: dict[str, Any], code: str, param: str
) -> None:
    client = served.openai()
    body = {"model": BASE, "training_file": _file(client), "metadata": None} | changes
    with served.http() as http:
        answer = http.post("/openai/v1/fine_tuning/jobs", json=body)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert client.fine_tuning.jobs.list().data == []


def test_a_control_token_in_either_file_is_refused_with_its_place(served: Served) -> None:
    client = served.openai()
    good, bad = _file(client), _file(client, chat_file(text="say <|im_end|> now"))
    for files, param in (
        ({"training_file": bad}, "training_file"),
        ({"training_file": good, "validation_file": bad}, "validation_file"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.fine_tuning.jobs.create(model=BASE, **files)
        assert refused.value.code == "template_token_in_content"
        assert refused.value.param == param
        assert "<|im_end|>" in refused.value.message


def test_a_file_of_another_purpose_is_no_training_file(served: Served) -> None:
    client = served.openai()
    batch_file = client.files.create(file=b"{}\n" * 3, purpose="batch")
    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.create(model=BASE, training_file=batch_file.id)
    assert refused.value.param == "training_file"
    batch = client.batches.create(
        input_file_id=batch_file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    run_batch(served, batch.id, requests=3)
    finish(served, batch.id, output=b"{}\n{}\n", errors=b"{}\n")
    output_file_id = client.batches.retrieve(batch.id).output_file_id
    assert output_file_id is not None
    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.create(model=BASE, training_file=output_file_id)
    assert "not offered yet" in refused.value.message


def test_open_jobs_past_the_limit_are_refused_with_the_limit_and_may_be_sent_again(
    served: Served,
) -> None:
    client = served.openai().with_options(max_retries=0)
    training = _file(client)
    for _ in range(3):
        client.fine_tuning.jobs.create(model=BASE, training_file=training)
    with pytest.raises(openai.RateLimitError) as refused:
        client.fine_tuning.jobs.create(model=BASE, training_file=training)
    assert refused.value.code == "limit_exceeded"
    assert "x-should-retry" not in refused.value.response.headers
    assert refused.value.response.headers["retry-after"] == str(SLOT_RETRY_SECONDS)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["limit"] == {"name": "open_fine_tunes", "limit": 3, "in_use": 3}


@pytest.mark.parametrize("operation", ["pause", "resume"])
def test_pausing_is_refused_by_name(served: Served, operation: str) -> None:
    client = served.openai()
    job = client.fine_tuning.jobs.create(model=BASE, training_file=_file(client))
    with pytest.raises(openai.BadRequestError) as refused:
        getattr(client.fine_tuning.jobs, operation)(job.id)
    assert operation in refused.value.message
    with pytest.raises(openai.NotFoundError):
        getattr(client.fine_tuning.jobs, operation)("ftjob-none")


def _jobs(client: OpenAI, training: str, **more: Any) -> Any:
    return client.fine_tuning.jobs.create(model=BASE, training_file=training, **more)


def test_a_job_names_its_key_and_its_model_after_itself_never_after_its_suffix(
    served: Served,
) -> None:
    client = served.openai()
    job = _jobs(client, _file(client), suffix="tickets")
    assert re.fullmatch("ftjob-[0-9a-f]{32}", job.id)
    assert job.gridline["api_key_id"] == served.tenant.key_id
    start(served, job.id)
    assert client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model is None
    succeed_training(served, job.id)
    done = client.fine_tuning.jobs.retrieve(job.id)
    assert done.fine_tuned_model == f"ft:{BASE}:{done.organization_id}:{job.id[6:18]}"
    assert re.fullmatch("[a-z][a-z0-9]{11}", done.organization_id)
    assert done.fine_tuned_model in [model.id for model in client.models.list()]
    with pytest.raises(openai.ConflictError) as ended:
        client.fine_tuning.jobs.cancel(job.id)
    assert ended.value.code == "invalid_state"
    events = client.fine_tuning.jobs.list_events(job.id, limit=100)
    assert "parcel" not in " ".join(event.to_json() for event in events)


@pytest.mark.parametrize(
    ("code", "message", "charged"),
    [
        ("adapter_too_large", "The adapter is larger than 383 MiB: lower lora_rank.", "0.000005"),
        ("training_failed", "The loss became NaN at step 3.", "0.00"),
    ],
)
def test_a_failed_job_says_why_on_itself_and_on_its_last_event(
    served: Served, code: str, message: str, charged: str
) -> None:
    client = served.openai()
    job = _jobs(client, _file(client))
    fail_training(served, job.id, code=code, message=message)
    failed: Any = client.fine_tuning.jobs.retrieve(job.id)
    assert (failed.status, failed.fine_tuned_model) == ("failed", None)
    assert (failed.error.code, failed.error.message) == (code, message)
    last = client.fine_tuning.jobs.list_events(job.id).data[0]
    assert (last.level, last.data) == ("error", {"code": code})
    with served.http() as http:
        receipt = http.get(f"/openai/v1/gridline/receipts/{job.id}").json()
    assert receipt["charge_usd"] == charged


def test_a_job_that_credit_cannot_fund_is_created_and_fails_when_it_starts(served: Served) -> None:
    poor = served.api.new_tenant(credit_usd=0)
    client = served.openai(poor.key)
    job = _jobs(client, _file(client))
    assert job.status == "validating_files"
    start(served, job.id)
    failed = client.fine_tuning.jobs.retrieve(job.id)
    assert failed.error is not None
    assert (failed.status, failed.error.code) == ("failed", "insufficient_quota")
    assert not failed.trained_tokens
    with served.http(poor.key) as http:
        receipt = http.get(f"/openai/v1/gridline/receipts/{job.id}").json()
    assert (receipt["charge_usd"], receipt["hold"]) == ("0.00", None)


def test_a_download_only_fine_tune_is_no_model_of_the_job_and_is_downloaded_by_its_name(
    served: Served,
) -> None:
    client = served.openai()
    job = client.fine_tuning.jobs.create(
        model="gpt-oss-20b",
        training_file=_file(client),
        method="lora",  # type: ignore[arg-type]
    )
    succeed_training(served, job.id)
    done: Any = client.fine_tuning.jobs.retrieve(job.id)
    assert (done.status, done.fine_tuned_model) == ("succeeded", None)
    adapter = done.gridline["fine_tuned_adapter"]
    assert (adapter["servable"], bool(adapter["reason"])) == (False, True)
    [checkpoint] = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert checkpoint.fine_tuned_model_checkpoint == adapter["model"]
    shown: Any = client.models.retrieve(adapter["model"])
    assert shown.gridline["servable"] is False
    with served.http() as http:
        path = f"/openai/v1/gridline/adapters/{adapter['model']}/files"
        assert http.get(f"{path}/adapter_config.json").content == CONFIG
        assert http.get(f"{path}/adapter_model.safetensors").content == WEIGHTS


def test_nothing_of_a_job_is_another_accounts(served: Served) -> None:
    client, other = served.openai(), served.new_tenant()
    training = _file(client)
    job = _jobs(client, training)
    succeed_training(served, job.id)
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    theirs = served.openai(other.key)
    assert theirs.fine_tuning.jobs.list().data == []
    assert name not in [model.id for model in theirs.models.list()]
    with served.http(other.key) as http:
        for method, path in (
            ("GET", "/fine_tuning/jobs/{}"),
            ("POST", "/fine_tuning/jobs/{}/cancel"),
            ("GET", "/fine_tuning/jobs/{}/events"),
            ("GET", "/fine_tuning/jobs/{}/checkpoints"),
            ("GET", "/gridline/receipts/{}"),
        ):
            foreign = http.request(method, f"/openai/v1{path.format(job.id)}")
            unknown = http.request(method, f"/openai/v1{path.format('ftjob-' + 32 * '0')}")
            assert foreign.status_code == unknown.status_code == 404
            assert foreign.json() == unknown.json()
        for method, path in (
            ("GET", "/models/{}"),
            ("DELETE", "/models/{}"),
            ("GET", "/gridline/adapters/{}/files/adapter_config.json"),
            ("GET", "/gridline/adapters/{}/files/adapter_model.safetensors"),
        ):
            foreign = http.request(method, f"/openai/v1{path.format(name)}")
            unknown = http.request(method, f"/openai/v1{path.format('ft:x:y:z')}")
            assert foreign.status_code == unknown.status_code == 404
            assert foreign.json() == unknown.json()
    with pytest.raises(openai.NotFoundError) as not_theirs:
        _jobs(theirs, training)
    assert not_theirs.value.param == "training_file"


def test_a_model_whose_files_the_store_keeps_for_now_is_out_of_reach_and_recorded(
    served: Served,
) -> None:
    client = served.openai()
    job = _jobs(client, _file(client))
    succeed_training(served, job.id)
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert name is not None
    with store_away(served), capture_logs() as entries:
        assert client.models.delete(name).deleted
    kept = [each["object_key"] for each in entries if each["event"] == "object not deleted"]
    assert len(kept) == 2
    with served.http() as http:
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            path = f"/openai/v1/gridline/adapters/{name}/files/{file}"
            assert http.get(path).status_code == 404
    assert name not in [model.id for model in client.models.list()]


def test_a_deleted_model_can_be_named_in_no_batch(served: Served) -> None:
    client = served.openai()
    job = _jobs(client, _file(client))
    succeed_training(served, job.id)
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert name is not None
    file = client.files.create(file=b"{}", purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    client.models.delete(name)
    plan_batch(served, batch.id, requests=1, first_lines={name: 1})
    failed = client.batches.retrieve(batch.id)
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert (failed.status, failed.errors.data[0].code) == ("failed", "model_not_found")


def test_of_creates_at_once_as_many_as_there_are_slots_succeed(served: Served) -> None:
    training = _file(served.openai())
    body = {"model": BASE, "training_file": training}

    def create(_: int) -> httpx2.Response:
        with served.http() as http:
            return http.post("/openai/v1/fine_tuning/jobs", json=body)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(create, range(8)))
    refused = [answer.json()["error"] for answer in answers if answer.status_code != 200]
    assert len(refused) == 5
    for error in refused:
        assert (error["code"], bool(error["message"])) == ("limit_exceeded", True)
    assert len(served.openai().fine_tuning.jobs.list().data) == 3
