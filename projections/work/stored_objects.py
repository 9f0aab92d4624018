"""Which stored objects nothing refers to any more, a page of keys at a time, for the sweep.

Keys are `chunks/<batch>/…`, `adapters/<job>/…` and `files/<file>`. What the rows do not know is
left alone: it may be about to be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from projections.read_model import Connection

_OF_ENDED_BATCHES = """
    SELECT k.key
    FROM unnest(%(keys)s::text[]) AS k (key) JOIN batches b ON b.id = split_part(k.key, '/', 2)
    WHERE NOT EXISTS (SELECT FROM open_work w WHERE w.work_id = b.id)
"""
_WITHOUT_AN_OWNER = """
    SELECT k.key
    FROM unnest(%(keys)s::text[]) AS k (key)
        JOIN fine_tuning_jobs j ON j.id = split_part(k.key, '/', 2)
    WHERE NOT EXISTS (SELECT FROM open_work w WHERE w.work_id = j.id)
      AND NOT EXISTS (
          SELECT FROM files f
          WHERE f.account_id = j.account_id AND f.object_key = k.key AND f.deleted_at IS NULL)
      AND NOT EXISTS (
          SELECT FROM models m
          WHERE m.account_id = j.account_id AND m.job_id = j.id AND m.deleted_at IS NULL
            AND k.key IN (m.config ->> 'key', m.weights ->> 'key'))
"""
_FILES = """
    SELECT k.key, f.deleted_at IS NOT NULL AS deleted
    FROM unnest(%(keys)s::text[]) AS k (key) JOIN files f ON f.id = split_part(k.key, '/', 2)
"""


def of_ended_batches(connection: Connection, *, keys: Sequence[str]) -> list[str]:
    """Those of these chunks' objects whose batch has ended."""
    rows = connection.execute(_OF_ENDED_BATCHES, {"keys": list(keys)}).fetchall()
    return [row["key"] for row in rows]


def without_an_owner(connection: Connection, *, keys: Sequence[str]) -> list[str]:
    """Those of these objects of trainings whose job has ended and that no file and no model has; an
    open batch may still have staged some."""
    rows = connection.execute(_WITHOUT_AN_OWNER, {"keys": list(keys)}).fetchall()
    return [row["key"] for row in rows]


def files_deleted(connection: Connection, *, keys: Sequence[str]) -> dict[str, bool]:
    """Whether the file of each of these objects is deleted; unknown files are left out."""
    rows = connection.execute(_FILES, {"keys": list(keys)}).fetchall()
    return {row["key"]: row["deleted"] for row in rows}
