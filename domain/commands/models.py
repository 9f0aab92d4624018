"""Fine-tuned models after their training: deleting them, and what becomes of their files."""

from __future__ import annotations

from dataclasses import dataclass

from domain.assets.file import File
from domain.assets.fine_tuned_model import FineTunedModel
from domain.commands.ownership import model_of
from domain.ids import fine_tuned_model_name, step_metrics_file_id
from domain.ledger.account import Account
from domain.log.unit_of_work import UnitOfWork
from domain.work.fine_tuning_job import FineTuningJob


@dataclass(frozen=True, slots=True)
class DeleteModel:
    account_id: str
    model: str


def delete_model(uow: UnitOfWork, command: DeleteModel) -> tuple[str, ...]:
    """Makes a fine-tuned model unusable and frees its slot; returns the keys of the objects to
    delete: none while an open batch has staged it, which keeps it through every retry; the sweep
    has them later. Raises NotFound."""
    model = model_of(uow, command.account_id, command.model)
    account = uow.get(Account, command.account_id)
    model.delete(envelope=uow.envelope)
    account.free_model_slot(model.id, envelope=uow.envelope)
    return () if model.staged_by else (model.config.key, model.weights.key)


@dataclass(frozen=True, slots=True)
class AdapterObject:
    """An object of a training's attempt."""

    job_id: str
    key: str


def adapter_is_wanted(uow: UnitOfWork, asked: AdapterObject) -> bool:
    """Whether a job that still runs, its file of metrics, a model, or a batch that staged one needs
    the object. Reads only."""
    job = uow.find(FineTuningJob, asked.job_id)
    if job is None or not job.is_terminal:
        return True
    metrics = uow.find(File, step_metrics_file_id(job.id))
    if metrics is not None and metrics.object.key == asked.key:
        return not metrics.deleted
    name = fine_tuned_model_name(job.settings.base, job.account_id, job.id)
    model = uow.find(FineTunedModel, name)
    if model is None or asked.key not in (model.config.key, model.weights.key):
        return False
    return not model.deleted or bool(model.staged_by)
