"""The API's route list, its middleware and its life.

`create_app` is given a control plane and builds the ASGI application over it; `python -m api` and
tests both use it. What a route may do is in `routes/`, what it may see in `control.py`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from api.control import Api
from api.endpoint import open_path, resource
from api.http.envelope import Envelope
from api.http.errors import BASE_PATH, on_gridline_error, on_http_exception
from api.http.metrics import Metrics
from api.routes import adapters, batches, files, fine_tuning, health, ledger, models, not_offered
from domain.errors import GridlineError

THREADS_MAX = 40
SWITCH_SECONDS = 0.001
"""A fifth of Python's own."""

JOBS = "/fine_tuning/jobs"
JOB = f"{JOBS}/{{job_id}}"

ROUTES: list[Route] = [
    *(Route(BASE_PATH + path, endpoint=not_offered.ToCome(path)) for path in not_offered.TO_COME),
    resource("/files", get=files.list_all, post=files.create),
    resource("/files/{file_id}", get=files.retrieve, delete=files.delete),
    resource("/files/{file_id}/content", get=files.content),
    resource(JOBS, get=fine_tuning.list_all, post=fine_tuning.create),
    resource(JOB, get=fine_tuning.retrieve),
    resource(f"{JOB}/cancel", post=fine_tuning.cancel),
    resource(f"{JOB}/pause", post=fine_tuning.pause),
    resource(f"{JOB}/resume", post=fine_tuning.resume),
    resource(f"{JOB}/events", get=fine_tuning.events),
    resource(f"{JOB}/checkpoints", get=fine_tuning.checkpoints),
    resource("/batches", get=batches.list_all, post=batches.create),
    resource("/batches/{batch_id}", get=batches.retrieve),
    resource("/batches/{batch_id}/cancel", post=batches.cancel),
    resource("/models", get=models.list_all),
    resource("/models/{model:path}", get=models.retrieve, delete=models.delete),
    resource("/gridline/adapters/{model:path}/files/{name}", get=adapters.download),
    resource("/gridline/credits", get=ledger.credit),
    resource("/gridline/prices", get=ledger.prices),
    resource("/gridline/receipts/{work_id}", get=ledger.receipt),
    resource("/gridline/statement", get=ledger.statement),
    open_path("/healthz", get=health.healthz),
    open_path("/readyz", get=health.readyz),
    open_path("/metrics", get=health.metrics),
    Route("/{path:path}", endpoint=not_offered.AnythingElse()),
]


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    """More threads than the loop's default: slow disks must not keep reads waiting. They give way
    to the event loop often: each of its steps waits for whichever thread computes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with (
            closing(app.state.api.file_checks),
            ThreadPoolExecutor(max_workers=THREADS_MAX, thread_name_prefix="gridline-api") as pool,
        ):
            asyncio.get_running_loop().set_default_executor(pool)
            yield
    finally:
        sys.setswitchinterval(before)


def create_app(api: Api) -> Starlette:
    """The application; whoever built `api.control` closes it."""
    metrics = Metrics()
    app = Starlette(
        routes=ROUTES,
        lifespan=_lifespan,
        middleware=[Middleware(Envelope, metrics=metrics)],
        exception_handlers={
            GridlineError: on_gridline_error,
            HTTPException: on_http_exception,
        },
    )
    app.router.redirect_slashes = False
    app.state.api = api
    app.state.metrics = metrics
    return app
