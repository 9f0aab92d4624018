"""Paths without a route: OpenAI's that the product does not have and its own that are still to
come are refused by name, with what to use instead; a wrong base URL is told the right one.

Most who migrate meet these first. Served by `app.py` for every method and without a key, so that a
wrong path is never reported as a wrong key.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from api.control import Api
from api.http.envelope import record_of
from api.http.errors import BASE_PATH, error_response, unknown_path
from domain.errors import GridlineError, NotFound, NotOffered

_BATCH_LINES = (
    "Requests run in batches: send the same request body as a line of a file with purpose=batch "
    "(POST /files), then POST /batches"
)
_ENDPOINTS = "Batches target /v1/chat/completions and /v1/embeddings"

INSTEAD: dict[str, str] = {
    "chat": f"{_BATCH_LINES} with endpoint /v1/chat/completions.",
    "completions": f"{_BATCH_LINES} with endpoint /v1/chat/completions.",
    "embeddings": f"{_BATCH_LINES} with endpoint /v1/embeddings.",
    "responses": f"{_BATCH_LINES} with endpoint /v1/chat/completions.",
    "uploads": "Upload each file in one request: POST /files.",
    "moderations": f"{_ENDPOINTS}; a chat model can be asked to judge a text.",
    "images": f"{_ENDPOINTS}; images are not offered.",
    "videos": f"{_ENDPOINTS}; videos are not offered.",
    "audio": f"{_ENDPOINTS}; audio is not offered.",
    "realtime": f"{_BATCH_LINES}. Nothing is answered in real time.",
    "assistants": f"{_BATCH_LINES} with endpoint /v1/chat/completions.",
    "threads": f"{_BATCH_LINES} with endpoint /v1/chat/completions.",
    "conversations": f"{_BATCH_LINES} with endpoint /v1/chat/completions.",
    "vector_stores": f"Embed your texts in a batch with endpoint /v1/embeddings. {_ENDPOINTS}.",
    "containers": f"{_ENDPOINTS}; code is not run here.",
    "skills": f"{_ENDPOINTS}; skills are not offered.",
    "webhooks": "Poll the job or batch: GET /fine_tuning/jobs/{id} or GET /batches/{id}.",
    "fine_tunes": "Use POST /fine_tuning/jobs.",
    "fine-tunes": "Use POST /fine_tuning/jobs.",
    "fine_tuning": "Fine-tuning is under /fine_tuning/jobs.",
    "engines": "Use GET /models.",
    "edits": f"{_BATCH_LINES} with endpoint /v1/chat/completions.",
    "organization": "Accounts and keys are managed by the operator, not under this key.",
    "evals": "Evals are not offered here. Run the same batch on the ft: model and on its base, and "
    "compare the answers.",
}
"""By the first segment of the path under the base path."""


_MERGE = (
    "Download the adapter's two files, GET /gridline/adapters/{model}/files/{name}, and merge them "
    "into the base with peft."
)
_USAGE = (
    "GET /gridline/statement has each charge, and each job and batch names its key as "
    "gridline.api_key_id."
)
TO_COME: dict[str, str] = {
    "/files/distill": "Write the answers to train on as chat rows, and upload them with "
    "purpose=fine-tune: POST /files.",
    "/gridline/adapters/{model:path}/merged": _MERGE,
    "/gridline/adapters/{model:path}/merged/files/{path:path}": _MERGE,
    "/gridline/usage/keys": _USAGE,
    "/gridline/usage/keys/{key}": _USAGE,
    "/gridline/quotes": "A job's quote is in the answer of its create, and cancelling it at once "
    "costs nothing; GET /gridline/prices has the rates.",
}
"""Routes of the public pages that are not built, by their template."""

SEGMENTS = {"files", "batches", "models", "fine_tuning", "gridline", *INSTEAD}
"""What a path under the base path begins with."""


class ToCome:
    """The ASGI application of one route that is not built yet."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).route = f"* {BASE_PATH}{self.path}"
        refusal = NotOffered(f"This route is not offered yet. {TO_COME[self.path]}")
        await error_response(refusal)(scope, receive, send)


class AnythingElse:
    """The ASGI application of every path without a route: 404, with what to use instead where it is
    a route of OpenAI's, or with the base URL where that is wrong."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        first = path.removeprefix(f"{BASE_PATH}/").partition("/")[0]
        instead = INSTEAD.get(first) if path.startswith(f"{BASE_PATH}/") else None
        if instead is not None:
            record_of(scope).route = f"* {BASE_PATH}/{first}"
            refusal: GridlineError = NotOffered(f"This route is not offered here. {instead}")
        elif f"{path}/".startswith(f"{BASE_PATH}/") and first not in ("v1", "openai"):
            refusal = unknown_path(path)
        else:
            refusal = _wrong_base(Request(scope), path)
        await error_response(refusal)(scope, receive, send)


def _wrong_base(request: Request, path: str) -> NotFound:
    """Names the base URL, and the path that was probably meant: the same from its first segment
    that a route begins with."""
    api: Api = request.app.state.api
    host = api.public_url or str(request.base_url).rstrip("/")
    segments = path.strip("/").split("/")
    begins = next((at for at, each in enumerate(segments) if each in SEGMENTS), len(segments))
    meant = "/".join([BASE_PATH, *segments[begins:]])
    return NotFound(
        f"There is no route {path} here. Give your client {host}{BASE_PATH} as its base URL"
        + (f"; this request then goes to {meant}." if meant != BASE_PATH else ".")
    )
