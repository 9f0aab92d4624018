"""JSON answers: always `application/json`, UTF-8, without NaN.

Every object and every error leaves through here, since the SDKs hand anything else back as text.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def json_response(body: dict[str, Any], *, status: int = 200) -> Response:
    """The body as one JSON text."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), status_code=status, media_type="application/json")
