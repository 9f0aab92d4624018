"""GET /gridline/adapters/{model}/files/{name}: the two files of a fine-tuned model."""

from __future__ import annotations

from starlette.responses import Response

from api.control import Call
from api.http.download import send_object
from api.http.idempotency import answer_came_through
from api.routes.models import own_model
from domain.errors import NotFound


async def download(call: Call) -> Response:
    """Streams `adapter_model.safetensors` or `adapter_config.json`, with its SHA-256."""
    row = await own_model(call, call.request.path_params["model"])
    name = call.request.path_params["name"]
    stored = {
        "adapter_model.safetensors": row.weights,
        "adapter_config.json": row.config,
    }.get(name)
    if stored is None:
        raise NotFound(
            "An adapter has two files: adapter_model.safetensors and adapter_config.json.",
            param="name",
        )
    await answer_came_through(call, row.job_id, made_at=row.created_at)
    return await send_object(
        call.request,
        call.api.control.objects,
        stored,
        filename=name,
        headers={"x-gridline-sha256": stored.sha256},
    )
