"""A request that is sent again answers as its first try did, and changes nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from starlette.requests import Request

from api.control import Api, Call, Caller
from api.http.idempotency import create_once
from domain.commands.idempotency import Origin
from domain.errors import LimitExceeded
from tests.acceptance.conftest import Served
from tests.acceptance.stand_in_worker import BASE, finish, run_batch, succeed_training
from tests.acceptance.training_files import chat_file

AGAIN = {"x-stainless-retry-count": "1"}


def _batch_body(served: Served) -> dict[str, Any]:
    file = served.openai().files.create(file=b"{}", purpose="batch")
    return {"input_file_id": file.id, "endpoint": "/v1/embeddings", "completion_window": "24h"}


def _post(http: httpx2.Client, path: str, body: Any, **headers: str) -> httpx2.Response:
    return http.post(f"/openai/v1/{path}", json=body, headers=headers)


def test_an_sdks_retry_of_a_create_answers_the_batch_that_was_made(served: Served) -> None:
    body = _batch_body(served)
    with served.http() as http:
        first = _post(http, "batches", body).json()
        reordered = dict(reversed(body.items()))
        assert _post(http, "batches", reordered, **AGAIN).json() == first
        assert _post(http, "batches", body).json()["id"] != first["id"]
        assert _post(http, "batches", body | {"metadata": {}}, **AGAIN).json()["id"] != first["id"]
        other = served.new_tenant()
        theirs = http.post(
            "/openai/v1/batches",
            json=body,
            headers=AGAIN | {"authorization": f"Bearer {other.key}"},
        )
        assert theirs.status_code == 404


def test_an_sdks_retry_of_a_job_and_of_an_upload_answer_what_was_made(served: Served) -> None:
    def upload(http: httpx2.Client, data: bytes, **headers: str) -> Any:
        return http.post(
            "/openai/v1/files",
            files={"file": ("t.jsonl", data)},
            data={"purpose": "fine-tune"},
            headers=headers,
        ).json()

    with served.http() as http:
        file = upload(http, chat_file())
        stored = served.stored_objects()
        assert upload(http, chat_file(), **AGAIN) == file
        assert served.stored_objects() == stored
        assert upload(http, chat_file(13), **AGAIN)["id"] != file["id"]
        body = {"model": BASE, "training_file": file["id"]}
        job = _post(http, "fine_tuning/jobs", body).json()
        assert _post(http, "fine_tuning/jobs", body, **AGAIN).json() == job
        assert len(http.get("/openai/v1/fine_tuning/jobs").json()["data"]) == 1


def test_an_idempotency_key_makes_one_thing_for_ever(served: Served) -> None:
    body = _batch_body(served)
    with served.http() as http:
        first = _post(http, "batches", body, **{"idempotency-key": "k1"}).json()
        again = _post(http, "batches", body, **{"idempotency-key": "k1"})
        assert (again.status_code, again.json()) == (200, first)
        other = _post(
            http, "batches", body | {"completion_window": "72h"}, **{"idempotency-key": "k1"}
        )
        assert (other.status_code, other.json()["error"]["param"]) == (400, "Idempotency-Key")
        assert _post(http, "batches", body, **{"idempotency-key": "k2"}).json()["id"] != first["id"]
        assert _post(http, "batches", body, **{"idempotency-key": ""}).status_code == 400


def test_equal_creates_at_once_under_one_key_make_one_batch(served: Served) -> None:
    body = _batch_body(served)
    barrier = threading.Barrier(8)

    def create(_: int) -> str:
        with served.http() as http:
            barrier.wait(5)
            answer = _post(http, "batches", body, **{"idempotency-key": "k"})
            batch_id: str = answer.json()["id"]
            return batch_id

    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(create, range(8)))
    assert len(made) == 1
    assert [each.id for each in served.openai().batches.list()] == list(made)


def _call(api: Api, *, retry_count: bytes) -> Call:
    headers = [(b"x-stainless-retry-count", retry_count)]
    return Call(
        request=Request({"type": "http", "headers": headers}),
        caller=Caller(account_id="acct_1", key_id="key_1"),
        api=api,
        route="POST /batches",
        request_id="req_1",
    )


@pytest.mark.parametrize("ends_well", [True, False])
async def test_a_retry_waits_for_a_first_try_that_is_still_being_decided(
    served: Served, ends_well: bool
) -> None:
    api = Api(control=served.plane, lease_seconds=30)
    decided = asyncio.Event()

    async def slow(_: Origin) -> str:
        await decided.wait()
        if not ends_well:
            raise LimitExceeded("Two at once.")
        return "batch_1"

    async def never(_: Origin) -> str:
        raise AssertionError

    def send(retry_count: bytes, create: Callable[[Origin], Awaitable[str]]) -> asyncio.Task[str]:
        call = _call(api, retry_count=retry_count)
        return asyncio.create_task(create_once(call, body_sha256="a", create=create))

    tries = [send(b"0", slow)]
    await asyncio.sleep(0)
    tries.append(send(b"1", never))
    await asyncio.sleep(0)
    decided.set()
    answers = await asyncio.gather(*tries, return_exceptions=True)
    if ends_well:
        assert answers == ["batch_1", "batch_1"]
    else:
        assert [type(answer) for answer in answers] == [LimitExceeded, LimitExceeded]
    assert api.creates_in_flight == {}


async def test_of_repeats_at_once_whose_first_try_was_lost_one_creates(served: Served) -> None:
    api = Api(control=served.plane, lease_seconds=30)
    creates: list[str] = []

    async def create(_: Origin) -> str:
        creates.append(f"batch_{len(creates)}")
        return creates[-1]

    answers = await asyncio.gather(
        *(
            create_once(_call(api, retry_count=b"1"), body_sha256="b", create=create)
            for _ in range(10)
        )
    )
    assert (set(answers), creates) == ({"batch_0"}, ["batch_0"])


def _nothing(_: Served, __: str) -> None:
    """The create's answer may have been lost."""


def _cancel_batch(served: Served, batch_id: str) -> None:
    served.openai().batches.cancel(batch_id)


def _look_at_batch(served: Served, batch_id: str) -> None:
    served.openai().batches.retrieve(batch_id)


def _see_batch_end(served: Served, batch_id: str) -> None:
    run_batch(served, batch_id, requests=2)
    finish(served, batch_id, output=b"{}\n", errors=b"{}\n")
    assert served.openai().batches.retrieve(batch_id).status == "completed"


def _download_results(served: Served, batch_id: str) -> None:
    run_batch(served, batch_id, requests=2)
    finish(served, batch_id, output=b"{}\n", errors=b"{}\n")
    client = served.openai()
    [output, _] = client.files.list(purpose="batch_output").data
    client.files.content(output.id)


def _cancel_job(served: Served, job_id: str) -> None:
    served.openai().fine_tuning.jobs.cancel(job_id)


def _see_job_end(served: Served, job_id: str) -> None:
    succeed_training(served, job_id)
    assert served.openai().fine_tuning.jobs.retrieve(job_id).status == "succeeded"


def _download_adapter(served: Served, job_id: str) -> None:
    succeed_training(served, job_id)
    own = next(each.id for each in served.openai().models.list() if each.id.startswith("ft:"))
    with served.http() as http:
        http.get(f"/openai/v1/gridline/adapters/{own}/files/adapter_config.json")


@pytest.mark.parametrize(
    ("since", "is_a_repeat"),
    [
        (_nothing, True),
        (_look_at_batch, True),
        (_cancel_batch, False),
        (_see_batch_end, False),
        (_download_results, False),
    ],
)
def test_a_retried_batch_is_no_repeat_of_one_whose_answer_came_through(
    served: Served, since: Callable[[Served, str], None], is_a_repeat: bool
) -> None:
    body = _batch_body(served)
    with served.http() as http:
        first = _post(http, "batches", body).json()["id"]
        since(served, first)
        again = _post(http, "batches", body, **AGAIN).json()["id"]
        assert (again == first) == is_a_repeat
        assert _post(http, "batches", body, **AGAIN).json()["id"] == again


@pytest.mark.parametrize(
    ("since", "is_a_repeat"),
    [(_nothing, True), (_cancel_job, False), (_see_job_end, False), (_download_adapter, False)],
)
def test_a_retried_job_is_no_repeat_of_one_whose_answer_came_through(
    served: Served, since: Callable[[Served, str], None], is_a_repeat: bool
) -> None:
    file = served.openai().files.create(file=chat_file(), purpose="fine-tune")
    body = {"model": BASE, "training_file": file.id}
    with served.http() as http:
        first = _post(http, "fine_tuning/jobs", body).json()["id"]
        since(served, first)
        again = _post(http, "fine_tuning/jobs", body, **AGAIN).json()["id"]
        assert (again == first) == is_a_repeat


def test_a_create_under_a_key_answers_what_it_made_though_that_was_cancelled(
    served: Served,
) -> None:
    body = _batch_body(served)
    with served.http() as http:
        first = _post(http, "batches", body, **{"idempotency-key": "k"}).json()["id"]
        _cancel_batch(served, first)
        assert _post(http, "batches", body, **{"idempotency-key": "k"}).json()["id"] == first


@pytest.mark.parametrize("since", ["delete", "content"])
def test_a_retried_upload_is_no_repeat_of_one_that_was_deleted_or_downloaded_since(
    served: Served, since: str
) -> None:
    files = served.openai().files
    data = ("t.jsonl", chat_file())
    first = files.create(file=data, purpose="fine-tune")
    getattr(files, since)(first.id)
    again = files.create(
        file=data, purpose="fine-tune", extra_headers={"x-stainless-retry-count": "1"}
    )
    assert again.id != first.id
    assert files.content(again.id).content == data[1]


def test_an_sdks_retry_of_a_cancel_or_delete_answers_as_the_first_try(served: Served) -> None:
    client = served.openai()
    file = client.files.create(file=("t.jsonl", chat_file()), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model=BASE, training_file=file.id)
    with served.http() as http:
        cancel = f"/openai/v1/fine_tuning/jobs/{job.id}/cancel"
        first = http.post(cancel)
        assert http.post(cancel, headers=AGAIN).json() == first.json()
        assert http.post(cancel).status_code == 409
        url = f"/openai/v1/files/{file.id}"
        deleted = http.delete(url)
        assert http.delete(url, headers=AGAIN).json() == deleted.json()
        assert http.delete(url).status_code == 404
        assert http.delete("/openai/v1/files/file-none", headers=AGAIN).status_code == 404


@pytest.mark.parametrize("count", ["x", "-1", "", "99999", "１"])
def test_a_strange_retry_count_is_a_first_try(served: Served, count: str) -> None:
    body = _batch_body(served)
    with served.http() as http:
        first = _post(http, "batches", body).json()
        headers = {"x-stainless-retry-count": count.encode()}
        again = http.post("/openai/v1/batches", json=body, headers=headers)  # type: ignore[arg-type]
        assert again.json()["id"] != first["id"]
