"""What a worker counts for Prometheus; `docs/metrics.md` lists it for operators.

The worker's parts count where things happen; `adapters/process/metrics.py` serves it. Labels
name loops, kinds and stages, never an account, a key or a piece of work.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge

ACTIVE = Gauge("gridline_worker_active", "1 in the worker that holds the lock: the active one.")
LOOP_ROUNDS = Counter("gridline_worker_loop_rounds", "Rounds that a loop finished.", ("loop",))
LOOP_ENDS = Counter(
    "gridline_worker_loop_ends", "Unasked ends of a loop; it was started again.", ("loop",)
)
REPORTS = Counter(
    "gridline_worker_reports",
    "Reports taken in: recorded, repeated (had before) or set aside (a dead letter).",
    ("outcome",),
)
REPORTS_BEHIND = Gauge(
    "gridline_worker_reports_behind", "Reports in this worker's partitions that it has not read."
)
ATTEMPTS = Counter(
    "gridline_worker_attempts",
    "Attempts that ended, by the type of their last report, or lost with their runner.",
    ("end",),
)
ERRANDS_FAILED = Counter(
    "gridline_worker_errands_failed",
    "Validations and finalisations that failed and are tried again.",
    ("errand",),
)
OPEN_WORK = Gauge("gridline_worker_open_work", "Open jobs and batches.", ("kind", "stage"))
OLDEST_SECONDS = Gauge(
    "gridline_worker_open_work_oldest_seconds",
    "Age of the oldest open job or batch.",
    ("kind", "stage"),
)
RUNNERS = Gauge("gridline_worker_runners", "Runners that were heard of within a lease.")
