"""A file: what was uploaded, or what the product wrote for a batch or a job.

    stored --delete--> deleted
       +----expire---> deleted

While open work pins a file it is neither deleted nor expired (fine-tuning page, "Your data").
The name that the customer gave it is personal and lives outside the log.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Literal

from domain.errors import InvalidState, NotFound
from domain.inputs.training_file import TrainingFacts
from domain.log.aggregate import Aggregate, Envelope, event
from domain.log.stored import StoredObject

Purpose = Literal["fine-tune", "batch", "batch_output", "fine-tune-results"]
DeletedBecause = Literal["asked", "expired"]


class File(Aggregate, topic="gridline.file"):
    """`training` is null but for fine-tune files; `pins` are the open jobs and batches."""

    snapshot_interval: ClassVar[int] = 200

    account_id: str
    purpose: Purpose
    object: StoredObject
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
        object: StoredObject,
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
