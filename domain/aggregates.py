"""Every aggregate of the product. Whoever reads the log imports this module, so that every event of
it is known by its topic; one that a process did not know would stop whatever follows the log."""

from __future__ import annotations

from domain.account import Account
from domain.aggregate import Aggregate
from domain.batch import Batch
from domain.credit_hold import CreditHold
from domain.file import File
from domain.fine_tuned_model import FineTunedModel
from domain.fine_tuning_job import FineTuningJob
from domain.idempotent_request import IdempotentRequest
from domain.key_spend import KeySpend
from domain.price_book import PriceBook

AGGREGATES: tuple[type[Aggregate], ...] = (
    Account,
    Batch,
    CreditHold,
    File,
    FineTunedModel,
    FineTuningJob,
    IdempotentRequest,
    KeySpend,
    PriceBook,
)
