"""GET /gridline/credits, /prices, /receipts/{id} and /statement: what work costs and why."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from api.control import Call
from api.http.json_response import json_response
from api.http.pagination import given_once, limit_of
from api.http.upload_allowance import stored_bytes_max
from api.schemas.ledger import credits_object, receipt_object, statement_object
from domain.errors import InvalidRequest, NotFound
from projections.money import accounts, holds, receipts, statements
from projections.money import prices as price_lists
from projections.read_model import Connection, one_snapshot
from projections.work import files

VERSION_DIGITS_MAX = 9
STATEMENT_LINES_DEFAULT = 100
STATEMENT_LINES_MAX = 1_000


async def credit(call: Call) -> Response:
    """The account's balances, open holds, and what it has of its limits."""
    now = call.api.control.clock.now()

    def of_one_moment(connection: Connection) -> dict[str, Any]:
        with one_snapshot(connection):
            row = accounts.get(connection, call.caller.account_id)
            assert row is not None
            uploads = files.uploaded(connection, account_id=row.id, since=now)
            return credits_object(
                row,
                holds.open_of(connection, account_id=row.id),
                stored_bytes=uploads.stored_bytes,
                stored_bytes_max=stored_bytes_max(row),
            )

    return json_response(await call.read(of_one_moment))


async def prices(call: Call) -> Response:
    """The price list that new work is quoted with, or the one of a version."""
    text = given_once(call.request, "version")
    if not text:
        shown = await call.read(price_lists.in_force, call.api.control.clock.now())
    elif text.isascii() and text.isdigit() and len(text) <= VERSION_DIGITS_MAX:
        shown = await call.read(price_lists.of_version, int(text))
    else:
        raise InvalidRequest("version must be a whole number from 1.", param="version")
    if shown is None:
        raise NotFound("No prices of that version are published.", param="version")
    return json_response(shown.to_wire())


async def receipt(call: Call) -> Response:
    """Why a job or batch was charged what it was."""
    account_id, work_id = call.caller.account_id, call.request.path_params["work_id"]

    def of_one_moment(connection: Connection) -> dict[str, Any] | None:
        with one_snapshot(connection):
            row = receipts.find(connection, account_id=account_id, work_id=work_id)
            position = statements.position_of(connection, account_id=account_id, work_id=work_id)
            return None if row is None else receipt_object(row, statement_position=position)

    shown = await call.read(of_one_moment)
    if shown is None:
        raise NotFound("No such job or batch.", param="id")
    return json_response(shown)


async def statement(call: Call) -> Response:
    """Movements of credit after a position of the log, oldest first."""
    account_id = call.caller.account_id
    limit = limit_of(call.request, default=STATEMENT_LINES_DEFAULT, most=STATEMENT_LINES_MAX)
    text = given_once(call.request, "after") or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _no_such_position()
    after = int(text)

    def of_one_moment(connection: Connection) -> dict[str, Any]:
        with one_snapshot(connection):
            account = accounts.get(connection, account_id)
            assert account is not None
            if after > account.changed_position:
                raise _no_such_position()
            found = statements.read(connection, account_id=account_id, limit=limit, after=after)
            is_current = statements.is_current(connection, account_id=account_id)
            return statement_object(found, is_current=is_current)

    return json_response(await call.read(of_one_moment))


def _no_such_position() -> InvalidRequest:
    return InvalidRequest("after must be the through of an earlier statement.", param="after")
