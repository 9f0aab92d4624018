"""The audit's look at rows that no event makes: keys' secrets, file names, texts of work.

The log says whose each of them is, and of a secret also a digest: exchanged for another one, it
would let one customer spend another's credit. What people wrote may be edited or deleted; the log
knows nothing of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from adapters.audit.book import Finding
from adapters.event_log.postgres import Connection
from domain.ledger.key_spend import KeySpend
from domain.log.aggregate import Aggregate

SECRETS = "a key's secret is the one that was registered"
OWNERS = "personal rows are of the account that the log names"

_SECRETS = "SELECT key_id, account_id, secret_sha256 FROM api_key_secrets"
_OWNED = """
    SELECT file_id AS id, account_id FROM file_names
    UNION ALL SELECT work_id, account_id FROM work_texts
    UNION ALL SELECT account_id, account_id FROM account_people
"""


def compare_personal_rows(
    connection: Connection, aggregates: Mapping[str, Aggregate], find: Finding
) -> None:
    """Every usable key has its secret, no other secret opens anything, and no row changed hands."""
    rows = {row["key_id"]: row for row in connection.execute(_SECRETS).fetchall()}
    keys = {each.id: each for each in aggregates.values() if isinstance(each, KeySpend)}
    for key_id in keys.keys() | rows.keys():
        key, row = keys.get(key_id), rows.get(key_id)
        if key is None or (key.revoked and row is not None):
            find(SECRETS, key_id, "there is one for a key that opens nothing")
        elif row is None and not key.revoked:
            find(SECRETS, key_id, "there is none")
        elif row is not None:
            told = (row["account_id"], hashlib.sha256(row["secret_sha256"].encode()).hexdigest())
            if told != (key.account_id, key.secret_digest):
                find(SECRETS, key_id, "it is another one, or another account's")
    for row in connection.execute(_OWNED).fetchall():
        owner = aggregates.get(row["id"])
        if owner is None or getattr(owner, "account_id", owner.id) != row["account_id"]:
            find(OWNERS, row["id"], "it is another account's, or nothing's")
