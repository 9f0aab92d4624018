"""A create that is sent again answers what it made, and makes nothing.

An SDK sends a lost create again by itself, without a key; only `X-Stainless-Retry-Count` tells.
Such a repeat is looked for by its fingerprint (key, route, hash of the body) among the creates of
the last half hour: those that this process is still deciding, then those recorded. A count of 0
always makes something new, and so does a create whose result was cancelled, deleted, downloaded or
seen at its end since, for somebody had the answer. An explicit `Idempotency-Key` holds for ever;
the command itself decides it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar

from api.control import Call
from domain.commands.idempotency import Origin
from domain.errors import InvalidRequest, InvalidState, NotFound
from projections.direct import fingerprints

T = TypeVar("T")

KEY_CHARACTERS_MAX = 255


def canonical_sha256(value: Any) -> str:
    """The hash of a JSON value, whatever the order of its keys and its white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


async def create_once(
    call: Call,
    *,
    body_sha256: str,
    create: Callable[[Origin], Awaitable[str]],
) -> str:
    """Runs `create`, or returns the id of what the same request made before. Raises what `create`
    raises; it answers for an `Idempotency-Key` that was used before."""
    origin = Origin(
        account_id=call.caller.account_id,
        key_id=call.caller.key_id,
        route=call.route,
        body_sha256=body_sha256,
        idempotency_key=_key(call),
    )
    repeated = origin.idempotency_key is None and call.retry_count > 0
    in_flight = call.api.creates_in_flight
    fingerprint = (origin.key_id, origin.route, body_sha256)
    first = in_flight.get(fingerprint)
    if repeated and first is not None:
        return await asyncio.shield(first)
    # Registered before the records are read: of two repeats at once the second waits.
    deciding: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    in_flight[fingerprint] = deciding
    try:
        made = await _recorded(call, origin) if repeated else None
        if made is None:
            made = await create(origin)
    except BaseException as error:
        deciding.set_exception(error)
        deciding.exception()  # whoever waits is told; with nobody waiting it is no lost exception
        raise
    else:
        deciding.set_result(made)
        return made
    finally:
        if in_flight.get(fingerprint) is deciding:
            del in_flight[fingerprint]


def repeats_lately(call: Call, done_at: datetime | None) -> bool:
    """Whether this is an SDK's repeat of a cancel or delete that was done lately, so that it
    answers as the lost one did."""
    if call.retry_count == 0 or done_at is None:
        return False
    return call.api.control.clock.now() - done_at <= fingerprints.REPEATED_WITHIN


async def cancel_once(
    call: Call,
    cancel: Awaitable[None],
    *,
    look: Callable[[], Awaitable[T]],
    cancelled_at: Callable[[T], datetime | None],
) -> T:
    """What `look` finds after a cancel, or after the one that this repeats. Raises what `cancel`
    raises."""
    try:
        await cancel
    except InvalidState:
        row = await look()
        if not repeats_lately(call, cancelled_at(row)):
            raise
        return row
    return await look()


async def delete_once(
    call: Call,
    delete: Awaitable[tuple[str, ...]],
    *,
    deleted_at: Callable[[], Awaitable[datetime | None]],
) -> None:
    """Deletes a thing, and the objects whose keys that answers; nothing if this repeats a delete.
    Raises what `delete` raises."""
    try:
        keys = await delete
    except NotFound:
        if not repeats_lately(call, await deleted_at()):
            raise
    else:
        await call.delete_objects(*keys)


async def answer_came_through(call: Call, shown_id: str, *, made_at: datetime) -> None:
    """To be told whenever a customer is shown the end of a thing, or its bytes."""
    if call.api.control.clock.now() - made_at <= fingerprints.REPEATED_WITHIN:
        await call.read(fingerprints.forget, account_id=call.caller.account_id, shown_id=shown_id)


async def _recorded(call: Call, origin: Origin) -> str | None:
    return await call.read(
        fingerprints.find,
        key_id=origin.key_id,
        route=origin.route,
        body_sha256=origin.body_sha256,
        since=call.api.control.clock.now() - fingerprints.REPEATED_WITHIN,
    )


def _key(call: Call) -> str | None:
    key = call.request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= KEY_CHARACTERS_MAX:
        raise InvalidRequest(
            f"Idempotency-Key must have 1 to {KEY_CHARACTERS_MAX} characters.",
            param="Idempotency-Key",
        )
    return key
