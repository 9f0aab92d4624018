"""The audit's comparison of derived rows with what the log says: balances, holds, spend, receipts,
and the journal. Reads only, inside the audit's one snapshot of the database.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from adapters.audit.book import Book, Finding, JournalLine
from adapters.event_log.postgres import Connection
from domain.aggregate import Aggregate
from domain.file import File
from domain.fine_tuned_model import FineTunedModel
from domain.ledger.account import Account
from domain.ledger.key_spend import KeySpend
from domain.ledger.price_book import PriceBook
from domain.work.batch import Batch
from domain.work.fine_tuning_job import FineTuningJob

_ACCOUNTS = """
    SELECT id, available_nano_usd, held_nano_usd, granted_nano_usd, charged_nano_usd,
           open_fine_tunes, open_batches, models, training_job_id,
           open_fine_tunes_max, open_batches_max
    FROM accounts
"""
_HOLDS = """
    SELECT work_id, account_id, key_id, maximum_nano_usd, price_version, spend_day, state,
           captured_nano_usd, returned_nano_usd
    FROM holds
"""
_KEYS = """
    SELECT id, account_id, revoked_at IS NOT NULL AS revoked, daily_limit_nano_usd,
           total_limit_nano_usd
    FROM api_keys
"""
_KEY_DAYS = "SELECT key_id, day, charged_nano_usd, held_nano_usd FROM api_key_days"
_BATCHES = """
    SELECT id, account_id, key_id, status, price_version, maximum_nano_usd, receipt FROM batches
"""
_JOBS = "SELECT id, account_id, key_id, status, settings, receipt FROM fine_tuning_jobs"
_PRICES = "SELECT version, list FROM price_lists"
_OPEN_WORK = "SELECT work_id, account_id FROM open_work"
_FILES = """
    SELECT id, account_id, purpose, sha256, pins, deleted_at IS NOT NULL AS deleted FROM files
"""
_MODELS = """
    SELECT id, account_id, job_id, base, deleted_at IS NOT NULL AS deleted FROM models
"""
_ENTRIES = """
    SELECT position, line, account_id, ledger, kind, work_id, note, at, amount_nano_usd,
           balance_nano_usd
    FROM journal_entries ORDER BY position, line
"""
_BALANCES = "SELECT account_id, ledger, balance_nano_usd FROM journal_balances"
_JOURNAL_POSITION = """
    SELECT notification_id FROM gridline_tracking WHERE application_name = 'journal'
"""

ROWS = "the rows are what the log says"
JOURNAL = "19 the journal is what the log says"


def compare_rows(
    connection: Connection, aggregates: Mapping[str, Aggregate], book: Book, find: Finding
) -> None:
    """Every row that shows money, or the state of work, files and models."""
    _compare(find, "accounts", _keyed(connection, _ACCOUNTS, "id"), _account_rows(aggregates))
    _compare(find, "api_keys", _keyed(connection, _KEYS, "id"), _key_rows(aggregates))
    _compare(find, "holds", _keyed(connection, _HOLDS, "work_id"), _hold_rows(book))
    days = {
        (key_id, day): {"key_id": key_id, "day": day, "charged_nano_usd": c, "held_nano_usd": h}
        for (key_id, day), (c, h) in book.key_days.items()
    }
    _compare(find, "api_key_days", _keyed(connection, _KEY_DAYS, "key_id", "day"), days)
    _compare(find, "batches", _keyed(connection, _BATCHES, "id"), _batch_rows(aggregates))
    _compare(find, "fine_tuning_jobs", _keyed(connection, _JOBS, "id"), _job_rows(aggregates))
    _compare(find, "price_lists", _keyed(connection, _PRICES, "version"), _price_rows(aggregates))
    open_work = _keyed(connection, _OPEN_WORK, "work_id")
    _compare(find, "open_work", open_work, _open_work_rows(aggregates))
    _compare(find, "files", _keyed(connection, _FILES, "id"), _file_rows(aggregates))
    _compare(find, "models", _keyed(connection, _MODELS, "id"), _model_rows(aggregates))


def journal_position(connection: Connection) -> int:
    """How far the journal has followed the log."""
    row = connection.execute(_JOURNAL_POSITION).fetchone()
    return int(row["notification_id"]) if row is not None else 0


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
        note=row["note"],
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


def _account_rows(aggregates: Mapping[str, Aggregate]) -> dict[str, dict[str, Any]]:
    return {
        each.id: {
            "available_nano_usd": each.available_nano_usd,
            "held_nano_usd": each.held_nano_usd,
            "granted_nano_usd": each.granted_nano_usd,
            "charged_nano_usd": each.charged_nano_usd,
            "open_fine_tunes": len(each.open_fine_tunes),
            "open_batches": len(each.open_batches),
            "models": each.models,
            "training_job_id": each.training_job_id,
            "open_fine_tunes_max": each.limits.open_fine_tunes,
            "open_batches_max": each.limits.open_batches,
        }
        for each in aggregates.values()
        if isinstance(each, Account)
    }


def _key_rows(aggregates: Mapping[str, Aggregate]) -> dict[str, dict[str, Any]]:
    return {
        each.id: {
            "account_id": each.account_id,
            "revoked": each.revoked,
            "daily_limit_nano_usd": each.limits.daily_nano_usd,
            "total_limit_nano_usd": each.limits.total_nano_usd,
        }
        for each in aggregates.values()
        if isinstance(each, KeySpend)
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


def _batch_rows(aggregates: Mapping[str, Aggregate]) -> dict[str, dict[str, Any]]:
    return {
        each.id: {
            **_work_row(each),
            "price_version": each.price_version,
            "maximum_nano_usd": each.plan.maximum_nano_usd if each.plan else None,
        }
        for each in aggregates.values()
        if isinstance(each, Batch)
    }


def _job_rows(aggregates: Mapping[str, Aggregate]) -> dict[str, dict[str, Any]]:
    return {
        each.id: {**_work_row(each), "settings": each.settings.model_dump(mode="json")}
        for each in aggregates.values()
        if isinstance(each, FineTuningJob)
    }


def _work_row(work: Batch | FineTuningJob) -> dict[str, Any]:
    return {
        "account_id": work.account_id,
        "key_id": work.key_id,
        "status": work.status,
        "receipt": work.receipt.model_dump(mode="json") if work.receipt else None,
    }


def _open_work_rows(aggregates: Mapping[str, Aggregate]) -> dict[str, dict[str, Any]]:
    """What the worker still sees: work that is missing here would never end."""
    return {
        each.id: {"account_id": each.account_id}
        for each in aggregates.values()
        if isinstance(each, Batch | FineTuningJob) and not each.is_terminal
    }


def _price_rows(aggregates: Mapping[str, Aggregate]) -> dict[int, dict[str, Any]]:
    return {
        version: {"list": prices.model_dump(mode="json")}
        for each in aggregates.values()
        if isinstance(each, PriceBook)
        for version, prices in each.lists.items()
    }


def _file_rows(aggregates: Mapping[str, Aggregate]) -> dict[str, dict[str, Any]]:
    return {
        each.id: {
            "account_id": each.account_id,
            "purpose": each.purpose,
            "sha256": each.object.sha256,
            "pins": len(each.pins),
            "deleted": each.deleted,
        }
        for each in aggregates.values()
        if isinstance(each, File)
    }


def _model_rows(aggregates: Mapping[str, Aggregate]) -> dict[str, dict[str, Any]]:
    return {
        each.id: {
            "account_id": each.account_id,
            "job_id": each.job_id,
            "base": each.base,
            "deleted": each.deleted,
        }
        for each in aggregates.values()
        if isinstance(each, FineTunedModel)
    }
