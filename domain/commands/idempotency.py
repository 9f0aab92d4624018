"""A create that is sent again gives what it gave: the records behind it.

Two kinds: an explicit `Idempotency-Key` is a stream of its own; and every create leaves a
fingerprint row for half an hour, by which an SDK's own retry is found (it sends no key, only
`X-Stainless-Retry-Count`). Both are written in the append of the create. Whoever cancels or deletes
a thing has had its create's answer, so from then on its fingerprint means nothing and goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from domain.ids import idempotency_id
from domain.log.idempotent_request import IdempotentRequest
from domain.log.unit_of_work import PersonalRow, UnitOfWork


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose create it is. `body_sha256` is of the canonical body; `idempotency_key` the header."""

    account_id: str
    key_id: str
    route: str
    body_sha256: str
    idempotency_key: str | None = None


def made_before(uow: UnitOfWork, origin: Origin) -> str | None:
    """The id that a create under the same `Idempotency-Key` made. Raises InvalidRequest if that
    one had another body."""
    if origin.idempotency_key is None:
        return None
    request = uow.find(IdempotentRequest, _stream(origin))
    if request is None:
        return None
    request.must_equal(origin.body_sha256)
    return request.result_id


def remember(uow: UnitOfWork, origin: Origin, result_id: str) -> None:
    """Records what a create made."""
    uow.personal(
        PersonalRow(
            "request_fingerprints",
            {
                "key_id": origin.key_id,
                "route": origin.route,
                "body_sha256": origin.body_sha256,
            },
            {"result_id": result_id, "created_at": uow.now},
        )
    )
    if origin.idempotency_key is not None:
        uow.add(
            IdempotentRequest(
                id=_stream(origin),
                envelope=uow.envelope,
                body_sha256=origin.body_sha256,
                result_id=result_id,
            )
        )


def forget(uow: UnitOfWork, result_id: str) -> None:
    """The answer of the create that made this has come through: an equal one is a new one."""
    uow.personal(PersonalRow("request_fingerprints", {"result_id": result_id}, None))


def _stream(origin: Origin) -> str:
    assert origin.idempotency_key is not None
    return idempotency_id(origin.account_id, origin.route, origin.idempotency_key)
