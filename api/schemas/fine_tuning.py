"""The job, event and checkpoint objects."""

from __future__ import annotations

from typing import Any

from api.schemas.quotes import fine_tune_quote_object
from api.schemas.times import seconds, seconds_or_none
from domain.ids import account_slug, step_metrics_file_id
from domain.inputs.hyperparameters import Hyperparameters
from domain.ledger.money import usd_text
from domain.log.stored import number
from projections.work.fine_tuning_events import EventRow
from projections.work.fine_tuning_jobs import CheckpointRow, JobRow

TERMINAL = ("succeeded", "failed", "cancelled")


def job_object(row: JobRow) -> dict[str, Any]:
    """OpenAI's job object. `hyperparameters` are shown as they were resolved, twice, as OpenAI
    does; beta only where DPO has it."""
    settings = row.settings
    shown = _hyperparameters(settings.hyperparameters)
    of_method = {"adapter": settings.adapter, "hyperparameters": dict(shown)}
    shown.pop("beta", None)
    open_still = row.status not in TERMINAL
    return {
        "id": row.id,
        "object": "fine_tuning.job",
        "created_at": seconds(row.created_at),
        "finished_at": seconds_or_none(row.finished_at),
        "estimated_finish": seconds(row.estimated_finish) if open_still else None,
        "model": settings.base,
        "fine_tuned_model": row.fine_tuned_model if row.status == "succeeded" else None,
        "organization_id": account_slug(row.account_id),
        "status": row.status,
        "error": _error(row),
        "training_file": settings.training.file_id,
        "validation_file": settings.validation.file_id if settings.validation else None,
        "result_files": [step_metrics_file_id(row.id)] if row.result is not None else [],
        "hyperparameters": shown,
        "method": {"type": settings.method, settings.method: of_method},
        "seed": settings.seed,
        "trained_tokens": row.trained_tokens,
        "integrations": [],
        "metadata": row.metadata,
        "gridline": _gridline(row),
    }


def _hyperparameters(stored: Hyperparameters) -> dict[str, Any]:
    """As they were resolved; beta for DPO alone."""
    shown = {
        "n_epochs": stored.n_epochs,
        "batch_size": stored.batch_size,
        "learning_rate": number(stored.learning_rate),
        "lora_rank": stored.lora_rank,
        "lora_alpha": stored.lora_alpha,
        "max_seq_length": stored.max_seq_length,
        "beta": number(stored.beta),
        "learning_rate_multiplier": number(stored.learning_rate_multiplier),
    }
    return {name: value for name, value in shown.items() if value is not None}


def _error(row: JobRow) -> dict[str, Any] | None:
    if row.error_code is None:
        return None
    return {"code": row.error_code, "message": row.error_message or "", "param": None}


def _gridline(row: JobRow) -> dict[str, Any]:
    return {
        "quote": fine_tune_quote_object(row.settings.quote),
        "reason": row.reason,
        "suffix": row.suffix,
        "api_key_id": row.key_id,
        "started_at": seconds_or_none(row.started_at),
        "progress": {
            "step": row.step,
            "total_steps": row.steps,
            "trained_tokens": row.progress_tokens,
            "train_loss": row.train_loss,
            "eval_loss_before": row.eval_loss_before,
        },
        "fine_tuned_adapter": _adapter(row),
        "result": _result(row),
        "charged_usd": usd_text(row.receipt.charge_nano_usd) if row.receipt else None,
    }


def _adapter(row: JobRow) -> dict[str, Any] | None:
    if row.model is None:
        return None
    return {
        "model": row.model,
        "servable": row.is_servable,
        "reason": row.not_servable_because,
    }


def _result(row: JobRow) -> dict[str, Any] | None:
    result = row.result
    if result is None:
        return None
    return {
        "eval_loss_before": number(result.eval_loss_before),
        "eval_loss": number(result.eval_loss),
        "eval_rows": result.eval_rows,
        "eval_source": row.eval_source,
        "train_loss": number(result.train_loss),
        "steps": result.steps,
        "seconds": number(result.seconds),
        "loss_tokens": result.loss_tokens,
        "rows_trained": result.rows_trained,
        "rows_dropped": result.rows_dropped,
    }


def event_object(row: EventRow) -> dict[str, Any]:
    """OpenAI's job event."""
    return {
        "id": row.id,
        "object": "fine_tuning.job.event",
        "created_at": seconds(row.created_at),
        "level": row.level,
        "type": row.type,
        "message": row.message,
        "data": row.data,
    }


def checkpoint_object(row: CheckpointRow) -> dict[str, Any]:
    """OpenAI's checkpoint."""
    return {
        "id": row.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": seconds(row.created_at),
        "fine_tuning_job_id": row.job_id,
        "fine_tuned_model_checkpoint": row.model,
        "step_number": row.step_number,
        "metrics": row.metrics,
    }
