"""Whether the process lives, whether the product can work, and what it counted; for operators."""

from __future__ import annotations

import structlog
from starlette.requests import Request
from starlette.responses import Response

from api.control import Api
from api.http.json_response import json_response
from api.http.metrics import CONTENT_TYPE
from domain.errors import Overloaded
from projections.direct import heartbeats

log = structlog.stdlib.get_logger(__name__)


async def healthz(_: Request, __: Api) -> Response:
    """200 while the process serves at all."""
    return json_response({"ok": True})


async def readyz(_: Request, api: Api) -> Response:
    """200 if the database answers and a runner's heartbeat is young enough, else 503."""
    database, alive = True, 0
    try:
        alive = await api.control.read(
            heartbeats.alive, now=api.control.clock.now(), lease_seconds=api.lease_seconds
        )
    except Overloaded:
        log.warning("the database does not answer")
        database = False
    ready = database and alive > 0
    return json_response(
        {"ready": ready, "database": database, "runners": alive}, status=200 if ready else 503
    )


async def metrics(request: Request, _: Api) -> Response:
    """Prometheus' text."""
    return Response(
        request.app.state.metrics.render(),
        media_type=CONTENT_TYPE,
    )
