"""Values that the log keeps, whichever event holds them: the base of them all, and those that
several aggregates share.

What an aggregate alone keeps stands beside it. Nothing here, nor in any event, is a shape of a
message or of an HTTP body: those may change, and what was written may not
(`docs/decisions/0030-shapes-of-the-log.md`). Ports and runners import this module too, so it knows
no aggregate.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class StoredModel(BaseModel):
    """A value inside an event: frozen and strict, so that history reads back as it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _no_float(value: object) -> object:
    if isinstance(value, float):
        raise ValueError("a binary fraction is no exact number")  # noqa: TRY004 - for pydantic
    return value


Exact = Annotated[Decimal, BeforeValidator(_no_float)]
"""A measured or given fraction. It is stored as a decimal string, so that no reader in any language
rounds it."""


def exact(value: float) -> Decimal:
    """The shortest decimal that is this float, and that `float` gives back as the same one."""
    return Decimal(repr(float(value)))


def exact_or_none(value: float | None) -> Decimal | None:
    """The same for what may be unknown."""
    return None if value is None else exact(value)


def number(value: Decimal | None) -> float | None:
    """What the API shows of an exact number."""
    return None if value is None else float(value)


class StoredObject(StoredModel):
    """An immutable object in the store, as it was when it was stored."""

    key: str
    bytes: int = Field(ge=0)
    sha256: str


class Attempt(StoredModel):
    """One try at one piece of work, by one runner: what a report must name to count.

    `chunk` counts a batch's chunks from 0 and is 0 for a training; `attempt` counts from 1 in each.
    """

    work_id: str
    chunk: int = Field(ge=0)
    attempt: int = Field(ge=1)
    runner_id: str


class TokenUsage(StoredModel):
    """Tokens of one model name: used by finished lines, or the most that lines can use."""

    model: str
    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
