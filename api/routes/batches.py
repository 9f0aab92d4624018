"""Everything under /batches."""

from __future__ import annotations

from starlette.responses import Response

from api.control import Call
from api.http.idempotency import (
    answer_came_through,
    canonical_sha256,
    create_once,
    repeats_lately,
)
from api.http.json_body import read_json
from api.http.json_response import json_response
from api.http.pagination import after_of, limit_of, list_object
from api.schemas.batches import batch_object
from domain.commands.batches import CancelBatch, cancel_batch
from domain.commands.create_batch import CreateBatch, create_batch
from domain.commands.idempotency import Origin
from domain.errors import InvalidState, NotFound
from domain.inputs.batch_create import parse_batch_create
from domain.work.batch import TERMINAL
from projections.work import batches
from projections.work.batches import BatchRow

LIMIT_DEFAULT = 20
LIMIT_MAX = 100


async def create(call: Call) -> Response:
    """Creates a batch; its file is read afterwards, in `validating`."""
    body = await read_json(call.request)
    wanted = parse_batch_create(body)

    async def decide(origin: Origin) -> str:
        return await call.execute(create_batch, CreateBatch(origin=origin, create=wanted))

    made = await create_once(call, body_sha256=canonical_sha256(body), create=decide)
    return json_response(batch_object(await _batch(call, made)))


async def list_all(call: Call) -> Response:
    """Lists the account's batches, newest first."""
    found = await call.read(
        batches.list_page,
        account_id=call.caller.account_id,
        limit=limit_of(call.request, default=LIMIT_DEFAULT, most=LIMIT_MAX),
        after=after_of(call.request),
    )
    return json_response(
        list_object([batch_object(row) for row in found.rows], has_more=found.has_more)
    )


async def retrieve(call: Call) -> Response:
    """One batch."""
    row = await _batch(call, _batch_id(call))
    if row.status in TERMINAL:
        await answer_came_through(call, row.id, made_at=row.created_at)
    return json_response(batch_object(row))


async def cancel(call: Call) -> Response:
    """Stops a batch; what is finished stays."""
    try:
        await call.execute(
            cancel_batch,
            CancelBatch(account_id=call.caller.account_id, batch_id=_batch_id(call)),
        )
    except InvalidState:
        row = await _batch(call, _batch_id(call))
        if not repeats_lately(call, row.cancelling_at):
            raise
        return json_response(batch_object(row))
    return json_response(batch_object(await _batch(call, _batch_id(call))))


def _batch_id(call: Call) -> str:
    batch_id: str = call.request.path_params["batch_id"]
    return batch_id


async def _batch(call: Call, batch_id: str) -> BatchRow:
    row = await call.read(batches.get, account_id=call.caller.account_id, batch_id=batch_id)
    if row is None:
        raise NotFound("No such batch.", param="batch_id")
    return row
