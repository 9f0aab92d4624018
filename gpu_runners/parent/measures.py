"""What a runner counts for Prometheus; `docs/metrics.md` lists it for operators.

The runner's parts count where things happen; `adapters/process/metrics.py` serves it. Labels
name kinds and bases of the catalog, never an account, a key or a piece of work.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

LOAD_BUCKET_SECONDS = (1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)

ATTEMPTS = Counter(
    "gridline_runner_attempts",
    "Attempts that ended here, by kind of task and how: the report's type, or revoked.",
    ("kind", "end"),
)
RUNNING = Gauge("gridline_runner_attempts_running", "Attempts that run here now.", ("kind",))
BEATS_FAILED = Counter(
    "gridline_runner_heartbeats_failed", "Heartbeats that the broker did not take."
)
BEAT_AT = Gauge(
    "gridline_runner_heartbeat_timestamp_seconds", "When the broker last took a heartbeat."
)
DRAINING = Gauge("gridline_runner_draining", "1 while the runner takes no new work.")
ENGINE_DEATHS = Counter(
    "gridline_runner_engine_deaths", "Engine children that ended under work.", ("base",)
)
ENGINE_LOAD_SECONDS = Histogram(
    "gridline_runner_engine_load_seconds",
    "From the start of an engine child until its base was loaded.",
    ("base",),
    buckets=LOAD_BUCKET_SECONDS,
)
LINES = Counter(
    "gridline_runner_lines", "Request lines that were finished here: answered or refused.", ("end",)
)
TOKENS = Counter(
    "gridline_runner_tokens", "Tokens of finished work: input, output or trained.", ("kind",)
)
