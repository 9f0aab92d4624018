"""Whether the process lives, whether the product can work, and what it counted; for operators."""

from __future__ import annotations

import asyncio

import structlog
from starlette.requests import Request
from starlette.responses import Response

from api.control import Api
from api.http.json_response import json_response
from api.http.metrics import CONTENT_TYPE
from domain.errors import Overloaded, StoreAway
from projections.direct import heartbeats

STORE_SECONDS_MAX = 5.0

log = structlog.stdlib.get_logger(__name__)


async def healthz(_: Request, __: Api) -> Response:
    """200 while the process serves at all."""
    return json_response({"ok": True})


async def readyz(_: Request, api: Api) -> Response:
    """200 if the API can serve: database and object store answer; else 503. How many runners are
    heard is said beside it: without any, work waits."""
    database, runners = True, 0
    try:
        runners = await api.control.read(
            heartbeats.alive, now=api.control.clock.now(), lease_seconds=api.lease_seconds
        )
    except Overloaded:
        log.warning("the database does not answer")
        database = False
    store = await _store_answers(api)
    ready = database and store
    return json_response(
        {"ready": ready, "database": database, "store": store, "runners": runners},
        status=200 if ready else 503,
    )


async def _store_answers(api: Api) -> bool:
    try:
        async with asyncio.timeout(STORE_SECONDS_MAX):
            await api.control.objects.check()
    except (StoreAway, TimeoutError):
        log.warning("the object store does not answer")
        return False
    return True


async def metrics(request: Request, _: Api) -> Response:
    """Prometheus' text."""
    return Response(
        request.app.state.metrics.render(),
        media_type=CONTENT_TYPE,
    )
