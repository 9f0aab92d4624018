"""The body of POST /batches.

Called by the route, and by whatever else makes batches. It never looks the input file up: that is
the command's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

from domain.catalog import CHAT_ENDPOINT, EMBEDDINGS_ENDPOINT, Endpoint
from domain.inputs.batch_line import CHAT_INSTEAD
from domain.inputs.body import IS_TEXT, Body, Text, read_body, refused, said
from domain.inputs.create_fields import ExpiresAfter, Metadata
from domain.limits import CompletionWindow


@dataclass(frozen=True, slots=True)
class BatchCreate:
    """A create of a batch. `output_expires_seconds` counts from the output file's creation."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: CompletionWindow
    output_expires_seconds: int | None
    metadata: dict[str, str] | None


def _chat_instead(value: object) -> object:
    if isinstance(value, str) and value in CHAT_INSTEAD:
        raise refused(
            f"{{path}} {value} is not offered. Use {{path}} {CHAT_ENDPOINT}, with that url on each "
            f"line and messages in place of {CHAT_INSTEAD[value]}."
        )
    return value


class _BatchBody(Body):
    input_file_id: Text
    endpoint: Annotated[
        Endpoint,
        said(f"{{path}} must be {CHAT_ENDPOINT} or {EMBEDDINGS_ENDPOINT}."),
        BeforeValidator(_chat_instead),
        IS_TEXT,
    ]
    completion_window: Annotated[CompletionWindow, said('{path} must be "24h" or "72h".'), IS_TEXT]
    output_expires_after: ExpiresAfter | None = None
    metadata: Metadata | None = None


def parse_batch_create(body: object) -> BatchCreate:
    """Reads the body. Raises InvalidRequest naming the field."""
    read = read_body(_BatchBody, body)
    expiry = read.output_expires_after
    return BatchCreate(
        input_file_id=read.input_file_id,
        endpoint=read.endpoint,
        completion_window=read.completion_window,
        output_expires_seconds=expiry.seconds if expiry is not None else None,
        metadata=read.metadata,
    )
