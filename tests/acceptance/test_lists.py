"""Lists end, go on where they stopped, and refuse what they cannot read."""

from __future__ import annotations

import openai
import pytest

from tests.acceptance.conftest import Served
from tests.acceptance.stand_in_worker import BASE, succeed_training
from tests.acceptance.training_files import chat_file


def _upload(served: Served, count: int, *, key: str | None = None) -> list[str]:
    client = served.openai(key)
    return [client.files.create(file=b"{}", purpose="batch").id for _ in range(count)]


def test_the_sdk_walks_all_pages_in_both_orders(served: Served) -> None:
    created = _upload(served, 7)
    client = served.openai()
    assert [file.id for file in client.files.list(limit=3)] == created[::-1]
    assert [file.id for file in client.files.list(limit=3, order="asc")] == created
    assert [file.id for file in client.files.list(limit=7)] == created[::-1]


def test_a_page_says_where_it_begins_and_ends(served: Served) -> None:
    created = _upload(served, 3)
    with served.http() as http:
        first = http.get("/openai/v1/files?limit=2").json()
        assert (first["first_id"], first["last_id"]) == (created[2], created[1])
        assert first["has_more"] is True
        last = http.get(f"/openai/v1/files?limit=2&after={first['last_id']}").json()
        assert [file["id"] for file in last["data"]] == [created[0]]
        assert last["has_more"] is False


def test_a_walk_goes_on_from_a_deleted_file_and_does_not_see_new_ones(served: Served) -> None:
    created = _upload(served, 4)
    client = served.openai()
    page = client.files.list(limit=2)
    client.files.delete(page.data[-1].id)
    _upload(served, 1)
    assert [file.id for file in client.files.list(limit=2, after=page.data[-1].id)] == created[
        1::-1
    ]


def test_unknown_and_foreign_cursors_are_refused_alike(served: Served) -> None:
    _upload(served, 2)
    [foreign] = _upload(served, 1, key=served.new_tenant().key)
    with served.http() as http:
        answers = [
            http.get(f"/openai/v1/files?after={after}") for after in (foreign, "file-none", "%00")
        ]
    assert [answer.status_code for answer in answers] == [400, 400, 400]
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["error"]["param"] == "after"


@pytest.mark.parametrize("path", ["files", "batches", "fine_tuning/jobs", "gridline/statement"])
def test_a_bad_limit_is_refused(served: Served, path: str) -> None:
    with served.http() as http:
        for limit in ("-1", "abc", "1&limit=2", "10001", "%D9%A1"):
            answer = http.get(f"/openai/v1/{path}?limit={limit}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
            if "&" not in limit:
                assert "from 0 to 1" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["files", "batches", "fine_tuning/jobs"])
def test_an_empty_value_of_a_query_is_none(served: Served, path: str) -> None:
    file = _upload(served, 1)[0]
    served.openai().batches.create(
        input_file_id=file, endpoint="/v1/embeddings", completion_window="24h"
    )
    with served.http() as http:
        plain = http.get(f"/openai/v1/{path}").json()
        empty = http.get(f"/openai/v1/{path}?limit=&after=&order=&purpose=&metadata=").json()
    assert empty == plain


@pytest.mark.parametrize(
    "purpose",
    ["assistants", "assistants_output", "evals", "fine-tune-results", "user_data", "vision"],
)
def test_nothing_has_another_of_openais_purposes(served: Served, purpose: str) -> None:
    _upload(served, 1)
    client = served.openai()
    assert client.files.list(purpose=purpose).data == []
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=b"{}", purpose=purpose)  # type: ignore[arg-type]
    assert refused.value.param == "purpose"


@pytest.mark.parametrize(
    ("query", "param"), [("order=up", "order"), ("purpose=nonsense", "purpose")]
)
def test_a_bad_order_or_purpose_is_refused(served: Served, query: str, param: str) -> None:
    with served.http() as http:
        answer = http.get(f"/openai/v1/files?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_limit_of_zero_is_an_empty_page_and_unknown_keys_are_ignored(served: Served) -> None:
    _upload(served, 1)
    empty = {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
    with served.http() as http:
        assert http.get("/openai/v1/files?limit=0&colour=red").json() == empty
        assert http.get("/openai/v1/batches").json() == empty


def test_batches_jobs_events_and_checkpoints_are_walked(served: Served) -> None:
    client = served.openai()
    batches = [
        client.batches.create(
            input_file_id=file, endpoint="/v1/embeddings", completion_window="24h"
        ).id
        for file in _upload(served, 3)
    ]
    assert [each.id for each in client.batches.list(limit=2)] == batches[::-1]
    training = client.files.create(file=("t.jsonl", chat_file()), purpose="fine-tune").id
    jobs = [client.fine_tuning.jobs.create(model=BASE, training_file=training).id for _ in range(3)]
    assert [each.id for each in client.fine_tuning.jobs.list(limit=1)] == jobs[::-1]
    succeed_training(served, jobs[0])
    events = client.fine_tuning.jobs.list_events
    walked = [each.id for each in events(jobs[0], limit=2)]
    assert walked == [each.id for each in events(jobs[0], limit=100)]
    assert len(set(walked)) == len(walked) > 4
    [checkpoint] = client.fine_tuning.jobs.checkpoints.list(jobs[0], limit=1)
    assert client.fine_tuning.jobs.checkpoints.list(jobs[0], after=checkpoint.id).data == []
    with pytest.raises(openai.BadRequestError):
        client.fine_tuning.jobs.checkpoints.list(jobs[0], after="ftckpt_none")
    with pytest.raises(openai.NotFoundError):
        events("ftjob-none")
