"""Quotes as the API shows them: money as numbers of USD, which the pages document here."""

from __future__ import annotations

from typing import Any

from domain.ledger.money import usd_number
from domain.work.quote import BatchQuote, FineTuneQuote


def fine_tune_quote_object(quote: FineTuneQuote) -> dict[str, Any]:
    """`gridline.quote` of a job."""
    return {
        "estimate": True,
        "training_tokens_upper_bound": quote.training_tokens_upper_bound,
        "training_tokens_per_epoch_upper_bound": quote.training_tokens_per_epoch_upper_bound,
        "n_epochs": quote.n_epochs,
        "eval_rows": quote.eval_rows,
        "estimated_seconds": quote.estimated_seconds,
        "estimated_usd": usd_number(quote.estimated_nano_usd),
        "gpu_memory_class_gb": quote.gpu_memory_class_gb,
        "basis": quote.basis,
        "per_token": {
            "trained_usd_per_mtok": usd_number(quote.trained_rate_nano_usd_per_mtok),
            "minimum_usd": usd_number(quote.minimum_nano_usd),
            "max_charge_usd": usd_number(quote.maximum_nano_usd),
        },
        "price_version": quote.price_version,
    }


def batch_quote_object(quote: BatchQuote) -> dict[str, Any]:
    """What a validated batch can cost, and of which tokens."""
    return {
        "estimate": True,
        "model": quote.base,
        "requests": quote.requests,
        "input_tokens_upper_bound": sum(each.input_tokens for each in quote.worst_case),
        "output_tokens_upper_bound": sum(each.output_tokens for each in quote.worst_case),
        "upper_bound_by_model": [
            {
                "model": each.model,
                "input_tokens": each.input_tokens,
                "output_tokens": each.output_tokens,
            }
            for each in quote.worst_case
        ],
        "minimum_usd": usd_number(quote.minimum_nano_usd),
        "max_charge_usd": usd_number(quote.maximum_nano_usd),
        "price_version": quote.price_version,
    }


def quote_object(quote: BatchQuote | FineTuneQuote) -> dict[str, Any]:
    """The quote of work of any kind."""
    if isinstance(quote, BatchQuote):
        return batch_quote_object(quote)
    return fine_tune_quote_object(quote)
