"""A batch's commands, from its validation to its end; creating one is in `create_batch.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from domain import ids
from domain.assets.file import File
from domain.assets.fine_tuned_model import FineTunedModel
from domain.catalog import CATALOG
from domain.commands.files import name_row
from domain.commands.idempotency import forget
from domain.commands.ownership import batch_of
from domain.commands.settlement import HoldTerms, capture_hold, place_hold, release_hold
from domain.inputs.batch_file import ChunkPlan
from domain.inputs.batch_line import LineError
from domain.ledger.account import Account
from domain.ledger.price_book import PriceBook
from domain.ledger.prices import batch_lines
from domain.ledger.receipt import End, Receipt, Terms, settle
from domain.limits import FILE_KEPT_SECONDS, HOLD_MARGIN_SECONDS
from domain.log.stored import StoredObject
from domain.log.unit_of_work import UnitOfWork
from domain.work.batch import Batch, BatchPlan
from domain.work.quote import BatchQuote

HOLD_MARGIN = timedelta(seconds=HOLD_MARGIN_SECONDS)
GIVE_UP_AFTER = timedelta(minutes=30)
"""How long past its hold's end a batch's files may still be tried to write: a store that is away
for some minutes at that moment costs nobody a result."""


@dataclass(frozen=True, slots=True)
class RecordBatchPlan:
    """Validation read the whole file and found nothing wrong. `first_lines` names for each `ft:`
    model the line that names it first."""

    batch_id: str
    chunks: tuple[ChunkPlan, ...]
    first_lines: Mapping[str, int]
    quote: BatchQuote


def record_batch_plan(uow: UnitOfWork, command: RecordBatchPlan) -> None:
    """Records the plan, or fails the batch if a model was deleted meanwhile."""
    batch = uow.get(Batch, command.batch_id)
    if not batch.wants_plan:
        return
    models: list[FineTunedModel] = []
    errors: list[LineError] = []
    for name, line in sorted(command.first_lines.items()):
        model = uow.find(FineTunedModel, name)
        if model is None or model.account_id != batch.account_id or model.deleted:
            errors.append(
                LineError(
                    code="model_not_found",
                    message="The line names a model that your account does not have.",
                    param="body.model",
                    line=line,
                )
            )
        else:
            models.append(model)
    if errors:
        _end_failed(uow, batch, tuple(errors))
        return
    for model in models:
        model.stage(batch.id, envelope=uow.envelope)
    batch.record_plan(
        BatchPlan(
            base_revision=CATALOG[command.quote.base].revision or "unpinned",
            chunks=command.chunks,
            adapters=tuple(model.adapter for model in models),
            quote=command.quote,
        ),
        envelope=uow.envelope,
    )


@dataclass(frozen=True, slots=True)
class FailBatch:
    """Validation found faults: up to 100 of them."""

    batch_id: str
    errors: tuple[LineError, ...]


def fail_batch(uow: UnitOfWork, command: FailBatch) -> None:
    """Ends a batch that cannot run. Nothing ran and nothing is charged."""
    batch = uow.get(Batch, command.batch_id)
    if batch.wants_plan:
        _end_failed(uow, batch, command.errors)


def start_batch(uow: UnitOfWork, batch_id: str) -> None:
    """Holds the credit and lets chunks be assigned; or waits for the account's own holds; or fails
    with `insufficient_quota`."""
    batch = uow.get(Batch, batch_id)
    if not batch.may_start:
        return
    assert batch.plan is not None
    funding = place_hold(
        uow,
        HoldTerms(
            work_id=batch.id,
            account_id=batch.account_id,
            key_id=batch.key_id,
            maximum_nano_usd=batch.plan.quote.maximum_nano_usd,
            price_version=batch.price_version,
            expires_at=batch.expires_at + HOLD_MARGIN,
        ),
    )
    if funding == "held":
        batch.start(envelope=uow.envelope)
    elif funding == "wait":
        batch.wait("customer_credit", envelope=uow.envelope)
    else:
        no_credit = LineError(
            code="insufficient_quota",
            message="Your credit does not cover the most that this batch can cost. Add credit, or "
            "lower max_completion_tokens, and create it again.",
            param=None,
            line=None,
        )
        _end_failed(uow, batch, (no_credit,))


@dataclass(frozen=True, slots=True)
class CancelBatch:
    account_id: str
    batch_id: str


def cancel_batch(uow: UnitOfWork, command: CancelBatch) -> None:
    """Stops what runs and keeps what is finished. Raises NotFound or InvalidState."""
    batch_of(uow, command.account_id, command.batch_id).request_cancel(envelope=uow.envelope)
    forget(uow, command.batch_id)


def end_batch_window(uow: UnitOfWork, batch_id: str) -> None:
    """The completion window is over."""
    batch = uow.get(Batch, batch_id)
    if not batch.is_terminal and uow.now >= batch.expires_at:
        batch.end_window(envelope=uow.envelope)


@dataclass(frozen=True, slots=True)
class StopWaiting:
    batch_id: str


def stop_waiting(uow: UnitOfWork, command: StopWaiting) -> None:
    """Attempts of a cancelled batch, or of one past its window, did not stop in time: it ends
    without them."""
    uow.get(Batch, command.batch_id).stop_waiting(envelope=uow.envelope)


def may_end_without_lost_at(batch: Batch) -> datetime:
    """When the hold ends. Until then what the store does not have may still come back, as after a
    disk that was not mounted."""
    return batch.expires_at + HOLD_MARGIN


@dataclass(frozen=True, slots=True)
class LoseResult:
    """`key` is of the object that the store does not have, or that is `spoilt`: it is not the one
    that was reported, and will not come back as that."""

    batch_id: str
    key: str
    spoilt: bool = False


def lose_result(uow: UnitOfWork, command: LoseResult) -> bool:
    """A chunk's stored result is gone: once nobody waits for the store any more, the batch ends
    without it, and it costs nothing. Losing it twice is losing it once. Returns whether it was
    lost now."""
    batch = uow.get(Batch, command.batch_id)
    waits = not command.spoilt and uow.now < may_end_without_lost_at(batch)
    if not batch.may_finalize or waits:
        return False
    for index, chunk in enumerate(batch.chunks):
        stored = (chunk.result.output, chunk.result.errors) if chunk.result else ()
        if any(ref is not None and ref.key == command.key for ref in stored):
            batch.lose_result(index, envelope=uow.envelope)
            return True
    return False


@dataclass(frozen=True, slots=True)
class GiveUpBatch:
    batch_id: str


def give_up_batch(uow: UnitOfWork, command: GiveUpBatch) -> bool:
    """Ends a batch whose files could not be written until well after its hold was to end: without
    files, and nothing is charged. Returns whether it did."""
    batch = uow.get(Batch, command.batch_id)
    if not batch.may_finalize or uow.now < may_end_without_lost_at(batch) + GIVE_UP_AFTER:
        return False
    release_hold(uow, batch.id)
    _free(uow, batch)
    batch.finish(
        output_file_id=None,
        error_file_id=None,
        completed=0,
        failed=batch.plan.quote.requests if batch.plan is not None else 0,
        receipt=None,
        envelope=uow.envelope,
    )
    return True


@dataclass(frozen=True, slots=True)
class ResultFile:
    """An output or error file whose bytes are durable; `lines` counts its lines."""

    object: StoredObject
    lines: int


@dataclass(frozen=True, slots=True)
class FinishBatch:
    """Both files are complete; a null one would be empty."""

    batch_id: str
    output: ResultFile | None
    errors: ResultFile | None


def finish_batch(uow: UnitOfWork, command: FinishBatch) -> None:
    """Registers the files, settles the hold, frees the slot and ends the batch, in one append.
    Finishing twice is finishing once."""
    batch = uow.get(Batch, command.batch_id)
    if not batch.may_finalize:
        return
    output_id = _store_result(uow, batch, "output", command.output)
    error_id = _store_result(uow, batch, "error", command.errors)
    succeeded = command.output.lines if command.output else 0
    receipt = _receipt(uow, batch, succeeded=succeeded)
    if receipt is not None:
        capture_hold(uow, batch.id, receipt.charge_nano_usd)
    else:
        release_hold(uow, batch.id)
    _free(uow, batch)
    batch.finish(
        output_file_id=output_id,
        error_file_id=error_id,
        completed=succeeded,
        failed=command.errors.lines if command.errors else 0,
        receipt=receipt,
        envelope=uow.envelope,
    )


def _receipt(uow: UnitOfWork, batch: Batch, *, succeeded: int) -> Receipt | None:
    """The charge of what finished, or None where nothing is charged (`docs/errors.md`)."""
    usage = batch.usage()
    if batch.plan is None or not succeeded or not usage:
        return None
    assert batch.ending is not None
    quote = batch.plan.quote
    prices = uow.get(PriceBook, ids.PRICE_BOOK_ID).of_version(batch.price_version)
    return settle(
        Terms(
            price_version=batch.price_version,
            base=quote.base,
            base_revision=batch.plan.base_revision,
            minimum_nano_usd=quote.minimum_nano_usd,
            maximum_nano_usd=quote.maximum_nano_usd,
            input_sha256=(batch.input.sha256,),
        ),
        batch_lines(prices=prices, usage=usage),
        End(ended=batch.ending, minimum_applies=batch.minimum_applies(succeeded=succeeded)),
    )


def _store_result(
    uow: UnitOfWork, batch: Batch, role: str, result: ResultFile | None
) -> str | None:
    if result is None:
        return None
    seconds = batch.output_expires_seconds or FILE_KEPT_SECONDS
    file = File(
        id=ids.derived_file_id(batch.id, role),
        envelope=uow.envelope,
        account_id=batch.account_id,
        purpose="batch_output",
        object=result.object,
        expires_at=uow.now + timedelta(seconds=seconds),
        training=None,
    )
    uow.add(file)
    uow.personal(name_row(file.id, batch.account_id, f"{batch.id}_{role}.jsonl"))
    return file.id


def _end_failed(uow: UnitOfWork, batch: Batch, errors: tuple[LineError, ...]) -> None:
    _free(uow, batch)
    batch.fail(errors, envelope=uow.envelope)


def _free(uow: UnitOfWork, batch: Batch) -> None:
    uow.get(Account, batch.account_id).free_batch_slot(batch.id, envelope=uow.envelope)
    uow.get(File, batch.input_file_id).unpin(batch.id, envelope=uow.envelope)
    for adapter in batch.plan.adapters if batch.plan is not None else ():
        uow.get(FineTunedModel, adapter.name).unstage(batch.id, envelope=uow.envelope)
