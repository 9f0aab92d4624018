"""Every read model of the product. The composition root gives the first list to the event store,
which applies it inside each append, and the second to the runner, which follows the log."""

from __future__ import annotations

from projections.accounts import ACCOUNTS
from projections.batches import BATCHES
from projections.files import FILES
from projections.fine_tuning_events import FINE_TUNING_EVENTS
from projections.fine_tuning_jobs import FINE_TUNING_JOBS
from projections.holds import HOLDS
from projections.journal import JOURNAL
from projections.keys import KEYS
from projections.models import MODELS
from projections.prices import PRICES
from projections.read_model import ReadModel
from projections.work import WORK

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
