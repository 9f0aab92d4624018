"""Public ids, which are also the stream ids of the log: a prefix that names the kind, then 32 hex.

Ids are made by the composition root's id source and handed to commands; the domain never draws
randomness.
"""

from __future__ import annotations

import hashlib

ACCOUNT = "acct_"
KEY = "key_"
FILE = "file-"
BATCH = "batch_"
JOB = "ftjob-"
RUNNER = "runner_"
GRANT = "grant_"
PRICE_BOOK_ID = "prices"


def hold_id(work_id: str) -> str:
    """The one credit hold of a job or batch."""
    return f"hold_{work_id}"


def derived_file_id(work_id: str, role: str) -> str:
    """The id of a file that the product itself writes for a job or batch: the same at each retry,
    so that writing it twice is writing it once."""
    return FILE + hashlib.sha256(f"{work_id}/{role}".encode()).hexdigest()[:32]


def step_metrics_file_id(job_id: str) -> str:
    """The file of what each step of a succeeded job measured."""
    return derived_file_id(job_id, "step_metrics")


def idempotency_id(account_id: str, route: str, key: str) -> str:
    """The stream of an explicit `Idempotency-Key`, one per account and route."""
    digest = hashlib.sha256("\0".join((account_id, route, key)).encode()).hexdigest()
    return f"idem_{digest}"


def account_slug(account_id: str) -> str:
    """The `<org>` part of a model name: `o` + 11 hex, stable, reveals nothing (fine-tuning page,
    "Your ft: model")."""
    return "o" + hashlib.sha256(f"org/{account_id}".encode()).hexdigest()[:11]


def fine_tuned_model_name(base: str, account_id: str, job_id: str) -> str:
    """`ft:<base>:<org>:<first 12 hex of the job id>` (migration page, "Model names")."""
    return f"ft:{base}:{account_slug(account_id)}:{model_suffix(job_id)}"


def model_suffix(job_id: str) -> str:
    """The part of a model's name that is its job's."""
    return job_id.removeprefix(JOB)[:12]
