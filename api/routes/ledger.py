"""GET /gridline/credits, /prices, /receipts/{id} and /statement: what work costs and why."""

from __future__ import annotations

from starlette.responses import Response

from api.control import Call
from api.http.json_response import json_response
from api.http.pagination import given_once, limit_of
from api.schemas.ledger import credits_object, receipt_object, statement_object
from domain.errors import InvalidRequest, NotFound
from projections.money import accounts, holds, receipts, statements
from projections.money import prices as price_lists

STATEMENT_LINES_DEFAULT = 100
STATEMENT_LINES_MAX = 1_000


async def credit(call: Call) -> Response:
    """The account's balances and open holds."""
    account_id = call.caller.account_id
    row = await call.read(accounts.get, account_id)
    assert row is not None
    return json_response(credits_object(row, await call.read(holds.open_of, account_id=account_id)))


async def prices(call: Call) -> Response:
    """The price list that new work is quoted with."""
    current = await call.read(price_lists.current)
    if current is None:
        raise NotFound("No prices are published.")
    return json_response(current.to_wire())


async def receipt(call: Call) -> Response:
    """Why a job or batch was charged what it was."""
    row = await call.read(
        receipts.find,
        account_id=call.caller.account_id,
        work_id=call.request.path_params["work_id"],
    )
    if row is None:
        raise NotFound("No such job or batch.", param="id")
    return json_response(receipt_object(row))


async def statement(call: Call) -> Response:
    """Movements of credit after a position of the log, oldest first."""
    account_id = call.caller.account_id
    limit = limit_of(call.request, default=STATEMENT_LINES_DEFAULT, most=STATEMENT_LINES_MAX)
    text = given_once(call.request, "after") or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidRequest("after must be the through of an earlier statement.", param="after")
    # Asked first: a statement read after it can only be fresher than it says.
    is_current = await call.read(statements.is_current, account_id=account_id)
    found = await call.read(statements.read, account_id=account_id, limit=limit, after=int(text))
    return json_response(statement_object(found, is_current=is_current))
