"""From the Authorization header to the account.

Judged before any byte of a body is read, so that an unknown caller can make the server do nothing.
The key's text is hashed here and goes no further.
"""

from __future__ import annotations

import hashlib

from starlette.requests import Request

from api.control import Api, Caller
from domain.errors import InvalidApiKey
from projections.money import keys

KEY_CHARACTERS_MAX = 200


async def authenticate(request: Request, api: Api) -> Caller:
    """Whose request it is. Raises InvalidApiKey."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise InvalidApiKey(
            "No API key was given. Send it in the header Authorization: Bearer gl_…"
        )
    found = None
    if key.startswith("gl_") and len(key) <= KEY_CHARACTERS_MAX:
        found = await api.control.read(keys.authenticate, hashlib.sha256(key.encode()).hexdigest())
    if found is None:
        raise InvalidApiKey("The API key is not known here, or was revoked.")
    return Caller(account_id=found.account_id, key_id=found.key_id)
