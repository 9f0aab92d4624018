"""The model object: of the catalog, and of the account's own."""

from __future__ import annotations

from typing import Any

from api.schemas.times import seconds
from domain.catalog import CHAT_ENDPOINT, EMBEDDINGS_ENDPOINT, BaseModel, FineTuning
from projections.work.models import ModelRow


def base_model_object(base: BaseModel) -> dict[str, Any]:
    """A base of the catalog."""
    return {
        "id": base.id,
        "object": "model",
        "created": base.created_at,
        "owned_by": base.owned_by,
        "shutdown_date": None,
        "gridline": {
            "kind": base.kind,
            "source": base.source,
            "revision": base.revision,
            "licence": base.licence,
            "context_window_tokens": base.context_window_tokens,
            "batch_endpoint": CHAT_ENDPOINT if base.kind == "chat" else EMBEDDINGS_ENDPOINT,
            "ft_models_per_batch": base.ft_models_per_batch_max,
            "fine_tuning": _fine_tuning(base.fine_tuning),
        },
    }


def _fine_tuning(training: FineTuning | None) -> dict[str, Any] | None:
    if training is None:
        return None
    return {
        "servable": training.servable,
        "adapters": list(training.adapters()),
        "default_adapter": training.default_adapter,
        "lora_rank_max": training.lora_rank_max,
        "dpo_lora_rank_max": training.dpo_rank_max,
    }


def fine_tuned_model_object(row: ModelRow) -> dict[str, Any]:
    """One of the account's own."""
    organization = row.id.split(":")[2]
    return {
        "id": row.id,
        "object": "model",
        "created": seconds(row.created_at),
        "owned_by": organization,
        "shutdown_date": None,
        "gridline": {
            "kind": "chat",
            "base": row.base,
            "base_revision": row.base_revision,
            "fine_tuning_job": row.job_id,
            "lora_rank": row.rank,
            "servable": row.servable,
            "batch_endpoint": CHAT_ENDPOINT if row.servable else None,
        },
    }


def model_deleted(name: str) -> dict[str, Any]:
    """The answer of DELETE."""
    return {"id": name, "object": "model", "deleted": True}
