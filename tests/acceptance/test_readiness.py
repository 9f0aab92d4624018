"""What operators ask: is it ready, and what did it count."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import openai
import pytest

from domain.messages import Heartbeat
from projections.direct import heartbeats
from tests.acceptance.conftest import Served
from tests.acceptance.stand_in_worker import store_away


@pytest.mark.parametrize(("age_seconds", "runners"), [(1, 1), (60, 0)])
def test_the_api_is_ready_without_a_runner_and_says_how_many_were_heard_within_the_lease(
    served: Served, age_seconds: int, runners: int
) -> None:
    seen_at = datetime.now(UTC) - timedelta(seconds=age_seconds)
    beat = Heartbeat(runner_id="runner_1", gpu_class="cpu", sent_at=seen_at, slots={})
    with served.plane.reads.connection() as connection:
        heartbeats.delete(connection, "runner_1")
        heartbeats.upsert(connection, beat, seen_at=seen_at)
    with served.http() as http:
        answer = http.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"ready": True, "database": True, "store": True, "runners": runners}


def test_while_the_store_is_away_uploads_and_downloads_may_come_again_and_readiness_says_so(
    served: Served,
) -> None:
    client = served.openai().with_options(max_retries=0)
    file = client.files.create(file=b"{}", purpose="batch")
    with store_away(served):
        for ask in (
            lambda: client.files.create(file=b"{}", purpose="batch"),
            lambda: client.files.content(file.id),
        ):
            with pytest.raises(openai.InternalServerError) as away:
                ask()
            assert (away.value.status_code, away.value.code) == (503, "overloaded")
            assert away.value.response.headers["retry-after"] == "5"
        with served.http() as http:
            answer = http.get("/readyz")
        assert (answer.status_code, answer.json()["ready"], answer.json()["store"]) == (
            503,
            False,
            False,
        )
    assert client.files.content(file.id).content == b"{}"
    assert [each.id for each in client.files.list()] == [file.id]


def test_a_file_whose_bytes_the_store_keeps_for_now_is_deleted_all_the_same(
    served: Served,
) -> None:
    client = served.openai()
    file = client.files.create(file=b"{}", purpose="batch")
    with store_away(served):
        assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_requests_are_counted_by_route_and_never_by_path(served: Served) -> None:
    with served.http() as http:
        http.get("/openai/v1/files/file-MARKER")
        http.options("/openai/v1/MARKER")
        counted = http.get("/metrics").text
    assert (
        'gridline_http_requests_total{method="GET",route="GET /openai/v1/files/{file_id}",'
        'status="404"}'
    ) in counted
    assert 'gridline_http_request_seconds_bucket{le="+Inf",route="unknown"}' in counted
    assert "MARKER" not in counted
