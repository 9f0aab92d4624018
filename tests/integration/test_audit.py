"""The audit passes what commands wrote, whatever they wrote, and names what was tampered with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from adapters.audit.verify import AuditReport, verify, with_objects
from adapters.embedded.postgres import Postgres
from adapters.event_log.event_store import decode
from adapters.event_log.postgres import Connection, connect
from adapters.objects import DiskObjects
from domain.commands import keys as key_commands
from domain.ledger.key_spend import SpendLimits
from domain.ledger.money import nano_usd
from projections.follower import Follower
from projections.registry import FOLLOWING, INLINE
from tests.conftest import Database, cloned_database
from tests.fakes import FakeClock
from tests.integration.product_rig import ProductRig
from tests.property.test_ledger_machine import PostgresMachine


@pytest.fixture
def rig(database: Database) -> Iterator[ProductRig]:
    rig = ProductRig(database)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def story_database(postgres: Postgres, template_database: str) -> Iterator[str]:
    """The name of a database in which everything has happened once, and the journal followed."""
    with cloned_database(postgres, template_database) as database:
        rig = ProductRig(database)
        rig.every_story()
        rig.runner().catch_up()
        rig.close()
        yield str(conninfo_to_dict(database.owner_url)["dbname"])


@dataclass(frozen=True, slots=True)
class Ledger:
    """A copy of the story."""

    database: Database
    connection: Connection


@pytest.fixture
def told(postgres: Postgres, story_database: str) -> Iterator[Ledger]:
    with (
        cloned_database(postgres, story_database) as database,
        connect(database.application_url, name="test") as connection,
    ):
        yield Ledger(database, connection)


def tampered(ledger: Ledger, statement: str, *parameters: Any) -> AuditReport:
    """What the audit says after the database's owner has changed something."""
    with psycopg.connect(ledger.database.owner_url) as owner:
        changed = owner.execute(sql.SQL(statement), parameters)
        assert changed.rowcount == 1
    return verify(ledger.connection)


def rules(report: AuditReport) -> set[str]:
    return {difference.rule for difference in report.differences}


def test_an_untouched_ledger_passes_with_its_totals(told: Ledger) -> None:
    report = verify(told.connection)
    assert report.differences == ()
    assert report.passed
    assert report.lines()[-1] == "audit passed"
    assert report.granted_nano_usd == nano_usd(25)
    assert report.granted_nano_usd == (
        report.available_nano_usd + report.held_nano_usd + report.charged_nano_usd
    )
    assert (report.receipts, report.open_holds) == (2, 1)
    assert report.followers == {"journal": report.through}


def test_a_journal_that_lags_is_named_and_compared_as_far_as_it_came(rig: ProductRig) -> None:
    rig.batch_that_completes()
    rig.runner().catch_up()
    seen = verify(rig.connection).through
    rig.batch_that_completes()
    assert rules(verify(rig.connection)) == {"18 what follows the log keeps up with it"}
    report = verify(rig.connection, followed_through=seen)
    assert report.passed
    assert report.followers["journal"] < report.through


def test_an_emptied_journal_does_not_pass(told: Ledger) -> None:
    with psycopg.connect(told.database.owner_url) as owner:
        owner.execute("DELETE FROM journal_entries")
        owner.execute("DELETE FROM journal_balances")
        owner.execute("DELETE FROM gridline_tracking WHERE application_name = 'journal'")
    assert "18 what follows the log keeps up with it" in rules(verify(told.connection))


def test_every_column_of_every_read_model_is_compared(told: Ledger) -> None:
    unseen = [
        f"{table}.{column}"
        for model in (*INLINE, *FOLLOWING)
        for table in model.tables
        for column, report in changes_of(told, table)
        if report.passed
    ]
    assert not unseen


def changes_of(ledger: Ledger, table: str) -> Iterator[tuple[str, AuditReport]]:
    """Each column, with what the audit says when one row has another value in it, which is then
    taken back."""
    rows = ledger.connection.execute(
        "SELECT column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = current_schema() AND table_name = %s ORDER BY ordinal_position",
        (table,),
    ).fetchall()
    assert rows
    with psycopg.connect(ledger.database.owner_url, autocommit=True) as owner:
        names = {"table": sql.Identifier(table), "kept": sql.Identifier(f"kept_{table}")}
        owner.execute(sql.SQL("CREATE TABLE {kept} AS TABLE {table}").format(**names))
        for row in rows:
            other = sql.SQL(OTHER_VALUE[row["data_type"]])
            column = sql.Identifier(row["column_name"])
            changed = owner.execute(
                sql.SQL(
                    "UPDATE {table} SET {column} = {other} "
                    "WHERE ctid = (SELECT min(ctid) FROM {table})"
                ).format(column=column, other=other.format(column), **names)
            )
            assert changed.rowcount == 1
            yield row["column_name"], verify(ledger.connection)
            owner.execute(sql.SQL("DELETE FROM {table}").format(**names))
            owner.execute(sql.SQL("INSERT INTO {table} TABLE {kept}").format(**names))


OTHER_VALUE = {
    "text": "coalesce({}, '') || 'x'",
    "bigint": "coalesce({}, 0) + 1000",
    "integer": "coalesce({}, 0) + 1000",
    "smallint": "coalesce({}, 0) + 1000",
    "double precision": "coalesce({}, 0) + 1",
    "boolean": "NOT {}",
    "date": "{} + 1",
    "timestamp with time zone": "coalesce({}, 'epoch') + interval '1 second'",
    "jsonb": "jsonb_build_array({})",
}


def test_the_application_itself_cannot_edit_the_log(told: Ledger) -> None:
    for statement in (
        "UPDATE gridline_events SET topic = topic",
        "DELETE FROM gridline_events",
        "TRUNCATE gridline_events",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            told.connection.execute(sql.SQL(statement))


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE accounts SET available_nano_usd = available_nano_usd + 1", "the rows are"),
        ("UPDATE accounts SET charged_nano_usd = 0", "the rows are"),
        ("UPDATE api_key_days SET held_nano_usd = held_nano_usd + 1", "the rows are"),
        ("UPDATE api_keys SET total_limit_nano_usd = 5", "the rows are"),
        ("DELETE FROM holds WHERE state = 'placed'", "the rows are"),
        ("UPDATE holds SET captured_nano_usd = 1 WHERE state = 'placed'", "the rows are"),
        (
            "UPDATE batches SET receipt = jsonb_set(receipt, '{charge_nano_usd}', '1') "
            "WHERE status = 'completed'",
            "the rows are",
        ),
        ("DELETE FROM fine_tuning_jobs WHERE status = 'succeeded'", "the rows are"),
        (
            "UPDATE journal_entries SET amount_nano_usd = amount_nano_usd + 1 "
            "WHERE kind = 'grant' AND line = 1",
            "19 a transaction sums to zero",
        ),
        (
            "UPDATE journal_entries SET balance_nano_usd = balance_nano_usd + 1 "
            "WHERE kind = 'grant' AND line = 1",
            "19 the journal is",
        ),
        (
            "UPDATE journal_balances SET balance_nano_usd = balance_nano_usd + 1 "
            "WHERE ledger = 'Customer:Held'",
            "19 the journal is",
        ),
        ("DELETE FROM journal_entries WHERE kind = 'grant' AND line = 2", "19 the journal is"),
        ("UPDATE files SET pins = pins + 1 WHERE deleted_at IS NOT NULL", "the rows are"),
        ("UPDATE models SET deleted_at = created_at", "the rows are"),
        ("UPDATE price_lists SET list = jsonb_set(list, '{version}', '7')", "the rows are"),
        (
            "UPDATE batches SET quote = jsonb_set(quote, '{maximum_nano_usd}', '1') "
            "WHERE status = 'completed'",
            "the rows are",
        ),
        ("UPDATE batches SET price_version = 9 WHERE status = 'completed'", "the rows are"),
        (
            "UPDATE fine_tuning_jobs SET settings = jsonb_set(settings, '{maximum_nano_usd}', '1') "
            "WHERE status = 'succeeded'",
            "the rows are",
        ),
        ("DELETE FROM open_work WHERE kind = 'batch_chunk'", "the rows are"),
        (
            "UPDATE journal_entries SET work_id = 'batch_of_another' "
            "WHERE kind = 'charge' AND ledger = 'Income:Usage:Batch'",
            "19 the journal is",
        ),
        (
            "UPDATE journal_entries SET grant_id = 'a loan' WHERE kind = 'grant' AND line = 2",
            "19 the journal is",
        ),
        (
            "UPDATE journal_entries SET at = at - interval '1 day' WHERE kind = 'grant' "
            "AND line = 1",
            "19 the journal is",
        ),
    ],
)
def test_a_changed_row_is_named(told: Ledger, statement: str, rule: str) -> None:
    report = tampered(told, statement)
    assert any(found.startswith(rule) for found in rules(report)), report.differences


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE api_key_secrets SET secret_sha256 = 'another'", "a key's secret is"),
        ("UPDATE api_key_secrets SET account_id = 'acct_of_another'", "a key's secret is"),
        ("DELETE FROM api_key_secrets", "a key's secret is"),
        (
            "INSERT INTO api_key_secrets VALUES ('key_1', 'acct_1', 'a', 'gl_', 'a back door')",
            "a key's secret is",
        ),
        (
            "UPDATE work_texts SET account_id = 'acct_of_another' "
            "WHERE work_id = (SELECT min(work_id) FROM work_texts)",
            "personal rows are",
        ),
        (
            "UPDATE file_names SET account_id = 'acct_of_another' "
            "WHERE file_id = (SELECT min(file_id) FROM file_names)",
            "personal rows are",
        ),
    ],
)
def test_a_secret_or_a_row_that_changed_hands_is_named(
    told: Ledger, statement: str, rule: str
) -> None:
    report = tampered(told, statement)
    assert any(found.startswith(rule) for found in rules(report)), report.differences


@pytest.mark.parametrize(
    ("topic", "before", "after", "rule"),
    [
        ("gridline.account.credit_granted", "25000000000", "26000000000", "the rows are"),
        ("gridline.account.credit_granted", "25000000000", "1", "2 credit is never negative"),
        (
            "gridline.account.opened",
            '"open_batches":10',
            '"open_batches":99',
            "the rows are",
        ),
        ("gridline.fine_tuning_job.succeeded", '"trained_tokens":900', '"trained_tokens":9', "6 "),
        ("gridline.batch.finished", '"tokens":2000', '"tokens":1999', "6 "),
        ("gridline.batch.finished", "price_version", "no_such_field", "every event is readable"),
    ],
)
def test_an_edited_event_is_named(
    told: Ledger, topic: str, before: str, after: str, rule: str
) -> None:
    report = tampered(told, EDIT, before, after, topic, before)
    assert any(found.startswith(rule) for found in rules(report)), report.differences


@pytest.mark.parametrize(
    ("topic", "before", "after", "rule"),
    [
        ("gridline.batch.created", '"price_version":1', '"price_version":9', "streams agree"),
        ("gridline.batch.created", '"key_id":"key_', '"key_id":"yek_', "streams agree"),
        ("gridline.batch.validated", '"maximum_nano_usd":100', '"maximum_nano_usd":101', "streams"),
        ("gridline.credit_hold.placed", '"price_version":1', '"price_version":9', "streams agree"),
        ("gridline.batch.finished", '"input_sha256":["', '"input_sha256":["x', "streams agree"),
        ("gridline.account.opened", '"open_batches":10', '"open_batches":0', "12 open work"),
        ("gridline.account.opened", '"open_fine_tunes":3', '"open_fine_tunes":0', "12 open work"),
        ("gridline.file.stored", '"sha256":"', '"sha256":"x', "streams agree"),
        ("gridline.file.pinned", '"work_id":"', '"work_id":"x', "every stream folds"),
        ("gridline.account.batch_slot_taken", '"batch_id":"', '"batch_id":"x', "streams agree"),
        ("gridline.batch.chunk_finished", '"model":"', '"model":"x', "streams agree"),
        (
            "gridline.batch.chunk_finished",
            '"input_tokens":1',
            '"input_tokens":1000000000000',
            "6 no line uses",
        ),
    ],
)
def test_streams_that_contradict_each_other_are_named_after_a_rebuild_too(
    told: Ledger, topic: str, before: str, after: str, rule: str
) -> None:
    tampered(told, EDIT, before, after, topic, before)
    rebuild(told)
    report = verify(told.connection)
    assert any(found.startswith(rule) for found in rules(report)), report.differences


@pytest.mark.parametrize(
    ("topic", "again"),
    [
        ("gridline.batch.finished", "gridline.batch.finished"),
        ("gridline.fine_tuning_job.succeeded", "gridline.fine_tuning_job.failed"),
    ],
)
def test_an_end_after_the_end_is_named(told: Ledger, topic: str, again: str) -> None:
    report = tampered(
        told,
        """
        INSERT INTO gridline_events (originator_id, originator_version, topic, state)
        SELECT ended.originator_id, ended.originator_version + 1, %s, shape.state
        FROM gridline_events AS ended, gridline_events AS shape
        WHERE ended.topic = %s AND shape.notification_id = (
            SELECT min(notification_id) FROM gridline_events WHERE topic = %s)
        LIMIT 1
        """,
        again,
        topic,
        again,
    )
    assert "13 a stream takes a path of its state machine" in rules(report), report.differences


def test_a_create_beyond_its_keys_limit_is_named(rig: ProductRig) -> None:
    rig.batch_that_completes()
    limits = SpendLimits(daily_nano_usd=nano_usd(20), total_nano_usd=None)
    rig.run(key_commands.limit_key, key_commands.LimitKey(rig.key_id, limits))
    rig.create_batch()
    rig.runner().catch_up()
    assert verify(rig.connection).passed
    with psycopg.connect(rig.database.owner_url) as owner:
        owner.execute(EDIT, ("20000000000", "1", "gridline.key_spend.limits_set", "20000000000"))
    assert "11 no create passes its key's limit" in rules(verify(rig.connection))


def test_a_hold_that_outlived_its_end_is_named(rig: ProductRig) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id)
    rig.start(batch_id)
    rig.runner().catch_up()
    assert verify(rig.connection, now=rig.clock.now() + timedelta(hours=24)).passed
    report = verify(rig.connection, now=rig.clock.now() + timedelta(hours=27))
    assert rules(report) == {"7 no hold outlives its end"}


def test_a_hold_that_expired_before_its_end_is_named(told: Ledger) -> None:
    report = tampered(
        told,
        """
        UPDATE gridline_events SET topic = 'gridline.credit_hold.expired'
        WHERE notification_id = (SELECT min(notification_id) FROM gridline_events
            WHERE topic = 'gridline.credit_hold.released')
        """,
    )
    assert "7 no hold outlives its end" in rules(report), report.differences


EDIT = """
    UPDATE gridline_events
    SET state = convert_to(replace(convert_from(state, 'UTF8'), %s, %s), 'UTF8')
    WHERE notification_id = (
        SELECT min(notification_id) FROM gridline_events
        WHERE topic = %s AND strpos(convert_from(state, 'UTF8'), %s) > 0)
"""


def rebuild(ledger: Ledger) -> None:
    following = Follower(
        lambda: connect(ledger.database.application_url, name="test"), decode, FOLLOWING
    )
    for model in (*INLINE, *FOLLOWING):
        following.rebuild(model)


@pytest.mark.parametrize(
    ("topic", "rule"),
    [
        ("gridline.account.credit_reserved", "streams are gapless"),
        ("gridline.credit_hold.captured", "6 a charge is its hold's capture"),
        ("gridline.credit_hold.released", "3 held credit is the open holds"),
        ("gridline.key_spend.spend_charged", "8 keys were charged what was captured"),
        ("gridline.fine_tuning_job.succeeded", "7 started work has one open hold"),
        ("gridline.file.deleted", "the rows are what the log says"),
        ("gridline.batch.created", "streams are gapless"),
    ],
)
def test_a_deleted_event_is_missed(told: Ledger, topic: str, rule: str) -> None:
    report = tampered(
        told,
        """
        DELETE FROM gridline_events WHERE notification_id = (
            SELECT min(notification_id) FROM gridline_events WHERE topic = %s)
        """,
        topic,
    )
    assert rule in rules(report), report.differences


def test_a_swapped_pair_of_events_is_noticed(told: Ledger) -> None:
    with psycopg.connect(told.database.owner_url) as owner:
        swapped = owner.execute(
            """
            UPDATE gridline_events e
            SET originator_version = 4 - e.originator_version + 1000000
            WHERE e.originator_id LIKE %s AND e.originator_version IN (2, 3)
            """,
            ("acct_%",),
        )
        assert swapped.rowcount == 2
        owner.execute(
            "UPDATE gridline_events SET originator_version = originator_version - 999999 "
            "WHERE originator_version > 1000",
        )
    assert "streams are gapless" in rules(verify(told.connection))


def test_a_rebuilt_ledger_passes_again(told: Ledger) -> None:
    assert not tampered(told, "UPDATE accounts SET available_nano_usd = 0").passed
    rebuild(told)
    assert verify(told.connection).passed


def test_the_command_exits_with_1_and_names_what_differs(told: Ledger, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text(FakeClock().now().isoformat())

    def command() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "adapters.operators.cli", "audit", "verify"],
            env={
                **os.environ,
                "GRIDLINE_DATABASE_URL": told.database.application_url,
                "GRIDLINE_CLOCK_FILE": str(clock),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    passed = command()
    assert (passed.returncode, passed.stdout.splitlines()[-1]) == (0, "audit passed")
    assert not tampered(told, "UPDATE accounts SET available_nano_usd = 0").passed
    failed = command()
    assert failed.returncode == 1
    assert ": differs in available_nano_usd" in failed.stdout


class AuditedMachine(PostgresMachine):
    """Random histories, each of which must pass the audit with all that came before it."""

    def rows_say_what_happened(self) -> None:
        super().rows_say_what_happened()
        assert verify(self.connection).differences == ()


def test_the_audit_passes_after_any_history(database: Database) -> None:
    run_state_machine_as_test(
        type("OnOneDatabase", (AuditedMachine,), {"database": database}),
        settings=settings(
            max_examples=6,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


async def test_objects_whose_bytes_changed_or_are_gone_are_named(
    told: Ledger, tmp_path: Path
) -> None:
    rows = told.connection.execute(
        "SELECT id, object_key FROM files WHERE deleted_at IS NULL ORDER BY position"
    ).fetchall()
    store = DiskObjects(tmp_path)
    for row in rows:
        stored = await store.put(row["object_key"], pieces(b"what was uploaded"))
        told.connection.execute(
            "UPDATE files SET bytes = %s, sha256 = %s WHERE id = %s",
            (stored.bytes, stored.sha256, row["id"]),
        )
    told.connection.execute("UPDATE models SET deleted_at = created_at")
    assert await differences_of_objects(told, store) == []
    altered, gone, *_ = rows
    (tmp_path / altered["object_key"]).write_bytes(b"what was downloade")
    await store.delete(gone["object_key"])
    assert await differences_of_objects(told, store) == sorted([altered["id"], gone["id"]])


async def differences_of_objects(ledger: Ledger, store: DiskObjects) -> list[str]:
    """Subjects of what only the objects show; what the report had stays in it."""
    before = verify(ledger.connection)
    report = await with_objects(before, ledger.connection, store)
    assert report.objects is not None
    assert report.objects > 2
    assert report.differences[: len(before.differences)] == before.differences
    return sorted(each.subject for each in report.differences[len(before.differences) :])


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    yield content
