"""Storing, deleting and expiring files, and deleting fine-tuned models."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from domain.assets.file import File, Purpose
from domain.commands.idempotency import Origin, forget, made_before, remember
from domain.commands.ownership import file_of
from domain.inputs.training_file import TrainingFacts
from domain.log.stored import StoredObject
from domain.log.unit_of_work import PersonalRow, UnitOfWork


@dataclass(frozen=True, slots=True)
class StoreFile:
    """An upload whose bytes are durable and checked. `file_id` was drawn before the bytes came,
    since the object's key holds it."""

    origin: Origin
    file_id: str
    purpose: Purpose
    object: StoredObject
    filename: str
    expires_at: datetime | None
    training: TrainingFacts | None


def store_file(uow: UnitOfWork, command: StoreFile) -> str:
    """Records the file; returns its id, or that of the file which the same `Idempotency-Key` made
    before: then nothing refers to this one's object."""
    made = made_before(uow, command.origin)
    if made is not None:
        return made
    account_id = command.origin.account_id
    uow.add(
        File(
            id=command.file_id,
            envelope=uow.envelope,
            account_id=account_id,
            purpose=command.purpose,
            object=command.object,
            expires_at=command.expires_at,
            training=command.training,
        )
    )
    uow.personal(name_row(command.file_id, account_id, command.filename))
    remember(uow, command.origin, command.file_id)
    return command.file_id


def name_row(file_id: str, account_id: str, filename: str) -> PersonalRow:
    """The personal row that holds a file's name."""
    return PersonalRow(
        "file_names", {"file_id": file_id}, {"account_id": account_id, "filename": filename}
    )


@dataclass(frozen=True, slots=True)
class DeleteFile:
    account_id: str
    file_id: str


def delete_file(uow: UnitOfWork, command: DeleteFile) -> tuple[str, ...]:
    """Forgets a file and its name; returns the key of the object to delete. Raises NotFound, or
    InvalidState while open work uses it."""
    file = file_of(uow, command.account_id, command.file_id, param="id")
    file.delete(because="asked", envelope=uow.envelope)
    forget(uow, file.id)
    uow.personal(PersonalRow("file_names", {"file_id": file.id}, None))
    return (file.object.key,)


@dataclass(frozen=True, slots=True)
class ExpireFile:
    file_id: str


def expire_file(uow: UnitOfWork, command: ExpireFile) -> str | None:
    """Forgets a file whose time is over and that nothing uses; returns the key of the object to
    delete, or None if there is nothing to do."""
    file = uow.get(File, command.file_id)
    due = file.expires_at is not None and file.expires_at <= uow.now
    if not due or file.deleted or file.pins:
        return None
    file.delete(because="expired", envelope=uow.envelope)
    uow.personal(PersonalRow("file_names", {"file_id": file.id}, None))
    return file.object.key
