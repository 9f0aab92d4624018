"""What an account may upload: bytes kept and files a minute, so that nobody fills disk and log.

Called by POST /files twice: before an upload's bytes are read, by what its head says, and before it
is recorded, by what it holds. A refused upload writes nothing.
"""

from __future__ import annotations

from datetime import timedelta
from math import ceil

from api.control import Call
from domain.errors import LimitExceeded, RateLimited
from domain.limits import (
    STORED_BYTES_MAX,
    STORED_BYTES_WITHOUT_CREDIT_MAX,
    UPLOADS_PER_MINUTE_MAX,
)
from projections.money import accounts
from projections.money.accounts import AccountRow
from projections.work import files

WINDOW = timedelta(minutes=1)


async def must_allow_upload(call: Call, bytes_more: int) -> None:
    """Raises RateLimited or LimitExceeded."""
    now = call.api.control.clock.now()
    uploaded = await call.read(
        files.uploaded, account_id=call.caller.account_id, since=now - WINDOW
    )
    if uploaded.recent >= UPLOADS_PER_MINUTE_MAX and uploaded.oldest_recent_at is not None:
        raise RateLimited(
            f"Your account uploaded {uploaded.recent} files within a minute, the most that it may.",
            limit={
                "name": "uploads_per_minute",
                "limit": UPLOADS_PER_MINUTE_MAX,
                "in_use": uploaded.recent,
            },
            retry_after_seconds=ceil((uploaded.oldest_recent_at + WINDOW - now).total_seconds()),
        )
    if uploaded.stored_bytes + bytes_more > STORED_BYTES_WITHOUT_CREDIT_MAX:
        await _must_fit(call, uploaded.stored_bytes, bytes_more)


def stored_bytes_max(account: AccountRow) -> int:
    """What the account's uploads may take."""
    return STORED_BYTES_MAX if account.granted_nano_usd else STORED_BYTES_WITHOUT_CREDIT_MAX


async def _must_fit(call: Call, stored_bytes: int, bytes_more: int) -> None:
    account = await call.read(accounts.get, call.caller.account_id)
    assert account is not None
    most = stored_bytes_max(account)
    if stored_bytes + bytes_more > most:
        raise _no_space(most, in_use=stored_bytes)


def _no_space(most: int, *, in_use: int) -> LimitExceeded:
    return LimitExceeded(
        f"Your account's uploads may take {most:,} bytes, and take {in_use:,}. Delete files that "
        "you no longer need (DELETE /files/{file_id}), or let them expire earlier (expires_after).",
        param="file",
        limit={"name": "stored_bytes", "limit": most, "in_use": in_use},
    )
