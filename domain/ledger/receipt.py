"""What explains a charge: tokens, rates, price version, hold and minimum, in integers.

A receipt is part of the event that ends the work, so that a charge and its explanation cannot part.
"""

from __future__ import annotations

from typing import Literal

from domain.stored import StoredModel


class ReceiptLine(StoredModel):
    """Tokens of one kind at one rate; `model` is the name that the lines of a batch used."""

    what: Literal["training", "input", "output"]
    model: str
    tokens: int
    rate_nano_usd_per_mtok: int


class Receipt(StoredModel):
    """`charge = min(maximum, max(minimum, ceil(sum(tokens x rate) / 10^6)))`, the minimum only
    where `minimum_applies` (readings of when: `docs/errors.md`, "Who pays")."""

    price_version: int
    base: str
    base_revision: str
    lines: tuple[ReceiptLine, ...]
    minimum_nano_usd: int
    minimum_applies: bool
    maximum_nano_usd: int
    charge_nano_usd: int
    returned_nano_usd: int
    input_sha256: tuple[str, ...]
