"""The audit's comparison of the rows that show money with the book's own sums: balances, holds,
spend by key and day, and the journal. Reads only, inside the audit's one snapshot of the database.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from adapters.audit.book import Book, Finding, JournalLine
from adapters.audit.read_models import ROWS
from adapters.event_log.postgres import Connection

_ACCOUNTS = """
    SELECT id, available_nano_usd, held_nano_usd, granted_nano_usd, charged_nano_usd FROM accounts
"""
_HOLDS = """
    SELECT work_id, account_id, key_id, maximum_nano_usd, price_version, spend_day, state,
           captured_nano_usd, returned_nano_usd
    FROM holds
"""
_KEY_DAYS = "SELECT key_id, day, charged_nano_usd, held_nano_usd FROM api_key_days"
_ENTRIES = """
    SELECT position, line, account_id, ledger, kind, work_id, grant_id, at, amount_nano_usd,
           balance_nano_usd
    FROM journal_entries ORDER BY position, line
"""
_BALANCES = "SELECT account_id, ledger, balance_nano_usd FROM journal_balances"
JOURNAL = "19 the journal is what the log says"


def compare_rows(connection: Connection, book: Book, find: Finding) -> None:
    """Every row that shows money, with what the book has of it."""
    _compare(find, "accounts", _keyed(connection, _ACCOUNTS, "id"), _account_rows(book))
    _compare(find, "holds", _keyed(connection, _HOLDS, "work_id"), _hold_rows(book))
    days = {
        (key_id, day): {"key_id": key_id, "day": day, "charged_nano_usd": c, "held_nano_usd": h}
        for (key_id, day), (c, h) in book.key_days.items()
    }
    _compare(find, "api_key_days", _keyed(connection, _KEY_DAYS, "key_id", "day"), days)


def compare_journal(connection: Connection, book: Book, *, through: int, find: Finding) -> None:
    """The journal against the book, up to where it has followed the log (19)."""
    balances: dict[tuple[str, str], int] = defaultdict(int)
    entries: dict[int, list[JournalLine]] = defaultdict(list)
    for row in connection.execute(_ENTRIES).fetchall():
        account = (row["account_id"], row["ledger"])
        balances[account] += row["amount_nano_usd"]
        entries[row["position"]].append(_journal_line(row))
        if balances[account] != row["balance_nano_usd"]:
            find(JOURNAL, _place(row), "the balance after the entry is not the sum of all before")
    for position, lines in entries.items():
        if sum(line.amount for line in lines):
            find("19 a transaction sums to zero", f"journal position {position}", "it does not")
    expected = {position: lines for position, lines in book.journal.items() if position <= through}
    for position in sorted(expected.keys() | entries.keys()):
        if _ordered(expected.get(position, [])) != _ordered(entries.get(position, [])):
            find(JOURNAL, f"journal position {position}", "entries differ")
    for row in connection.execute(_BALANCES).fetchall():
        account = (row["account_id"], row["ledger"])
        if balances.pop(account, 0) != row["balance_nano_usd"]:
            find(JOURNAL, " ".join(account), "the balance row is not the sum of the entries")
    for account in balances:
        find(JOURNAL, " ".join(account), "there is no balance row")


def _journal_line(row: dict[str, Any]) -> JournalLine:
    return JournalLine(
        account_id=row["account_id"],
        ledger=row["ledger"],
        amount=row["amount_nano_usd"],
        kind=row["kind"],
        work_id=row["work_id"],
        grant_id=row["grant_id"],
        at=row["at"],
    )


def _ordered(lines: list[JournalLine]) -> list[JournalLine]:
    return sorted(lines, key=lambda line: (line.account_id, line.ledger, line.amount))


def _place(row: dict[str, Any]) -> str:
    return f"journal position {row['position']} line {row['line']}"


def _keyed(connection: Connection, query: str, *key: str) -> dict[Any, dict[str, Any]]:
    rows = connection.execute(query).fetchall()
    if len(key) == 1:
        return {row[key[0]]: row for row in rows}
    return {tuple(row[name] for name in key): row for row in rows}


def _compare(
    find: Finding, table: str, found: dict[Any, dict[str, Any]], wanted: dict[Any, dict[str, Any]]
) -> None:
    for key in found.keys() | wanted.keys():
        subject = f"{table} {key}"
        if key not in wanted:
            find(ROWS, subject, "the log knows no such thing")
        elif key not in found:
            find(ROWS, subject, "the row is missing")
        else:
            differing = [name for name in wanted[key] if found[key][name] != wanted[key][name]]
            if differing:
                find(ROWS, subject, f"differs in {', '.join(differing)}")


def _account_rows(book: Book) -> dict[str, dict[str, Any]]:
    return {
        account_id: {
            "available_nano_usd": sums.available,
            "held_nano_usd": sums.held,
            "granted_nano_usd": sums.granted,
            "charged_nano_usd": sums.charged,
        }
        for account_id, sums in book.credit.items()
    }


def _hold_rows(book: Book) -> dict[str, dict[str, Any]]:
    return {
        hold.work_id: {
            "account_id": hold.account_id,
            "key_id": hold.key_id,
            "maximum_nano_usd": hold.maximum,
            "price_version": hold.price_version,
            "spend_day": hold.day,
            "state": hold.state,
            "captured_nano_usd": hold.captured,
            "returned_nano_usd": hold.returned,
        }
        for hold in book.holds.values()
    }
