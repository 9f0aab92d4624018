"""Writes a batch's output and error files once nothing of it runs, and ends the batch.

The active worker calls it for each batch that may be finalised. The files are the chunks' results
in the order of the chunks, with an error line for every request that has none yet. Memory is
bounded by one chunk's input. After a crash anywhere it is done again with the same bytes under the
same keys, so ending twice is ending once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog

from adapters.worker.digests import OtherBytes, as_stored
from adapters.worker.system_context import system_context
from domain import ids
from domain.commands.batches import (
    FinishBatch,
    GiveUpBatch,
    LoseResult,
    ResultFile,
    finish_batch,
    give_up_batch,
    lose_result,
    may_end_without_lost_at,
)
from domain.inputs.jsonl import Line, LineSplitter
from domain.limits import BATCH_LINE_BYTES_MAX, MIB
from domain.log.stored import StoredObject
from domain.log.unit_of_work import CommandWriter, UnitOfWork
from domain.ports import ObjectMissing, Objects
from domain.work.batch import Batch, Chunk, Ending
from domain.work.batch_results import NeverRan, UnansweredRequest, given_up_line, never_ran_line

log = structlog.stdlib.get_logger(__name__)

PART = "finaliser"
RESULT_LINE_BYTES_MAX = 256 * MIB
"""More than any answer: a bound on what one line may hold in memory."""

_CODES: dict[Ending, NeverRan] = {"cancelled": "batch_cancelled", "expired": "batch_expired"}


@dataclass(frozen=True, slots=True)
class _Finished:
    """The last state of a batch; its chunks change no more. `without_lost`: what the store does
    not have is no longer waited for."""

    batch_id: str
    ending: Ending
    without_lost: bool
    input: StoredObject
    chunks: tuple[Chunk, ...]


class BatchResults:
    """`finalize` one batch."""

    def __init__(self, *, writer: CommandWriter, objects: Objects) -> None:
        self._writer = writer
        self._objects = objects

    async def finalize(self, batch_id: str) -> None:
        """Ends with the batch finished; raises where the store or the database is in trouble, and
        is then called again. A result that is not what was reported counts as never given; and a
        batch whose files cannot be written, long after its hold was to end, ends without them."""
        context = system_context(PART, work_id=batch_id, causation="finalize")
        while (batch := await self._writer.execute(_finished, batch_id, context)) is not None:
            try:
                output, errors = await self._write(batch)
                finish = FinishBatch(batch_id, output, errors)
                await self._writer.execute(finish_batch, finish, context)
            except (ObjectMissing, OtherBytes) as error:
                spoilt = isinstance(error, OtherBytes)
                lose = LoseResult(batch_id, key=str(error), spoilt=spoilt)
                if not await self._writer.execute(lose_result, lose, context):
                    raise
                log.exception("a chunk's result is lost", batch_id=batch_id, key=str(error))
            except Exception:
                if not await self._writer.execute(give_up_batch, GiveUpBatch(batch_id), context):
                    raise
                log.exception("batch given up", batch_id=batch_id)
            else:
                log.info("batch ended", batch_id=batch_id, ending=batch.ending)
                await self.forget_chunks(batch_id)

    async def _write(self, batch: _Finished) -> tuple[ResultFile | None, ResultFile | None]:
        """Output and error file; None for one that would be empty."""
        output = errors = None
        if any(chunk.result and chunk.result.output for chunk in batch.chunks):
            output = await self._store(batch.batch_id, "output", self._output(batch))
        if any(
            _lines_missing(chunk) or (chunk.result and chunk.result.errors)
            for chunk in batch.chunks
        ):
            errors = await self._store(batch.batch_id, "error", self._errors(batch))
        return output, errors

    async def forget_chunks(self, batch_id: str) -> None:
        """Deletes the chunks' objects of a batch that has ended: its files hold all of it."""
        async for key in self._objects.list_keys(f"chunks/{batch_id}/"):
            await self._objects.delete(key)

    async def _store(self, batch_id: str, role: str, pieces: AsyncIterator[bytes]) -> ResultFile:
        counted = _LineCount()
        file_id = ids.derived_file_id(batch_id, role)
        stored = await self._objects.put(f"files/{file_id}", counted.through(pieces))
        return ResultFile(object=stored, lines=counted.lines)

    async def _output(self, batch: _Finished) -> AsyncIterator[bytes]:
        for chunk in batch.chunks:
            if chunk.result is not None and chunk.result.output is not None:
                ref, lines = chunk.result.output, chunk.result.completed
                async for piece in _counted(as_stored(self._objects, ref), ref, lines):
                    yield piece

    async def _errors(self, batch: _Finished) -> AsyncIterator[bytes]:
        for index, chunk in enumerate(batch.chunks):
            if chunk.result is not None and chunk.result.errors is not None:
                ref, lines = chunk.result.errors, chunk.result.failed
                async for piece in _counted(as_stored(self._objects, ref), ref, lines):
                    yield piece
            if _lines_missing(chunk):
                async for line in self._unanswered(batch, index):
                    yield line

    async def _unanswered(self, batch: _Finished, index: int) -> AsyncIterator[bytes]:
        """An error line for each request of the chunk that has no line yet, in input order."""
        chunk = batch.chunks[index]
        answered = await self._answered(chunk)
        write = _line_writer(batch, chunk)
        plan = chunk.plan
        splitter = LineSplitter(
            line_bytes_max=BATCH_LINE_BYTES_MAX,
            first_line=plan.first_line,
            start_byte=plan.start_byte,
        )
        pieces = self._objects.get(
            batch.input.key, start_byte=plan.start_byte, end_byte=plan.end_byte
        )
        missing = plan.requests - len(answered)
        try:
            async for line in _lines(splitter, pieces):
                custom_id = _custom_id(line)
                if custom_id not in answered:
                    missing -= 1
                    yield write(UnansweredRequest(batch.batch_id, line.number, custom_id))
            if missing:
                # Answers to questions that the chunk does not have.
                raise OtherBytes(_any_key(chunk))
        except ObjectMissing:
            if not batch.without_lost:
                raise
            # The batch still ends, and every request still has its line.
            log.exception("input lost", batch_id=batch.batch_id)
            for number in range(plan.first_line + len(answered), plan.first_line + plan.requests):
                yield write(UnansweredRequest(batch.batch_id, number, None))

    async def _answered(self, chunk: Chunk) -> set[str]:
        answered: set[str] = set()
        result = chunk.result
        for stored in (result.output, result.errors) if result is not None else ():
            if stored is not None:
                splitter = LineSplitter(line_bytes_max=RESULT_LINE_BYTES_MAX)
                async for line in _lines(splitter, self._objects.get(stored.key)):
                    answered.add(_answered_id(line, stored))
        return answered


class _LineCount:
    """Counts the lines of what passes."""

    def __init__(self) -> None:
        self.lines = 0

    async def through(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same pieces."""
        async for piece in pieces:
            self.lines += piece.count(b"\n")
            yield piece


def _finished(uow: UnitOfWork, batch_id: str) -> _Finished | None:
    """None if the batch cannot be finalised, or was. Reads only."""
    batch = uow.get(Batch, batch_id)
    if not batch.may_finalize:
        return None
    assert batch.ending is not None
    return _Finished(
        batch_id=batch.id,
        ending=batch.ending,
        without_lost=uow.now >= may_end_without_lost_at(batch),
        input=batch.input,
        chunks=tuple(batch.chunks),
    )


def _lines_missing(chunk: Chunk) -> bool:
    written = chunk.result.completed + chunk.result.failed if chunk.result is not None else 0
    return written < chunk.plan.requests


def _line_writer(batch: _Finished, chunk: Chunk) -> Callable[[UnansweredRequest], bytes]:
    code = _CODES.get(batch.ending)
    if chunk.state == "abandoned" or code is None:
        return given_up_line
    return lambda request: never_ran_line(request, code)


async def _lines(splitter: LineSplitter, pieces: AsyncIterator[bytes]) -> AsyncIterator[Line]:
    async for piece in pieces:
        for line in splitter.feed(piece):
            yield line
    for line in splitter.finish():
        yield line


async def _counted(
    pieces: AsyncIterator[bytes], ref: StoredObject, lines: int
) -> AsyncIterator[bytes]:
    """The same pieces. Raises OtherBytes if they hold another number of lines."""
    async for piece in pieces:
        lines -= piece.count(b"\n")
        yield piece
    if lines:
        raise OtherBytes(ref.key)


def _any_key(chunk: Chunk) -> str:
    """Of a chunk whose result has an object."""
    assert chunk.result is not None
    ref = chunk.result.output or chunk.result.errors
    assert ref is not None
    return ref.key


def _answered_id(line: Line, ref: StoredObject) -> str:
    try:
        return _custom_id(line)
    except (AssertionError, ValueError, KeyError, TypeError):
        raise OtherBytes(ref.key) from None


def _custom_id(line: Line) -> str:
    assert line.content is not None
    return str(json.loads(line.content)["custom_id"])
