"""Everything under /batches."""

from __future__ import annotations

from starlette.responses import Response

from api.control import Call
from api.http.idempotency import answer_came_through, cancel_once, canonical_sha256, create_once
from api.http.json_body import read_json
from api.http.json_response import json_response
from api.http.pagination import answer_page
from api.schemas.batches import batch_object
from domain.commands.batches import CancelBatch, cancel_batch
from domain.commands.create_batch import CreateBatch, create_batch
from domain.commands.idempotency import Origin
from domain.errors import NotFound
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
    return await answer_page(
        call,
        batches.list_page,
        batch_object,
        default=LIMIT_DEFAULT,
        most=LIMIT_MAX,
        account_id=call.caller.account_id,
    )


async def retrieve(call: Call) -> Response:
    """One batch."""
    row = await _batch(call, _batch_id(call))
    if row.status in TERMINAL:
        await answer_came_through(call, row.id, made_at=row.created_at)
    return json_response(batch_object(row))


async def cancel(call: Call) -> Response:
    """Stops a batch; what is finished stays."""
    batch_id = _batch_id(call)
    row = await cancel_once(
        call,
        call.execute(cancel_batch, CancelBatch(call.caller.account_id, batch_id)),
        look=lambda: _batch(call, batch_id),
        cancelled_at=lambda row: row.cancelling_at,
    )
    return json_response(batch_object(row))


def _batch_id(call: Call) -> str:
    batch_id: str = call.request.path_params["batch_id"]
    return batch_id


async def _batch(call: Call, batch_id: str) -> BatchRow:
    row = await call.read(batches.get, account_id=call.caller.account_id, batch_id=batch_id)
    if row is None:
        raise NotFound("No such batch.", param="batch_id")
    return row
