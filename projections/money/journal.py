"""The double-entry journal of credit, which follows the log.

Every event that moves credit is one transaction whose entries sum to zero, which is asserted here
and again by the audit. Amounts are in nano-USD and positive for what the customer has and we have
earned: `Customer:Available` and `Customer:Held` are then the account's own balances, and
`Expense:Grants` goes below zero by what was given away. Every entry carries the balance after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from domain.work.kinds import kind_of
from projections.projection import Statement
from projections.read_model import ReadModel

AVAILABLE = "Customer:Available"
HELD = "Customer:Held"
GRANTS = "Expense:Grants"

_ENTERED = """
    WITH moved AS (
        INSERT INTO journal_balances AS b (account_id, ledger, balance_nano_usd)
        VALUES (%(account_id)s, %(ledger)s, %(amount)s)
        ON CONFLICT (account_id, ledger) DO UPDATE SET
            balance_nano_usd = b.balance_nano_usd + excluded.balance_nano_usd
        RETURNING balance_nano_usd
    )
    INSERT INTO journal_entries
        (position, line, account_id, ledger, kind, work_id, grant_id, at, amount_nano_usd,
         balance_nano_usd)
    SELECT %(position)s, %(line)s, %(account_id)s, %(ledger)s, %(kind)s, %(work_id)s, %(grant_id)s,
           %(at)s, %(amount)s, balance_nano_usd
    FROM moved
"""


def _transaction(
    event: Any,
    position: int,
    *,
    kind: str,
    entries: Sequence[tuple[str, int]],
    work_id: str | None = None,
    grant_id: str | None = None,
) -> list[Statement]:
    assert sum(amount for _, amount in entries) == 0
    return [
        (
            _ENTERED,
            {
                "position": position,
                "line": line,
                "account_id": event.originator_id,
                "ledger": ledger,
                "kind": kind,
                "work_id": work_id,
                "grant_id": grant_id,
                "at": event.envelope.at,
                "amount": amount,
            },
        )
        for line, (ledger, amount) in enumerate(entries, start=1)
    ]


def _credit_granted(event: Any, position: int) -> list[Statement]:
    amount = event.amount_nano_usd
    return _transaction(
        event,
        position,
        kind="grant",
        grant_id=event.grant_id,
        entries=((GRANTS, -amount), (AVAILABLE, amount)),
    )


def _credit_reserved(event: Any, position: int) -> list[Statement]:
    amount = event.amount_nano_usd
    return _transaction(
        event,
        position,
        kind="hold",
        work_id=event.work_id,
        entries=((AVAILABLE, -amount), (HELD, amount)),
    )


def _credit_captured(event: Any, position: int) -> list[Statement]:
    charge, returned = event.charge_nano_usd, event.returned_nano_usd
    income = kind_of(event.work_id).income
    return _transaction(
        event,
        position,
        kind="charge",
        work_id=event.work_id,
        entries=((HELD, -charge - returned), (income, charge), (AVAILABLE, returned)),
    )


def _credit_released(event: Any, position: int) -> list[Statement]:
    returned = event.returned_nano_usd
    return _transaction(
        event,
        position,
        kind="release",
        work_id=event.work_id,
        entries=((HELD, -returned), (AVAILABLE, returned)),
    )


JOURNAL = ReadModel(
    name="journal",
    tables=("journal_entries", "journal_balances"),
    handlers={
        "gridline.account.credit_granted": _credit_granted,
        "gridline.account.credit_reserved": _credit_reserved,
        "gridline.account.credit_captured": _credit_captured,
        "gridline.account.credit_released": _credit_released,
    },
)
