"""The file object."""

from __future__ import annotations

from typing import Any

from api.schemas.times import seconds, seconds_or_none
from projections.work.files import FileRow


def file_object(row: FileRow) -> dict[str, Any]:
    """OpenAI's file object; what the upload's check counted stands under `gridline`."""
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.bytes,
        "created_at": seconds(row.created_at),
        "expires_at": seconds_or_none(row.expires_at),
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
        "status_details": None,
        "gridline": {"sha256": row.sha256, **_training(row)},
    }


def _training(row: FileRow) -> dict[str, Any]:
    facts = row.training
    if facts is None:
        return {}
    return {
        "kind": facts.kind,
        "rows": facts.rows,
        "messages": facts.messages,
        "tokens_upper_bound": facts.token_bounds,
        "tokens_estimate": facts.token_estimates,
    }


def file_deleted(file_id: str) -> dict[str, Any]:
    """The answer of DELETE."""
    return {"id": file_id, "object": "file", "deleted": True}
