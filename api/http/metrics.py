"""Counts of requests in Prometheus' text form.

Written by the envelope, read by `GET /metrics`; one process's own numbers. Labels are route
templates, so that their number is bounded.
"""

from __future__ import annotations

from collections import Counter, defaultdict

BUCKET_SECONDS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)


class Metrics:
    """Used on the event loop only."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._buckets: Counter[tuple[str, float]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._observed: Counter[str] = Counter()

    def observe(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """One finished request."""
        known = method if method in ("GET", "HEAD", "POST", "DELETE") else "other"
        self._requests[known, route, status] += 1
        for bound in BUCKET_SECONDS:
            if seconds <= bound:
                self._buckets[route, bound] += 1
        self._seconds[route] += seconds
        self._observed[route] += 1

    def render(self) -> str:
        """Prometheus' text exposition format, version 0.0.4."""
        lines = ["# TYPE gridline_http_requests_total counter"]
        lines += [
            f'gridline_http_requests_total{{method="{method}",route="{route}",status="{status}"}} '
            f"{count}"
            for (method, route, status), count in sorted(self._requests.items())
        ]
        lines.append("# TYPE gridline_http_request_seconds histogram")
        name = "gridline_http_request_seconds"
        for route, count in sorted(self._observed.items()):
            lines += [
                f'{name}_bucket{{route="{route}",le="{bound}"}} {self._buckets[route, bound]}'
                for bound in BUCKET_SECONDS
            ]
            lines.append(f'{name}_bucket{{route="{route}",le="+Inf"}} {count}')
            lines.append(f'{name}_sum{{route="{route}"}} {self._seconds[route]:.6f}')
            lines.append(f'{name}_count{{route="{route}"}} {count}')
        return "\n".join(lines) + "\n"
