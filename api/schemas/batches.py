"""The batch object."""

from __future__ import annotations

from typing import Any

from api.schemas.times import seconds, seconds_or_none
from domain.ledger.money import usd_text
from projections.work.batches import BatchRow
from projections.work.fine_tuning_jobs import REASONS


def batch_object(row: BatchRow) -> dict[str, Any]:
    """OpenAI's batch object; what has not happened is null."""
    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "model": row.base,
        "errors": _errors(row),
        "input_file_id": row.input_file_id,
        "completion_window": row.completion_window,
        "status": row.status,
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "created_at": seconds(row.created_at),
        "in_progress_at": seconds_or_none(row.in_progress_at),
        "expires_at": seconds(row.expires_at),
        "finalizing_at": seconds_or_none(row.finalizing_at),
        "completed_at": seconds_or_none(row.completed_at),
        "failed_at": seconds_or_none(row.failed_at),
        "expired_at": seconds_or_none(row.expired_at),
        "cancelling_at": seconds_or_none(row.cancelling_at),
        "cancelled_at": seconds_or_none(row.cancelled_at),
        "request_counts": {
            "total": row.total,
            "completed": row.completed,
            "failed": row.failed,
        },
        "usage": _usage(row),
        "metadata": row.metadata,
        "gridline": _gridline(row),
    }


def _errors(row: BatchRow) -> dict[str, Any] | None:
    if not row.errors:
        return None
    return {
        "object": "list",
        "data": [
            {"code": each.code, "message": each.message, "param": each.param, "line": each.line}
            for each in row.errors
        ],
    }


def _usage(row: BatchRow) -> dict[str, Any] | None:
    if row.usage is None:
        return None
    input_tokens = sum(each.input_tokens for each in row.usage)
    output_tokens = sum(each.output_tokens for each in row.usage)
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


def _gridline(row: BatchRow) -> dict[str, Any]:
    return {
        "reason": REASONS[row.waiting_for] if row.waiting_for is not None else None,
        "api_key_id": row.key_id,
        "max_charge_usd": (
            usd_text(row.maximum_nano_usd) if row.maximum_nano_usd is not None else None
        ),
        "charged_usd": usd_text(row.receipt.charge_nano_usd) if row.receipt else None,
        "usage_by_model": [
            {
                "model": each.model,
                "input_tokens": each.input_tokens,
                "output_tokens": each.output_tokens,
            }
            for each in row.usage or ()
        ],
    }
