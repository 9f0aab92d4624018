"""Fine-tuned models after their training: deleting them, and what becomes of their files."""

from __future__ import annotations

from dataclasses import dataclass

from domain.commands.ownership import model_of
from domain.file import File
from domain.fine_tuned_model import FineTunedModel
from domain.ids import fine_tuned_model_name, step_metrics_file_id
from domain.ledger.account import Account
from domain.unit_of_work import UnitOfWork
from domain.work.batch import Batch
from domain.work.fine_tuning_job import FineTuningJob


@dataclass(frozen=True, slots=True)
class DeleteModel:
    account_id: str
    model: str


def delete_model(uow: UnitOfWork, command: DeleteModel) -> tuple[str, ...]:
    """Makes a fine-tuned model unusable and frees its slot; returns the keys of the objects to
    delete: none while an open batch has staged it, which keeps it through every retry, or is not
    validated yet; the sweep has them later. Raises NotFound."""
    model = model_of(uow, command.account_id, command.model)
    account = uow.get(Account, command.account_id)
    model.delete(envelope=uow.envelope)
    account.free_model_slot(model.id, envelope=uow.envelope)
    return () if _is_staged(uow, model) else (model.config.key, model.weights.key)


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
    return not model.deleted or _is_staged(uow, model)


def _is_staged(uow: UnitOfWork, model: FineTunedModel) -> bool:
    """Whether an open batch's plan names the model, or may be about to: another process could be
    recording it in this moment, and neither would see the other."""
    account = uow.get(Account, model.account_id)
    plans = [uow.get(Batch, batch_id).plan for batch_id in account.open_batches]
    return any(
        plan is None or any(adapter.name == model.id for adapter in plan.adapters) for plan in plans
    )
