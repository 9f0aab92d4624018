"""What operators ask: is it ready, and what did it count."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from domain.messages import Heartbeat
from projections.direct import heartbeats
from tests.acceptance.conftest import Served


@pytest.mark.parametrize(("age_seconds", "status"), [(1, 200), (60, 503)])
def test_ready_is_a_database_and_a_runner_heard_of_within_the_lease(
    served: Served, age_seconds: int, status: int
) -> None:
    seen_at = datetime.now(UTC) - timedelta(seconds=age_seconds)
    beat = Heartbeat(runner_id="runner_1", gpu_class="cpu", sent_at=seen_at, slots={})
    with served.plane.reads.connection() as connection:
        heartbeats.delete(connection, "runner_1")
        heartbeats.upsert(connection, beat, seen_at=seen_at)
    with served.http() as http:
        answer = http.get("/readyz")
    assert answer.status_code == status
    assert answer.json() == {
        "ready": status == 200,
        "database": True,
        "runners": int(status == 200),
    }


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
