"""Money as integers: nano-USD, one rounding per receipt.

Rates are nano-USD per million tokens, so that $0.049 per 1M tokens is 49_000_000 and every
published price is exact (`docs/decisions/0002-money.md`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

NANO_USD_PER_USD = 1_000_000_000
TOKENS_PER_RATE_UNIT = 1_000_000

_PLAIN_DECIMAL = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")


def nano_usd(usd: str | Decimal | int) -> int:
    """The exact nano-USD of an amount of USD. A text is plain decimal digits: Python would take
    separators, exponents and other alphabets' digits too. Raises ValueError if it is no amount, or
    not exact."""
    if isinstance(usd, str) and not _PLAIN_DECIMAL.fullmatch(usd):
        raise ValueError(f"{usd!r} is no amount of USD in decimal digits")
    scaled = Decimal(usd) * NANO_USD_PER_USD
    if not scaled.is_finite() or scaled != scaled.to_integral_value():
        raise ValueError(f"{usd} USD is not a whole number of nano-USD")
    return int(scaled)


def usd_text(amount_nano_usd: int) -> str:
    """A decimal string of USD, at least two decimals and no zeros after them ("0.50")."""
    sign = "-" if amount_nano_usd < 0 else ""
    whole, nano = divmod(abs(amount_nano_usd), NANO_USD_PER_USD)
    decimals = f"{nano:09d}".rstrip("0").ljust(2, "0")
    return f"{sign}{whole}.{decimals}"


def usd_number(amount_nano_usd: int) -> float:
    """For wire fields that the pages document as numbers; never for arithmetic."""
    return amount_nano_usd / NANO_USD_PER_USD


def price(lines: Iterable[tuple[int, int]]) -> int:
    """ceil(sum(tokens x rate) / 10^6) in nano-USD over (tokens, rate in nano-USD per 1M tokens).

    One rounding, upwards, per receipt; monotone in every token count, so a charge computed from
    fewer tokens than a quote never exceeds the quote.
    """
    total = sum(tokens * rate for tokens, rate in lines)
    return -(-total // TOKENS_PER_RATE_UNIT)
