"""The codes that end a fine-tuning job, and whose side each is on (fine-tuning page, "Errors").

The side decides the charge: a failure on the customer's side after training started is charged the
trained tokens without the minimum; one on the platform's side is not charged.
"""

from __future__ import annotations

from domain.ledger.receipt import FaultSide

SIDES: dict[str, FaultSide] = {
    "insufficient_quota": "customer",
    "invalid_row": "customer",
    "template_mismatch": "customer",
    "context_too_long": "customer",
    "adapter_too_large": "customer",
    "adapter_quota_exceeded": "customer",
    "job_unavailable": "platform",
    "time_limit_exceeded": "platform",
    "platform_interrupted": "platform",
    "job_expired": "platform",
    "adapter_invalid": "platform",
    "adapter_registration_failed": "platform",
    "training_failed": "platform",
}


def side_of(code: str) -> FaultSide:
    """An unknown code is our fault."""
    return SIDES.get(code, "platform")
