"""Every refusal that the product knows, with its code, its HTTP status and whether a retry helps.

The domain raises these; `api/http/errors.py` alone turns them into OpenAI's error body. The message
is written for the person who sent the request: it names the field, line or value and what to
change, and never quotes a row, a prompt or a key.
"""

from __future__ import annotations

from typing import Any, ClassVar


class GridlineError(Exception):
    """Base of all expected failures.

    `code` and `param` become `error.code` and `error.param`; `limit` becomes `error.limit`
    (migration page, "Usage and limits by API key"); `retry_after_seconds` the Retry-After header;
    `retryable` decides the `x-should-retry` header of 409 and 429 answers.
    """

    status: ClassVar[int] = 400
    code: str = "invalid_request"
    error_type: ClassVar[str] = "invalid_request_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        limit: dict[str, Any] | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(GridlineError):
    """A field is missing, unknown or out of range."""


class InvalidFile(GridlineError):
    """A file, or one line of it, cannot be used. Codes: `invalid_json`, `invalid_messages`,
    `line_too_large`, `invalid_file_format`, `invalid_value`, `template_token_in_content`,
    `job_too_large`."""

    code = "invalid_file_format"

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_file_format",
        param: str | None = None,
        line: int | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.line = line

    def again(self) -> InvalidFile:
        """The same finding, to be raised to somebody else."""
        return InvalidFile(self.message, code=self.code, param=self.param, line=self.line)


class FileTooLarge(GridlineError):
    """An upload past the size limit."""

    status = 413
    code = "file_too_large"


class RequestTimeout(GridlineError):
    """A request body that did not come to its end in time."""

    status = 408
    code = "request_timeout"
    retryable = True


class UnsupportedContentEncoding(GridlineError):
    """A request body with a Content-Encoding."""

    status = 415
    code = "unsupported_content_encoding"


class InvalidApiKey(GridlineError):
    """No key, or one that is unknown, revoked or expired."""

    status = 401
    code = "invalid_api_key"


class NotFound(GridlineError):
    """Nothing of that id in the caller's account. Other accounts' ids answer exactly alike."""

    status = 404
    code = "not_found"


class NotOffered(GridlineError):
    """A route of OpenAI's that the product does not have; the message says what to use instead."""

    status = 404
    code = "not_offered"


class MethodNotAllowed(GridlineError):
    """The route exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class InvalidState(GridlineError):
    """The object is in a state in which this cannot be done."""

    status = 409
    code = "invalid_state"


class LimitExceeded(GridlineError):
    """A limit of the account or key is reached; `limit` says which, its value and the use of it."""

    status = 429
    code = "limit_exceeded"


class SlotsFull(LimitExceeded):
    """All slots for open work are taken. One is free as soon as any of it ends."""

    retryable = True


class RateLimited(GridlineError):
    """Too many requests just now."""

    status = 429
    code = "rate_limit_exceeded"
    retryable = True


class ConcurrentUpdate(GridlineError):
    """Others changed the same objects again and again while this was decided; nothing was done."""

    status = 409
    code = "concurrent_update"
    retryable = True


class Overloaded(GridlineError):
    """The server cannot take more work just now."""

    status = 503
    code = "overloaded"
    error_type = "server_error"
    retryable = True


class StoreAway(Overloaded):
    """The object store does not answer, or takes nothing just now. Raised from what it said."""

    def __init__(self) -> None:
        super().__init__("The file store is away. Send the request again.", retry_after_seconds=5)


class StorageOutcomeUnknown(GridlineError):
    """The answer of a commit was lost; the same request, sent again, gets its result."""

    status = 503
    code = "storage_outcome_unknown"
    error_type = "server_error"
    retryable = True


class DuplicateDelivery(Exception):
    """A broker message whose position is already recorded. Never reaches a client."""
