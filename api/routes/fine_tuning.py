"""Everything under /fine_tuning/jobs."""

from __future__ import annotations

from typing import NoReturn

from starlette.requests import Request
from starlette.responses import Response

from api.control import Call
from api.file_checks import Asked
from api.http.idempotency import answer_came_through, cancel_once, canonical_sha256, create_once
from api.http.json_body import read_json
from api.http.json_response import json_response
from api.http.pagination import after_of, answer_page, bad_cursor, limit_of, list_object
from api.schemas.fine_tuning import TERMINAL, checkpoint_object, event_object, job_object
from domain.commands.create_fine_tuning_job import (
    CreateFineTuningJob,
    admit_fine_tuning_job,
    create_fine_tuning_job,
)
from domain.commands.fine_tuning import CancelFineTuningJob, cancel_fine_tuning_job
from domain.commands.idempotency import Origin
from domain.errors import InvalidRequest, NotFound
from domain.inputs.job_create import FineTuneCreate, parse_fine_tuning_create
from domain.inputs.training_file import FileRole, TemplateCheck
from domain.log.stored import StoredObject
from domain.ports import ObjectMissing
from projections.work import fine_tuning_events, fine_tuning_jobs
from projections.work.fine_tuning_jobs import JobRow

LIMIT_MAX = 100
JOBS_DEFAULT = 20
EVENTS_DEFAULT = 20
CHECKPOINTS_DEFAULT = 10


async def create(call: Call) -> Response:
    """Creates a job, which starts it; the answer carries its quote."""
    body = await read_json(call.request)
    wanted = parse_fine_tuning_create(body)

    async def decide(origin: Origin) -> str:
        command = CreateFineTuningJob(origin=origin, create=wanted)
        admission = await call.execute(admit_fine_tuning_job, command)
        if admission.made is not None:
            return admission.made
        for role, stored in admission.files:
            await _must_fit_template(call, wanted, stored, role=role)
        return await call.execute(create_fine_tuning_job, command)

    made = await create_once(call, body_sha256=canonical_sha256(body), create=decide)
    return json_response(job_object(await _job(call, made)))


async def _must_fit_template(
    call: Call, wanted: FineTuneCreate, stored: StoredObject, *, role: FileRole
) -> None:
    """Reads a file for what the base's template would do to its text. Raises NotFound, InvalidFile
    or RateLimited."""
    account_id, checks = call.caller.account_id, call.api.file_checks

    async def read() -> None:
        check = TemplateCheck(wanted.base, wanted.training, file=role)
        try:
            async for piece in call.api.control.objects.get(stored.key):
                await checks.in_turn(account_id, check.feed, piece)
        except ObjectMissing:
            param = role.replace(" ", "_")
            raise NotFound(f"No such file: {param}.", param=param) from None
        await checks.in_turn(account_id, check.finish)

    asked = Asked(sha256=stored.sha256, base=wanted.base.id, role=role)
    await checks.must_pass(account_id, asked, read)


async def list_all(call: Call) -> Response:
    """Lists the account's jobs, newest first."""
    return await answer_page(
        call,
        fine_tuning_jobs.list_page,
        job_object,
        default=JOBS_DEFAULT,
        most=LIMIT_MAX,
        account_id=call.caller.account_id,
        metadata=_metadata_pairs(call.request),
        without_metadata=call.request.query_params.get("metadata") == "null",
    )


def _metadata_pairs(request: Request) -> dict[str, str]:
    """The `metadata[k]=v` pairs that a job must have. Raises InvalidRequest."""
    pairs = {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in request.query_params.multi_items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    if any("\0" in text for pair in pairs.items() for text in pair):
        raise InvalidRequest("metadata holds the character NUL.", param="metadata")
    return pairs


async def retrieve(call: Call) -> Response:
    """One job."""
    row = await _job(call, _job_id(call))
    if row.status in TERMINAL:
        await answer_came_through(call, row.id, made_at=row.created_at)
    return json_response(job_object(row))


async def cancel(call: Call) -> Response:
    """Ends a job; nothing is charged."""
    job_id = _job_id(call)
    row = await cancel_once(
        call,
        call.execute(cancel_fine_tuning_job, CancelFineTuningJob(call.caller.account_id, job_id)),
        look=lambda: _job(call, job_id),
        cancelled_at=lambda row: row.finished_at if row.status == "cancelled" else None,
    )
    return json_response(job_object(row))


async def pause(call: Call) -> Response:
    """Not offered, though both SDKs have it."""
    await _refuse(call, "pause")


async def resume(call: Call) -> Response:
    """Not offered, though both SDKs have it."""
    await _refuse(call, "resume")


async def _refuse(call: Call, operation: str) -> NoReturn:
    await _job(call, _job_id(call))
    raise InvalidRequest(
        f"{operation} is not offered: a job runs to its end. Cancel it with POST "
        "/fine_tuning/jobs/{id}/cancel, and create it again when you want it."
    )


async def events(call: Call) -> Response:
    """Lists a job's events, newest first."""
    job = await _job(call, _job_id(call))
    return await answer_page(
        call,
        fine_tuning_events.list_page,
        event_object,
        default=EVENTS_DEFAULT,
        most=LIMIT_MAX,
        job_id=job.id,
    )


async def checkpoints(call: Call) -> Response:
    """Lists the one checkpoint of a succeeded job."""
    job = await _job(call, _job_id(call))
    limit = limit_of(call.request, default=CHECKPOINTS_DEFAULT, most=LIMIT_MAX)
    after = after_of(call.request)
    shown = [checkpoint_object(row) for row in fine_tuning_jobs.checkpoints(job)]
    if after is not None and after not in [each["id"] for each in shown]:
        raise bad_cursor()
    return json_response(list_object([] if after else shown[:limit], has_more=False))


def _job_id(call: Call) -> str:
    job_id: str = call.request.path_params["job_id"]
    return job_id


async def _job(call: Call, job_id: str) -> JobRow:
    row = await call.read(fine_tuning_jobs.get, account_id=call.caller.account_id, job_id=job_id)
    if row is None:
        raise NotFound("No such fine-tuning job.", param="fine_tuning_job_id")
    return row
