"""Reads a new batch's input file once, as a stream, and plans the batch or fails it.

The active worker calls it for each batch that is `validating` without a plan. Nothing is held and
nothing runs here. It may run twice: the commands it ends in change nothing the second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import structlog

from adapters.worker.system_context import system_context
from domain import ids
from domain.catalog import Endpoint
from domain.commands.batches import FailBatch, RecordBatchPlan, fail_batch, record_batch_plan
from domain.errors import InvalidRequest
from domain.inputs.batch_file import BatchFileCheck, BatchFileFacts
from domain.inputs.batch_line import LineError
from domain.ledger.price_book import PriceBook
from domain.ledger.prices import PriceList
from domain.log.stored import StoredObject
from domain.log.unit_of_work import CommandContext, CommandWriter, UnitOfWork
from domain.ports import ObjectMissing, Objects
from domain.work.batch import Batch
from domain.work.quote import quote_batch
from projections.read_model import Read
from projections.work import models

log = structlog.stdlib.get_logger(__name__)

PART = "validation"

P = ParamSpec("P")
T = TypeVar("T")

_FILE_GONE = LineError(
    code="file_not_found",
    message="The input file is no longer stored.",
    param="input_file_id",
    line=None,
)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is checked, and the prices that the batch was created under."""

    account_id: str
    endpoint: Endpoint
    input: StoredObject
    prices: PriceList


class BatchValidation:
    """`validate` one batch."""

    def __init__(
        self,
        *,
        writer: CommandWriter,
        read: Read,
        objects: Objects,
        chunk_requests: int,
    ) -> None:
        self._writer = writer
        self._read = read
        self._objects = objects
        self._chunk_requests = chunk_requests
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gridline-validation")

    async def validate(self, batch_id: str) -> None:
        """Ends with the plan recorded or the batch failed; raises where the store or the database
        is in trouble, and is then called again."""
        context = system_context(PART, work_id=batch_id, causation="validate")
        subject = await self._writer.execute(_subject_of, batch_id, context)
        if subject is None:
            return
        try:
            facts = await self._check(subject)
        except ObjectMissing:
            await self._fail(batch_id, (_FILE_GONE,), context)
            return
        if facts.errors:
            await self._fail(batch_id, facts.errors, context)
            return
        try:
            plan = _plan(batch_id, subject=subject, facts=facts)
        except InvalidRequest as refused:
            await self._fail(batch_id, (_without_a_price(refused),), context)
            return
        await self._writer.execute(record_batch_plan, plan, context)
        log.info(
            "batch planned",
            batch_id=batch_id,
            requests=facts.requests,
        )

    async def _check(self, subject: _Subject) -> BatchFileFacts:
        check = BatchFileCheck(
            endpoint=subject.endpoint,
            own_models=await self._read(models.servable_bases, account_id=subject.account_id),
            chunk_requests=self._chunk_requests,
        )
        async for piece in self._objects.get(subject.input.key):
            await self._in_thread(check.feed, piece)
        return await self._in_thread(check.finish)

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One piece of a file at a time, whoever's it is: of each file the next piece waits for one
        of each other."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def _fail(
        self, batch_id: str, errors: tuple[LineError, ...], context: CommandContext
    ) -> None:
        await self._writer.execute(fail_batch, FailBatch(batch_id, errors), context)
        log.info(
            "batch refused",
            batch_id=batch_id,
            codes=sorted({e.code for e in errors}),
        )


def _subject_of(uow: UnitOfWork, batch_id: str) -> _Subject | None:
    """None if there is nothing left to check. Reads only."""
    batch = uow.get(Batch, batch_id)
    if not batch.wants_plan:
        return None
    return _Subject(
        account_id=batch.account_id,
        endpoint=batch.endpoint,
        input=batch.input,
        prices=uow.get(PriceBook, ids.PRICE_BOOK_ID).of_version(batch.price_version),
    )


def _without_a_price(refused: InvalidRequest) -> LineError:
    """The prices that the batch was created under are older than its base model."""
    return LineError(
        code="model_not_priced", message=refused.message, param="body.model", line=None
    )


def _plan(batch_id: str, *, subject: _Subject, facts: BatchFileFacts) -> RecordBatchPlan:
    assert facts.base is not None
    return RecordBatchPlan(
        batch_id=batch_id,
        chunks=facts.chunks,
        first_lines=facts.first_lines,
        quote=quote_batch(
            base=facts.base,
            requests=facts.requests,
            worst_case=facts.worst_case,
            prices=subject.prices,
        ),
    )
