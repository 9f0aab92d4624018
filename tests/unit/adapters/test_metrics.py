"""The port that operators and scrapers ask: metrics, and which part of a process is well."""

from __future__ import annotations

import httpx2
import pytest

from adapters.embedded.process import free_port
from adapters.process.metrics import serve_metrics
from adapters.process.settings import Settings, Unusable


def test_metrics_and_health_are_answered_as_the_parts_are() -> None:
    parts = {"database": True, "broker": False}
    with serve_metrics(Settings(metrics_port=free_port()), health=lambda: parts) as address:
        alive = httpx2.get(f"{address}/healthz")
        waiting = httpx2.get(f"{address}/readyz")
        parts["broker"] = True
        ready = httpx2.get(f"{address}/readyz")
        scraped = httpx2.get(f"{address}/metrics")
        unknown = httpx2.get(f"{address}/")
    assert alive.status_code == 200
    assert waiting.status_code == 503
    assert waiting.json() == {"ready": False, "database": True, "broker": False}
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert "process_resident_memory_bytes" in scraped.text
    assert unknown.status_code == 404


def test_a_port_that_is_taken_is_told_by_its_setting() -> None:
    settings = Settings(metrics_port=free_port())
    with (
        serve_metrics(settings, health=dict),
        pytest.raises(Unusable, match=r"GRIDLINE_METRICS_PORT=.*in use"),
        serve_metrics(settings, health=dict),
    ):
        pass


def test_without_a_port_nothing_is_served() -> None:
    with serve_metrics(Settings(), health=dict) as address:
        assert address == ""
