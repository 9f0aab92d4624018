"""POST /batches: takes the slot and the file; credit is asked for only when the batch starts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from domain import ids
from domain.commands.idempotency import Origin, made_before, remember
from domain.commands.ownership import file_of
from domain.commands.prices import current_prices
from domain.errors import InvalidRequest
from domain.inputs.batch_create import BatchCreate
from domain.ledger.account import Account
from domain.ledger.key_spend import KeySpend
from domain.limits import COMPLETION_WINDOW_SECONDS
from domain.log.unit_of_work import PersonalRow, UnitOfWork
from domain.work.batch import Batch


@dataclass(frozen=True, slots=True)
class CreateBatch:
    origin: Origin
    create: BatchCreate


def create_batch(uow: UnitOfWork, command: CreateBatch) -> str:
    """Creates a batch in `validating`; returns its id. Raises NotFound for the file, InvalidRequest
    for one of another purpose, LimitExceeded for the account's or the key's limits."""
    origin, create = command.origin, command.create
    made = made_before(uow, origin)
    if made is not None:
        return made
    file = file_of(uow, origin.account_id, create.input_file_id, param="input_file_id")
    if file.purpose != "batch":
        raise InvalidRequest(
            f'input_file_id must be a file of purpose "batch", not "{file.purpose}".',
            param="input_file_id",
        )
    uow.get(KeySpend, origin.key_id).must_allow(None, now=uow.now)
    account = uow.get(Account, origin.account_id)
    prices = current_prices(uow)
    batch_id = uow.new_id(ids.BATCH)
    account.take_batch_slot(batch_id, envelope=uow.envelope)
    file.pin(batch_id, envelope=uow.envelope)
    window = timedelta(seconds=COMPLETION_WINDOW_SECONDS[create.completion_window])
    uow.add(
        Batch(
            id=batch_id,
            envelope=uow.envelope,
            account_id=origin.account_id,
            key_id=origin.key_id,
            input_file_id=file.id,
            input=file.object,
            endpoint=create.endpoint,
            completion_window=create.completion_window,
            output_expires_seconds=create.output_expires_seconds,
            price_version=prices.version,
            expires_at=uow.now + window,
        )
    )
    uow.personal(texts_row(batch_id, origin.account_id, create.metadata, suffix=None))
    remember(uow, origin, batch_id)
    return batch_id


def texts_row(
    work_id: str, account_id: str, metadata: dict[str, str] | None, *, suffix: str | None
) -> PersonalRow:
    """What a person wrote on a job or batch."""
    return PersonalRow(
        "work_texts",
        {"work_id": work_id},
        {"account_id": account_id, "metadata": metadata, "suffix": suffix},
    )
