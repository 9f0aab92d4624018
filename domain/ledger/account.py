"""An account's credit, slots and limits: the one place where credit serialises.

Every command that moves credit or takes a slot saves its Account in the same append, so that two
of them that race meet on this stream's version and the second decides again.

    available --reserve--> held --capture--> charged
        ^                   |  \\--rest-------> available
        +-----release-------+
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from domain.errors import LimitExceeded, SlotsFull
from domain.limits import MODELS_PER_ACCOUNT_MAX, SLOT_RETRY_SECONDS
from domain.log.aggregate import Aggregate, Envelope, event
from domain.log.stored import StoredModel


class AccountLimits(StoredModel):
    """How many jobs may be open at once (fine-tuning page, "The job")."""

    open_fine_tunes: int = Field(ge=0)
    open_batches: int = Field(ge=0)


class Account(Aggregate, topic="gridline.account"):
    """Credit in nano-USD, open work, and the limits in force."""

    snapshot_interval: ClassVar[int] = 200

    available_nano_usd: int
    holds_nano_usd: dict[str, int]
    granted_nano_usd: int
    charged_nano_usd: int
    limits: AccountLimits
    open_fine_tunes: list[str]
    open_batches: list[str]
    training_job_id: str | None
    models: int

    @event("Opened", topic="gridline.account.opened")
    def __init__(self, *, id: str, envelope: Envelope, limits: AccountLimits) -> None:
        self.available_nano_usd = 0
        self.holds_nano_usd = {}
        self.granted_nano_usd = 0
        self.charged_nano_usd = 0
        self.limits = limits
        self.open_fine_tunes = []
        self.open_batches = []
        self.training_job_id = None
        self.models = 0

    @property
    def held_nano_usd(self) -> int:
        """The sum of the open holds."""
        return sum(self.holds_nano_usd.values())

    def set_limits(self, limits: AccountLimits, *, envelope: Envelope) -> None:
        """Puts other limits in force; work that is open stays open."""
        self._limits_set(limits=limits, envelope=envelope)

    def grant_credit(self, amount_nano_usd: int, *, grant_id: str, envelope: Envelope) -> None:
        """Adds free credit. What a person wrote about it is kept under the grant's id."""
        assert amount_nano_usd > 0
        self._credit_granted(amount_nano_usd=amount_nano_usd, grant_id=grant_id, envelope=envelope)

    def must_have_fine_tune_slot(self) -> None:
        """Whether an open-job slot and a model slot are free. Raises SlotsFull, or LimitExceeded
        where only deleting a model helps."""
        self._must_have_room(
            "open_fine_tunes",
            in_use=len(self.open_fine_tunes),
            maximum=self.limits.open_fine_tunes,
            fix="Wait for a job to end, or cancel one.",
            refusal=SlotsFull,
        )
        self._must_have_room(
            "fine_tuned_models",
            in_use=self.models + len(self.open_fine_tunes),
            maximum=MODELS_PER_ACCOUNT_MAX,
            fix="Delete a model, or wait for a job to end.",
            refusal=LimitExceeded,
        )

    def take_fine_tune_slot(self, job_id: str, *, envelope: Envelope) -> None:
        """Takes both. Raises as `must_have_fine_tune_slot`."""
        self.must_have_fine_tune_slot()
        self._fine_tune_slot_taken(job_id=job_id, envelope=envelope)

    def free_fine_tune_slot(
        self, job_id: str, *, model_registered: bool, envelope: Envelope
    ) -> None:
        """Gives the slots back; a registered model keeps the model slot."""
        assert job_id in self.open_fine_tunes
        self._fine_tune_slot_freed(
            job_id=job_id, model_registered=model_registered, envelope=envelope
        )

    def free_model_slot(self, model: str, *, envelope: Envelope) -> None:
        """A registered model was deleted."""
        assert self.models > 0
        self._model_slot_freed(model=model, envelope=envelope)

    def take_batch_slot(self, batch_id: str, *, envelope: Envelope) -> None:
        """Takes an open-batch slot. Raises SlotsFull."""
        self._must_have_room(
            "open_batches",
            in_use=len(self.open_batches),
            maximum=self.limits.open_batches,
            fix="Wait for a batch to end, or cancel one.",
            refusal=SlotsFull,
        )
        self._batch_slot_taken(batch_id=batch_id, envelope=envelope)

    def free_batch_slot(self, batch_id: str, *, envelope: Envelope) -> None:
        """Gives the slot back."""
        assert batch_id in self.open_batches
        self._batch_slot_freed(batch_id=batch_id, envelope=envelope)

    def take_training_slot(self, job_id: str, *, envelope: Envelope) -> None:
        """One training at a time per account; the caller has looked that none runs."""
        assert self.training_job_id is None
        self._training_slot_taken(job_id=job_id, envelope=envelope)

    def free_training_slot(self, job_id: str, *, envelope: Envelope) -> None:
        """The training ended."""
        assert self.training_job_id == job_id
        self._training_slot_freed(job_id=job_id, envelope=envelope)

    def can_fund(self, amount_nano_usd: int) -> bool:
        """Whether free credit suffices now."""
        return self.available_nano_usd >= amount_nano_usd

    def may_fund_later(self, amount_nano_usd: int) -> bool:
        """Whether it would suffice with what the account's own open holds may give back."""
        return self.available_nano_usd + self.held_nano_usd >= amount_nano_usd

    def reserve(self, work_id: str, amount_nano_usd: int, *, envelope: Envelope) -> None:
        """Moves credit from available to held; the caller has looked that it suffices. Nothing is
        held for work at a price of zero."""
        assert amount_nano_usd >= 0
        assert self.available_nano_usd >= amount_nano_usd
        assert work_id not in self.holds_nano_usd
        self._credit_reserved(work_id=work_id, amount_nano_usd=amount_nano_usd, envelope=envelope)

    def capture(self, work_id: str, charge_nano_usd: int, *, envelope: Envelope) -> None:
        """Charges part or all of a hold and gives the rest back."""
        held = self.holds_nano_usd[work_id]
        assert 0 <= charge_nano_usd <= held
        self._credit_captured(
            work_id=work_id,
            charge_nano_usd=charge_nano_usd,
            returned_nano_usd=held - charge_nano_usd,
            envelope=envelope,
        )

    def release(self, work_id: str, *, envelope: Envelope) -> None:
        """Gives a whole hold back."""
        self._credit_released(
            work_id=work_id, returned_nano_usd=self.holds_nano_usd[work_id], envelope=envelope
        )

    def _must_have_room(
        self, name: str, *, in_use: int, maximum: int, fix: str, refusal: type[LimitExceeded]
    ) -> None:
        if in_use >= maximum:
            raise refusal(
                f"Your account allows {maximum} {name.replace('_', ' ')} at once "
                f"and has {in_use}. {fix}",
                limit={"name": name, "limit": maximum, "in_use": in_use},
                retry_after_seconds=SLOT_RETRY_SECONDS if refusal.retryable else None,
            )

    @event("LimitsSet", topic="gridline.account.limits_set")
    def _limits_set(self, *, limits: AccountLimits, envelope: Envelope) -> None:
        self.limits = limits

    @event("CreditGranted", topic="gridline.account.credit_granted")
    def _credit_granted(self, *, amount_nano_usd: int, grant_id: str, envelope: Envelope) -> None:
        self.available_nano_usd += amount_nano_usd
        self.granted_nano_usd += amount_nano_usd

    @event("FineTuneSlotTaken", topic="gridline.account.fine_tune_slot_taken")
    def _fine_tune_slot_taken(self, *, job_id: str, envelope: Envelope) -> None:
        self.open_fine_tunes.append(job_id)

    @event("FineTuneSlotFreed", topic="gridline.account.fine_tune_slot_freed")
    def _fine_tune_slot_freed(
        self, *, job_id: str, model_registered: bool, envelope: Envelope
    ) -> None:
        self.open_fine_tunes.remove(job_id)
        self.models += int(model_registered)

    @event("ModelSlotFreed", topic="gridline.account.model_slot_freed")
    def _model_slot_freed(self, *, model: str, envelope: Envelope) -> None:
        self.models -= 1

    @event("BatchSlotTaken", topic="gridline.account.batch_slot_taken")
    def _batch_slot_taken(self, *, batch_id: str, envelope: Envelope) -> None:
        self.open_batches.append(batch_id)

    @event("BatchSlotFreed", topic="gridline.account.batch_slot_freed")
    def _batch_slot_freed(self, *, batch_id: str, envelope: Envelope) -> None:
        self.open_batches.remove(batch_id)

    @event("TrainingSlotTaken", topic="gridline.account.training_slot_taken")
    def _training_slot_taken(self, *, job_id: str, envelope: Envelope) -> None:
        self.training_job_id = job_id

    @event("TrainingSlotFreed", topic="gridline.account.training_slot_freed")
    def _training_slot_freed(self, *, job_id: str, envelope: Envelope) -> None:
        self.training_job_id = None

    @event("CreditReserved", topic="gridline.account.credit_reserved")
    def _credit_reserved(self, *, work_id: str, amount_nano_usd: int, envelope: Envelope) -> None:
        self.available_nano_usd -= amount_nano_usd
        self.holds_nano_usd[work_id] = amount_nano_usd

    @event("CreditCaptured", topic="gridline.account.credit_captured")
    def _credit_captured(
        self, *, work_id: str, charge_nano_usd: int, returned_nano_usd: int, envelope: Envelope
    ) -> None:
        del self.holds_nano_usd[work_id]
        self.available_nano_usd += returned_nano_usd
        self.charged_nano_usd += charge_nano_usd

    @event("CreditReleased", topic="gridline.account.credit_released")
    def _credit_released(self, *, work_id: str, returned_nano_usd: int, envelope: Envelope) -> None:
        del self.holds_nano_usd[work_id]
        self.available_nano_usd += returned_nano_usd
