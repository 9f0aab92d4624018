"""Takes in what runners report, exactly once in effect, and what their heartbeats say.

Each worker is a member of the group that reads `progress`. A report and its position in the topic
are recorded in one commit, so that whatever the broker repeats changes nothing. Progress is thinned
out: of one poll only the newest of an attempt, and one event a work item in a while; final reports
are never dropped. A message that cannot be handled is set aside, with its position, and the rest
goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from eventsourcing.persistence import InterfaceError, OperationalError
from pydantic import ValidationError

from adapters.worker import measures
from adapters.worker.digests import is_stored
from adapters.worker.fleet import SteadySeconds
from adapters.worker.system_context import system_context
from domain.commands.work import RecordReport, claimed_objects, claims_objects, record_report
from domain.errors import DuplicateDelivery, GridlineError, Overloaded
from domain.log.stored import StoredObject
from domain.log.unit_of_work import CommandContext, CommandWriter, PersonalRow, UnitOfWork
from domain.messages import ChunkProgress, Report, Started, TrainProgress
from domain.ports import Objects, Record
from domain.work.kinds import find_kind

log = structlog.stdlib.get_logger(__name__)

PART = "ingest"
GROUP = "ingest"
REMEMBERED_WORK_MAX = 10_000


@dataclass(frozen=True, slots=True)
class _Delivery:
    """One record that is worth a commit; `report` is None for one that cannot be read."""

    record: Record
    report: Report | None


@dataclass(frozen=True, slots=True)
class SetAside:
    """Keeps where a message stood and what was wrong, never what it said."""

    record: Record
    reason: str


def set_aside(uow: UnitOfWork, command: SetAside) -> None:
    """Writes the dead letter; its position is recorded in the same append."""
    record = command.record
    uow.personal(
        PersonalRow(
            "dead_letters",
            {"position_name": record.position_name, "broker_offset": record.offset},
            {
                "topic": record.topic,
                "reason": command.reason,
                "sha256": hashlib.sha256(record.value).hexdigest(),
                "set_aside_at": uow.now,
            },
        )
    )


class Ingest:
    """`take` the records of a poll; when it returns, all that counts is committed."""

    def __init__(
        self,
        *,
        writer: CommandWriter,
        objects: Objects,
        progress_event_seconds: float,
        steady_seconds: SteadySeconds,
    ) -> None:
        self._writer = writer
        self._objects = objects
        self._event_seconds = progress_event_seconds
        self._now = steady_seconds
        self._last_progress: dict[str, float] = {}

    async def take(self, records: Sequence[Record]) -> None:
        """Partitions at once, each in order. Raises a retryable GridlineError or the database's
        error: then the same records must be taken again."""
        by_partition: dict[tuple[str, int], list[Record]] = {}
        for record in records:
            by_partition.setdefault((record.topic, record.partition), []).append(record)
        results = await asyncio.gather(
            *(self._take_partition(part) for part in by_partition.values()),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _take_partition(self, records: Sequence[Record]) -> None:
        for delivery in self._thin_out([_read(record) for record in records]):
            await self._record(delivery)

    async def _record(self, delivery: _Delivery) -> None:
        record, report = delivery.record, delivery.report
        position = (record.position_name, record.offset)
        context = _context(delivery)
        reason = "unreadable"
        if report is not None:
            try:
                stored = await self._as_claimed(report, context)
                await self._writer.execute(
                    record_report, RecordReport(report, stored), context, tracking=position
                )
            except DuplicateDelivery:
                measures.REPORTS.labels("repeated").inc()
                return
            except Exception as error:
                if _may_pass(error):
                    raise
                reason = type(error).__name__
                log.exception("report refused", **_where(record))
            else:
                _count(report)
                return
        measures.REPORTS.labels("set aside").inc()
        log.error("message set aside", **_where(record))
        try:
            await self._writer.execute(
                set_aside,
                SetAside(record=record, reason=reason),
                context,
                tracking=position,
            )
        except DuplicateDelivery:
            return

    async def _as_claimed(
        self, report: Report, context: CommandContext
    ) -> tuple[StoredObject, ...]:
        """The objects that the report claims and the store has just so."""
        if not claims_objects(report):
            return ()
        claimed = await self._writer.execute(claimed_objects, report, context)
        try:
            return tuple([each for each in claimed if await is_stored(self._objects, each)])
        except Exception as error:
            raise Overloaded("The object store is away. Try again.") from error

    def _thin_out(self, deliveries: Sequence[_Delivery]) -> list[_Delivery]:
        newest = {
            delivery.report.attempt: index
            for index, delivery in enumerate(deliveries)
            if delivery.report is not None
        }
        return [
            delivery
            for index, delivery in enumerate(deliveries)
            if delivery.report is None
            or delivery.report.is_final
            or (
                newest[delivery.report.attempt] == index
                and self._is_worth_an_event(delivery.report)
            )
        ]

    def _is_worth_an_event(self, report: Report) -> bool:
        work_id = report.attempt.work_id
        match report.body:
            case Started():
                kind = find_kind(work_id)
                return kind is not None and kind.says_that_it_began
            case ChunkProgress() | TrainProgress():
                now = self._now()
                last = self._last_progress.get(work_id)
                if last is not None and now - last < self._event_seconds:
                    return False
                if len(self._last_progress) >= REMEMBERED_WORK_MAX:
                    self._last_progress.clear()
                self._last_progress[work_id] = now
                return True
            case _:
                return True


def _count(report: Report) -> None:
    measures.REPORTS.labels("recorded").inc()
    if report.is_final:
        measures.ATTEMPTS.labels(report.body.type).inc()


def _read(record: Record) -> _Delivery:
    try:
        return _Delivery(record, Report.model_validate_json(record.value))
    except ValidationError:
        return _Delivery(record, None)


def _may_pass(error: Exception) -> bool:
    """Trouble of the moment: nothing was recorded, and the same message may succeed."""
    if isinstance(error, GridlineError):
        return error.retryable
    return isinstance(error, OperationalError | InterfaceError)


def _context(delivery: _Delivery) -> CommandContext:
    record = delivery.record
    work_id = delivery.report.attempt.work_id if delivery.report else "unreadable"
    return system_context(
        PART,
        work_id=work_id,
        causation=f"{record.position_name}/{record.offset}",
    )


def _where(record: Record) -> dict[str, object]:
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}
