"""What explains a charge: tokens, rates, price version, hold and minimum, in integers; and the one
place where a charge is computed.

A receipt is part of the event that ends the work, so that a charge and its explanation cannot part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from domain.ledger import money
from domain.log.stored import StoredModel

FaultSide = Literal["customer", "platform"]
DecidedBy = Literal["tokens", "minimum", "maximum"]


class ReceiptLine(StoredModel):
    """Tokens of one kind at one rate; `model` is the name that the lines of a batch used."""

    what: Literal["training", "input", "output"]
    model: str
    tokens: int
    rate_nano_usd_per_mtok: int


class Receipt(StoredModel):
    """`charge = min(maximum, max(minimum, ceil(sum(tokens x rate) / 10^6)))`, the minimum only
    where `minimum_applies` (readings of when: `docs/errors.md`, "Who pays").

    `decided_by` says which of the three it came to; `ended` how the work ended, and for a failed
    job `code` and `side` why it is charged.
    """

    price_version: int
    base: str
    base_revision: str
    lines: tuple[ReceiptLine, ...]
    minimum_nano_usd: int
    minimum_applies: bool
    maximum_nano_usd: int
    charge_nano_usd: int
    returned_nano_usd: int
    decided_by: DecidedBy
    ended: Literal["succeeded", "failed", "completed", "cancelled", "expired"]
    code: str | None
    side: FaultSide | None
    input_sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """What was fixed before the work ran: its quote, and what it runs on."""

    price_version: int
    base: str
    base_revision: str
    minimum_nano_usd: int
    maximum_nano_usd: int
    input_sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class End:
    """How the work ended."""

    ended: Literal["succeeded", "failed", "completed", "cancelled", "expired"]
    minimum_applies: bool
    code: str | None = None
    side: FaultSide | None = None


def charge_of(lines: Sequence[ReceiptLine], *, minimum_nano_usd: int) -> int:
    """Nano-USD for all lines together: one rounding, then at least the minimum."""
    used = money.price((line.tokens, line.rate_nano_usd_per_mtok) for line in lines)
    return max(used, minimum_nano_usd)


def settle(terms: Terms, lines: Sequence[ReceiptLine], end: End) -> Receipt:
    """The receipt of work that is charged."""
    used = charge_of(lines, minimum_nano_usd=0)
    minimum = terms.minimum_nano_usd if end.minimum_applies else 0
    wanted = charge_of(lines, minimum_nano_usd=minimum)
    charge = min(wanted, terms.maximum_nano_usd)
    decided_by: DecidedBy = "tokens"
    if wanted > terms.maximum_nano_usd:
        decided_by = "maximum"
    elif minimum > used:
        decided_by = "minimum"
    return Receipt(
        price_version=terms.price_version,
        base=terms.base,
        base_revision=terms.base_revision,
        lines=tuple(lines),
        minimum_nano_usd=terms.minimum_nano_usd,
        minimum_applies=end.minimum_applies,
        maximum_nano_usd=terms.maximum_nano_usd,
        charge_nano_usd=charge,
        returned_nano_usd=terms.maximum_nano_usd - charge,
        decided_by=decided_by,
        ended=end.ended,
        code=end.code,
        side=end.side,
        input_sha256=terms.input_sha256,
    )
