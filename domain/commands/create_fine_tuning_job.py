"""POST /fine_tuning/jobs: quotes the job, takes its slots and files; nothing is held or run yet.

Two commands, since between them the caller reads both files for control tokens of the base's
template, which is costly and depends on their bytes alone. All else is decided here, from
aggregates, and first: what a limit refuses costs no reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from domain import ids
from domain.assets.file import File
from domain.assets.fine_tuned_model import FineTunedModel
from domain.catalog import CATALOG
from domain.commands.create_batch import texts_row
from domain.commands.idempotency import Origin, made_before, remember
from domain.commands.ownership import file_of
from domain.commands.prices import current_prices
from domain.errors import InvalidRequest
from domain.inputs.job_create import FineTuneCreate
from domain.inputs.training_file import FileRole, TrainingFacts
from domain.ledger.account import Account
from domain.ledger.key_spend import KeySpend
from domain.limits import JOB_SECONDS_MAX, WAITING_SECONDS_MAX
from domain.log.stored import StoredObject
from domain.log.unit_of_work import UnitOfWork
from domain.work.fine_tuning_job import FineTuningJob, JobFile, JobSettings
from domain.work.quote import FineTuneQuote, JobInput, quote_fine_tune

TRAINABLE = tuple(base.id for base in CATALOG.values() if base.fine_tuning is not None)


@dataclass(frozen=True, slots=True)
class CreateFineTuningJob:
    origin: Origin
    create: FineTuneCreate


@dataclass(frozen=True, slots=True)
class Admission:
    """`made` is the id of what the same `Idempotency-Key` made before; without it, `files` are to
    be read."""

    made: str | None
    files: tuple[tuple[FileRole, StoredObject], ...] = ()


def admit_fine_tuning_job(uow: UnitOfWork, command: CreateFineTuningJob) -> Admission:
    """Decides what can be decided without reading a file. Reads only. Raises as the create."""
    made = made_before(uow, command.origin)
    if made is not None:
        return Admission(made=made)
    training, validation, _ = _admitted(uow, command)
    files: list[tuple[FileRole, StoredObject]] = [("training file", training.object)]
    if validation is not None:
        files.append(("validation file", validation.object))
    return Admission(made=None, files=tuple(files))


def create_fine_tuning_job(uow: UnitOfWork, command: CreateFineTuningJob) -> str:
    """Creates a job in `validating_files`; returns its id. Raises NotFound for a file, InvalidFile
    for one that the job cannot use, LimitExceeded for the account's or the key's limits."""
    origin, create = command.origin, command.create
    made = made_before(uow, origin)
    if made is not None:
        return made
    training, validation, quote = _admitted(uow, command)
    account = uow.get(Account, origin.account_id)
    job_id = _free_job_id(uow, account)
    account.take_fine_tune_slot(job_id, envelope=uow.envelope)
    for file in (training, validation):
        if file is not None:
            file.pin(job_id, envelope=uow.envelope)
    uow.add(
        FineTuningJob(
            id=job_id,
            envelope=uow.envelope,
            account_id=origin.account_id,
            key_id=origin.key_id,
            settings=_settings(create, quote=quote, training=training, validation=validation),
            waiting_until=uow.now + timedelta(seconds=WAITING_SECONDS_MAX),
        )
    )
    uow.personal(texts_row(job_id, origin.account_id, create.metadata, suffix=create.suffix))
    remember(uow, origin, job_id)
    return job_id


def _admitted(
    uow: UnitOfWork, command: CreateFineTuningJob
) -> tuple[File, File | None, FineTuneQuote]:
    """The files and the quote. Raises as the create, for all that it can be refused for."""
    origin, create = command.origin, command.create
    training = _fine_tune_file(uow, origin, create.training_file, param="training_file")
    validation = (
        _fine_tune_file(uow, origin, create.validation_file, param="validation_file")
        if create.validation_file is not None
        else None
    )
    quote = quote_fine_tune(
        create,
        training=_job_input(training),
        validation=_job_input(validation) if validation is not None else None,
        prices=current_prices(uow),
    )
    uow.get(KeySpend, origin.key_id).must_allow(quote.maximum_nano_usd, now=uow.now)
    uow.get(Account, origin.account_id).must_have_fine_tune_slot()
    return training, validation, quote


def _fine_tune_file(uow: UnitOfWork, origin: Origin, file_id: str, *, param: str) -> File:
    file = file_of(uow, origin.account_id, file_id, param=param)
    if file.purpose == "batch_output":
        raise InvalidRequest(
            "Training on a batch's output file is not offered yet. Upload its answers as chat rows "
            "with purpose=fine-tune, and name that file.",
            param=param,
        )
    if file.purpose != "fine-tune":
        raise InvalidRequest(
            f'{param} must be a file of purpose "fine-tune", not "{file.purpose}".', param=param
        )
    return file


def _job_input(file: File) -> JobInput:
    return JobInput(facts=_facts(file), bytes=file.object.bytes)


def _facts(file: File) -> TrainingFacts:
    assert file.training is not None
    return file.training


def _free_job_id(uow: UnitOfWork, account: Account) -> str:
    """A job id whose first 12 digits, which name its model, are those of no other model of the
    account, of whatever base, and of no job that may make one."""
    while True:
        job_id = uow.new_id(ids.JOB)
        names = (ids.fine_tuned_model_name(base, account.id, job_id) for base in TRAINABLE)
        open_jobs = {ids.model_suffix(each) for each in account.open_fine_tunes}
        if ids.model_suffix(job_id) not in open_jobs and not any(
            uow.find(FineTunedModel, name) for name in names
        ):
            return job_id


def _settings(
    create: FineTuneCreate, *, quote: FineTuneQuote, training: File, validation: File | None
) -> JobSettings:
    return JobSettings(
        base=create.base.id,
        base_revision=create.base.revision or "unpinned",
        servable=create.training.servable,
        method=create.method,
        adapter=create.adapter,
        hyperparameters=create.hyperparameters,
        seed=create.seed,
        training=_job_file(training),
        validation=_job_file(validation) if validation is not None else None,
        quote=quote,
        time_limit_seconds=JOB_SECONDS_MAX,
        has_suffix=create.suffix is not None,
    )


def _job_file(file: File) -> JobFile:
    return JobFile(file_id=file.id, object=file.object, rows=_facts(file).rows)
