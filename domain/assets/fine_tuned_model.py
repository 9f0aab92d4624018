"""A registered adapter: `ft:<base>:<org>:<job>`. Its stream id is its name."""

from __future__ import annotations

from typing import ClassVar

from domain.errors import NotFound
from domain.log.aggregate import Aggregate, Envelope, event
from domain.log.stored import StoredModel, StoredObject


class StoredAdapter(StoredModel):
    """A model's two files, as a batch's plan keeps them. `name` is its `ft:` name."""

    name: str
    config: StoredObject
    weights: StoredObject
    rank: int


class FineTunedModel(Aggregate, topic="gridline.fine_tuned_model"):
    """`servable` is false for bases whose fine-tunes are download-only; `staged_by` are the open
    batches whose plan names it: they keep its files, whatever becomes of it."""

    snapshot_interval: ClassVar[int] = 200

    account_id: str
    job_id: str
    base: str
    base_revision: str
    config: StoredObject
    weights: StoredObject
    rank: int
    servable: bool
    deleted: bool
    staged_by: list[str]

    @event("Registered", topic="gridline.fine_tuned_model.registered")
    def __init__(
        self,
        *,
        id: str,
        envelope: Envelope,
        account_id: str,
        job_id: str,
        base: str,
        base_revision: str,
        config: StoredObject,
        weights: StoredObject,
        rank: int,
        servable: bool,
    ) -> None:
        self.account_id = account_id
        self.job_id = job_id
        self.base = base
        self.base_revision = base_revision
        self.config = config
        self.weights = weights
        self.rank = rank
        self.servable = servable
        self.deleted = False
        self.staged_by = []

    @property
    def adapter(self) -> StoredAdapter:
        """What a batch stages of it."""
        return StoredAdapter(name=self.id, config=self.config, weights=self.weights, rank=self.rank)

    def stage(self, batch_id: str, *, envelope: Envelope) -> None:
        """A batch will run on it; the caller has looked that it is not deleted. A deletion that
        races meets this on the stream's version."""
        assert not self.deleted
        if batch_id not in self.staged_by:
            self._staged(batch_id=batch_id, envelope=envelope)

    def unstage(self, batch_id: str, *, envelope: Envelope) -> None:
        """That batch ended."""
        if batch_id in self.staged_by:
            self._unstaged(batch_id=batch_id, envelope=envelope)

    def delete(self, *, envelope: Envelope) -> None:
        """From now on it cannot be named, listed or downloaded. Raises NotFound if it is gone."""
        if self.deleted:
            raise NotFound("No such model.", param="model")
        self._deleted(envelope=envelope)

    @event("Staged", topic="gridline.fine_tuned_model.staged")
    def _staged(self, *, batch_id: str, envelope: Envelope) -> None:
        self.staged_by.append(batch_id)

    @event("Unstaged", topic="gridline.fine_tuned_model.unstaged")
    def _unstaged(self, *, batch_id: str, envelope: Envelope) -> None:
        self.staged_by.remove(batch_id)

    @event("Deleted", topic="gridline.fine_tuned_model.deleted")
    def _deleted(self, *, envelope: Envelope) -> None:
        self.deleted = True
