"""A file: what was uploaded, or what the product wrote for a batch.

    stored --delete--> deleted
       +----expire---> deleted

While open work pins a file it is neither deleted nor expired (fine-tuning page, "Your data").
The name that the customer gave it is personal and lives outside the log.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from domain.aggregate import Aggregate, Envelope, StoredModel, event
from domain.errors import InvalidState, NotFound
from domain.messages import ObjectRef

Purpose = Literal["fine-tune", "batch", "batch_output"]
DeletedBecause = Literal["asked", "expired"]


class TrainingFacts(StoredModel):
    """What the check of a fine-tune file found (fine-tuning page, "Training files").

    `token_bounds` and `token_estimates` are per base id: an upper bound from the UTF-8 bytes, the
    template's own tokens included, and a conservative estimate from the text. `sample_estimates`
    has the bases that train several samples of a row (`domain/catalog.py`, `samples_per_turn`):
    the estimate over all samples, which counts for time and never for money.
    """

    kind: Literal["chat", "preference"]
    rows: int
    messages: int
    token_bounds: dict[str, int]
    token_estimates: dict[str, int]
    sample_estimates: dict[str, int] = Field(default_factory=dict)
    first_row_that_does_not_alternate: int | None


class File(Aggregate, topic="gridline.file"):
    """`training` is null but for fine-tune files; `pins` are the open jobs and batches."""

    account_id: str
    purpose: Purpose
    object: ObjectRef
    expires_at: datetime | None
    training: TrainingFacts | None
    pins: list[str]
    deleted: bool

    @event("Stored", topic="gridline.file.stored")
    def __init__(
        self,
        *,
        id: str,
        envelope: Envelope,
        account_id: str,
        purpose: Purpose,
        object: ObjectRef,
        expires_at: datetime | None,
        training: TrainingFacts | None,
    ) -> None:
        self.account_id = account_id
        self.purpose = purpose
        self.object = object
        self.expires_at = expires_at
        self.training = training
        self.pins = []
        self.deleted = False

    def pin(self, work_id: str, *, envelope: Envelope) -> None:
        """Open work needs the file. Raises NotFound if it is gone."""
        if self.deleted:
            raise NotFound("No such file.", param="id")
        if work_id not in self.pins:
            self._pinned(work_id=work_id, envelope=envelope)

    def unpin(self, work_id: str, *, envelope: Envelope) -> None:
        """The work ended."""
        if work_id in self.pins:
            self._unpinned(work_id=work_id, envelope=envelope)

    def delete(self, *, because: DeletedBecause, envelope: Envelope) -> None:
        """Raises NotFound if it is gone, InvalidState while open work uses it."""
        if self.deleted:
            raise NotFound("No such file.", param="id")
        if self.pins:
            raise InvalidState(
                f"The file is in use by {self.pins[0]}. Wait for it to end, or cancel it.",
                param="id",
            )
        self._deleted(because=because, envelope=envelope)

    @event("Pinned", topic="gridline.file.pinned")
    def _pinned(self, *, work_id: str, envelope: Envelope) -> None:
        self.pins.append(work_id)

    @event("Unpinned", topic="gridline.file.unpinned")
    def _unpinned(self, *, work_id: str, envelope: Envelope) -> None:
        self.pins.remove(work_id)

    @event("Deleted", topic="gridline.file.deleted")
    def _deleted(self, *, because: DeletedBecause, envelope: Envelope) -> None:
        self.deleted = True
