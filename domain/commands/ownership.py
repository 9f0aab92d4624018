"""Another account's ids answer exactly as unknown ones: one rule, for every kind of thing."""

from __future__ import annotations

from domain.assets.file import File
from domain.assets.fine_tuned_model import FineTunedModel
from domain.errors import NotFound
from domain.log.unit_of_work import UnitOfWork
from domain.work.batch import Batch
from domain.work.fine_tuning_job import FineTuningJob


def file_of(uow: UnitOfWork, account_id: str, file_id: str, *, param: str) -> File:
    """Raises NotFound, with `param` naming the field that held the id."""
    file = uow.find(File, file_id)
    if file is None or file.account_id != account_id or file.deleted:
        raise NotFound(f"No such file: {param}.", param=param)
    return file


def batch_of(uow: UnitOfWork, account_id: str, batch_id: str) -> Batch:
    """Raises NotFound."""
    batch = uow.find(Batch, batch_id)
    if batch is None or batch.account_id != account_id:
        raise NotFound("No such batch.", param="batch_id")
    return batch


def job_of(uow: UnitOfWork, account_id: str, job_id: str) -> FineTuningJob:
    """Raises NotFound."""
    job = uow.find(FineTuningJob, job_id)
    if job is None or job.account_id != account_id:
        raise NotFound("No such fine-tuning job.", param="fine_tuning_job_id")
    return job


def model_of(uow: UnitOfWork, account_id: str, model: str) -> FineTunedModel:
    """Raises NotFound."""
    found = uow.find(FineTunedModel, model)
    if found is None or found.account_id != account_id or found.deleted:
        raise NotFound("No such model.", param="model")
    return found
