"""OpenAI's routes that the product does not have: each is refused by name and says what to use.

Most who migrate meet these first. Served by `app.py` after the real routes, for every method and
without a key, so that a wrong path is never reported as a wrong key.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from api.http.envelope import record_of
from api.http.errors import BASE_PATH, error_response, unknown_path
from domain.errors import GridlineError, NotOffered

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
    "fine_tuning": "Fine-tuning is under /fine_tuning/jobs.",
    "engines": "Use GET /models.",
    "edits": f"{_BATCH_LINES} with endpoint /v1/chat/completions.",
    "organization": "Accounts and keys are managed by the operator, not under this key.",
    "evals": "Evals are not offered here. Run the same batch on the ft: model and on its base, and "
    "compare the answers.",
}
"""By the first segment of the path under the base path."""


class AnythingElse:
    """The ASGI application of every path without a route: 404, with what to use instead where it is
    a route of OpenAI's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        first = path.removeprefix(f"{BASE_PATH}/").partition("/")[0]
        instead = INSTEAD.get(first) if path.startswith(f"{BASE_PATH}/") else None
        if instead is not None:
            record_of(scope).route = f"* {BASE_PATH}/{first}"
            refusal: GridlineError = NotOffered(f"This route is not offered here. {instead}")
        else:
            refusal = unknown_path(path)
        await error_response(refusal)(scope, receive, send)
