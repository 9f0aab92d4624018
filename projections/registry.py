"""Every read model of the product. The composition root gives the first list to the event store,
which applies it inside each append, and the second to the follower of the log."""

from __future__ import annotations

from projections.money.accounts import ACCOUNTS
from projections.money.holds import HOLDS
from projections.money.journal import JOURNAL
from projections.money.keys import KEYS
from projections.money.prices import PRICES
from projections.read_model import ReadModel
from projections.work.batches import BATCHES
from projections.work.files import FILES
from projections.work.fine_tuning_events import FINE_TUNING_EVENTS
from projections.work.fine_tuning_jobs import FINE_TUNING_JOBS
from projections.work.models import MODELS
from projections.work.open_work import WORK

INLINE: tuple[ReadModel, ...] = (
    PRICES,
    ACCOUNTS,
    KEYS,
    HOLDS,
    FILES,
    MODELS,
    BATCHES,
    FINE_TUNING_JOBS,
    FINE_TUNING_EVENTS,
    WORK,
)
FOLLOWING: tuple[ReadModel, ...] = (JOURNAL,)
