"""An account's statement, read from the journal: opening balances, lines, closing balances.

It is cut by the log's sequence, never by dates, so that statements tile: each opens with what the
one before closed with, and a late line falls into the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from projections.money.journal import AVAILABLE, HELD, JOURNAL
from projections.read_model import Connection

_OPENING = """
    SELECT coalesce(sum(amount_nano_usd) FILTER (WHERE ledger = %(available)s), 0)::bigint
               AS available,
           coalesce(sum(amount_nano_usd) FILTER (WHERE ledger = %(held)s), 0)::bigint AS held
    FROM journal_entries WHERE account_id = %(account_id)s AND position <= %(after)s
"""
_LINES = """
    SELECT e.position, min(e.at) AS at, min(e.kind) AS kind, min(e.work_id) AS work_id,
           min(e.grant_id) AS grant_id, min(g.note) AS note,
           coalesce(sum(amount_nano_usd) FILTER (WHERE ledger = %(available)s), 0)::bigint
               AS available_change_nano_usd,
           coalesce(sum(amount_nano_usd) FILTER (WHERE ledger = %(held)s), 0)::bigint
               AS held_change_nano_usd
    FROM journal_entries e LEFT JOIN grant_notes g ON g.grant_id = e.grant_id
    WHERE e.account_id = %(account_id)s AND e.position > %(after)s
    GROUP BY e.position ORDER BY e.position LIMIT %(limit)s
"""
_POSITION_OF = """
    SELECT max(position) AS position FROM journal_entries
    WHERE account_id = %(account_id)s AND work_id = %(work_id)s
"""
_IS_CURRENT = """
    SELECT coalesce((SELECT t.notification_id FROM gridline_tracking t
                     WHERE t.application_name = %(journal)s), 0) >= a.changed_position AS current
    FROM accounts a WHERE a.id = %(account_id)s
"""


@dataclass(frozen=True, slots=True)
class StatementLine:
    """One movement of credit, in nano-USD; the two balances are those after it. A charge changes
    what is held by more than it gives back: the difference is `charged_nano_usd`."""

    position: int
    at: datetime
    kind: str
    work_id: str | None
    grant_id: str | None
    note: str | None
    available_change_nano_usd: int
    held_change_nano_usd: int
    available_nano_usd: int
    held_nano_usd: int

    @property
    def charged_nano_usd(self) -> int:
        """What this line took for good; zero but for charges."""
        if self.kind != "charge":
            return 0
        return -self.available_change_nano_usd - self.held_change_nano_usd


@dataclass(frozen=True, slots=True)
class Statement:
    """What happened after log position `after`, up to and with `through`, which is what the next
    statement is asked after."""

    account_id: str
    after: int
    through: int
    opening_available_nano_usd: int
    opening_held_nano_usd: int
    lines: tuple[StatementLine, ...]
    closing_available_nano_usd: int
    closing_held_nano_usd: int
    has_more: bool


def read(connection: Connection, *, account_id: str, limit: int, after: int = 0) -> Statement:
    """The account's statement after a log position, oldest line first, at most `limit` lines."""
    parameters = {
        "account_id": account_id,
        "after": after,
        "limit": limit + 1,
        "available": AVAILABLE,
        "held": HELD,
    }
    opening = connection.execute(_OPENING, parameters).fetchone()
    assert opening is not None
    rows = connection.execute(_LINES, parameters).fetchall()
    available, held = opening["available"], opening["held"]
    lines = []
    for row in rows[:limit]:
        available += row["available_change_nano_usd"]
        held += row["held_change_nano_usd"]
        lines.append(StatementLine(**row, available_nano_usd=available, held_nano_usd=held))
    return Statement(
        account_id=account_id,
        after=after,
        through=lines[-1].position if lines else after,
        opening_available_nano_usd=opening["available"],
        opening_held_nano_usd=opening["held"],
        lines=tuple(lines),
        closing_available_nano_usd=available,
        closing_held_nano_usd=held,
        has_more=len(rows) > limit,
    )


def position_of(connection: Connection, *, account_id: str, work_id: str) -> int | None:
    """Where the newest line of a job or batch stands in the account's statement; None while none
    does."""
    parameters = {"account_id": account_id, "work_id": work_id}
    row = connection.execute(_POSITION_OF, parameters).fetchone()
    return row["position"] if row is not None else None


def is_current(connection: Connection, *, account_id: str) -> bool:
    """Whether the journal has reached the account's last event."""
    parameters = {"journal": JOURNAL.name, "account_id": account_id}
    row = connection.execute(_IS_CURRENT, parameters).fetchone()
    return row is not None and bool(row["current"])
