"""A request that carried an `Idempotency-Key`: its stream id is the key, so that the log's primary
key admits it once."""

from __future__ import annotations

from domain.errors import InvalidRequest
from domain.log.aggregate import Aggregate, Envelope, event


class IdempotentRequest(Aggregate, topic="gridline.idempotent_request"):
    """The body's hash and what the request made."""

    body_sha256: str
    result_id: str

    @event("Recorded", topic="gridline.idempotent_request.recorded")
    def __init__(self, *, id: str, envelope: Envelope, body_sha256: str, result_id: str) -> None:
        self.body_sha256 = body_sha256
        self.result_id = result_id

    def must_equal(self, body_sha256: str) -> None:
        """Raises InvalidRequest for another body under the same key."""
        if body_sha256 != self.body_sha256:
            raise InvalidRequest(
                "This Idempotency-Key was used with another request body. Send a new key.",
                param="Idempotency-Key",
            )
