"""Every aggregate of the product. Whoever reads the log imports this module, so that every event of
it is known by its topic; one that a process did not know would stop whatever follows the log."""

from __future__ import annotations

from domain.assets.file import File
from domain.assets.fine_tuned_model import FineTunedModel
from domain.ledger.account import Account
from domain.ledger.credit_hold import CreditHold
from domain.ledger.key_spend import KeySpend
from domain.ledger.price_book import PriceBook
from domain.log.aggregate import Aggregate
from domain.log.idempotent_request import IdempotentRequest
from domain.work.batch import Batch
from domain.work.fine_tuning_job import FineTuningJob

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
