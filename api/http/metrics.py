"""Counts of requests, for Prometheus.

Written by the envelope, read by `GET /metrics`; one process's own numbers, in a registry of its
own. Labels are route templates, so that their number is bounded.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

BUCKET_SECONDS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """Of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "gridline_http_requests",
            "Requests that were answered, or broken off (status 499).",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "gridline_http_request_seconds",
            "From the end of a request's head to the end of its answer.",
            ("route",),
            buckets=BUCKET_SECONDS,
            registry=self._registry,
        )

    def observe(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """One finished request."""
        known = method if method in ("GET", "HEAD", "POST", "DELETE") else "other"
        self._requests.labels(method=known, route=route, status=status).inc()
        self._seconds.labels(route=route).observe(seconds)

    def render(self) -> bytes:
        """Prometheus' text exposition format, version 0.0.4."""
        return generate_latest(self._registry)
