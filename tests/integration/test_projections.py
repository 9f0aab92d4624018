"""What the read models show of what commands did, and that a rebuild shows the same."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from eventsourcing.utils import get_topic
from psycopg import sql

import domain
from adapters.event_log.aggregates import AGGREGATES
from domain.commands import batches as batch_commands
from domain.commands import files as file_commands
from domain.commands import keys as key_commands
from domain.commands import models as model_commands
from domain.commands import prices as price_commands
from domain.commands import work as work_commands
from domain.errors import InvalidRequest
from domain.ledger.key_spend import SpendLimits
from domain.ledger.money import nano_usd
from domain.log.aggregate import Aggregate
from domain.messages import AttemptFailed, ChunkProgress, Heartbeat, Started
from projections.direct import fingerprints, heartbeats
from projections.money import accounts, holds, keys, prices, receipts, statements
from projections.registry import FOLLOWING, INLINE
from projections.work import batches, files, fine_tuning_events, fine_tuning_jobs, models
from projections.work import open_work as work
from tests.conftest import Database
from tests.integration.product_rig import BASE, PRICES, ProductRig


@pytest.fixture
def rig(database: Database) -> Iterator[ProductRig]:
    rig = ProductRig(database)
    yield rig
    rig.close()


def job_of(rig: ProductRig, job_id: str) -> fine_tuning_jobs.JobRow:
    row = fine_tuning_jobs.get(rig.connection, account_id=rig.account_id, job_id=job_id)
    assert row is not None
    return row


def batch_of(rig: ProductRig, batch_id: str) -> batches.BatchRow:
    row = batches.get(rig.connection, account_id=rig.account_id, batch_id=batch_id)
    assert row is not None
    return row


def account_of(rig: ProductRig) -> accounts.AccountRow:
    row = accounts.get(rig.connection, rig.account_id)
    assert row is not None
    return row


def ids(due: Sequence[work.DueBatch]) -> list[str]:
    return [batch.work_id for batch in due]


# The registry ----------------------------------------------------------------------------------


def test_every_aggregate_of_the_domain_is_listed() -> None:
    for module in pkgutil.walk_packages(domain.__path__, "domain."):
        importlib.import_module(module.name)
    found = {each for each in Aggregate.__subclasses__() if each.__module__.startswith("domain.")}
    assert set(AGGREGATES) == found


def test_whoever_opens_the_log_knows_every_event_of_it() -> None:
    script = """
import adapters.event_log.event_store
from eventsourcing.utils import resolve_topic
resolve_topic("gridline.idempotent_request.recorded")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def event_fields() -> dict[str, set[str]]:
    """The own fields of every event of the domain, by topic."""
    common = {*Aggregate.Created.model_fields}
    return {
        get_topic(member): member.model_fields.keys() - common
        for aggregate in AGGREGATES
        for member in vars(aggregate).values()
        if isinstance(member, type)
        and issubclass(member, Aggregate.Event)
        and get_topic(member).startswith("gridline.")
    }


def test_every_handled_topic_is_an_event_of_the_domain() -> None:
    handled = {topic for model in (*INLINE, *FOLLOWING) for topic in model.handlers}
    unhandled = event_fields().keys() - handled
    assert handled - event_fields().keys() == set()
    assert unhandled == {
        "gridline.fine_tuned_model.staged",
        "gridline.fine_tuned_model.unstaged",
        "gridline.idempotent_request.recorded",
    }


def test_every_event_is_documented_with_its_fields_and_read_models() -> None:
    text = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")
    documented = {}
    for line in text.splitlines():
        if line.startswith("| `gridline."):
            topic, _, fields, shown_by = (cell.strip() for cell in line.strip("|").split("|"))
            names = {name.strip(" `") for name in fields.split(",")} - {""}
            shown = {name.strip() for name in shown_by.split(",")} - {""}
            documented[topic.strip("`")] = (names, shown)
    assert documented == {
        topic: (
            fields,
            {model.name for model in (*INLINE, *FOLLOWING) if topic in model.handlers},
        )
        for topic, fields in event_fields().items()
    }


def test_no_table_has_two_writers_and_every_one_exists(rig: ProductRig) -> None:
    tables = [table for model in (*INLINE, *FOLLOWING) for table in model.tables]
    assert len(tables) == len(set(tables))
    for table in tables:
        rig.connection.execute(sql.SQL("SELECT FROM {}").format(sql.Identifier(table)))


# Files -----------------------------------------------------------------------------------------


def test_a_file_shows_its_name_and_facts_until_it_is_deleted(rig: ProductRig) -> None:
    file_id = rig.store_file("fine-tune", name="mine.jsonl")
    row = files.get(rig.connection, account_id=rig.account_id, file_id=file_id)
    assert row is not None
    assert (row.filename, row.purpose, row.bytes) == ("mine.jsonl", "fine-tune", 100)
    assert row.training is not None
    assert row.training.rows == 40
    other, _ = rig.open_account("other@example.com")
    assert files.get(rig.connection, account_id=other, file_id=file_id) is None
    assert files.deleted_at(rig.connection, account_id=rig.account_id, file_id=file_id) is None
    rig.run(file_commands.delete_file, file_commands.DeleteFile(rig.account_id, file_id))
    assert files.get(rig.connection, account_id=rig.account_id, file_id=file_id) is None
    deleted_at = files.deleted_at(rig.connection, account_id=rig.account_id, file_id=file_id)
    assert deleted_at == rig.clock.now()


def test_pages_tile_the_list_in_both_orders_and_go_on_from_a_tombstone(rig: ProductRig) -> None:
    ids = [rig.store_file("batch" if n % 3 else "fine-tune") for n in range(7)]

    def pages(order: Any, purpose: str | None = None) -> list[str]:
        seen: list[str] = []
        after = None
        while True:
            page = files.list_page(
                rig.connection,
                account_id=rig.account_id,
                limit=2,
                after=after,
                order=order,
                purpose=purpose,
            )
            seen += [row.id for row in page.rows]
            if not page.has_more:
                return seen
            after = page.rows[-1].id

    assert pages("desc") == ids[::-1]
    assert pages("asc") == ids
    assert pages("asc", "fine-tune") == ids[::3]
    rig.run(file_commands.delete_file, file_commands.DeleteFile(rig.account_id, ids[4]))
    page = files.list_page(rig.connection, account_id=rig.account_id, limit=2, after=ids[4])
    assert [row.id for row in page.rows] == [ids[3], ids[2]]
    assert page.has_more
    empty = files.list_page(rig.connection, account_id=rig.account_id, limit=0)
    assert empty.rows == ()


def test_an_unknown_and_a_foreign_cursor_are_refused_alike(rig: ProductRig) -> None:
    mine = rig.store_file("batch")
    other, _ = rig.open_account("other@example.com")
    texts = []
    for after in (mine, "file-unknown"):
        with pytest.raises(InvalidRequest) as refused:
            files.list_page(rig.connection, account_id=other, limit=2, after=after)
        assert refused.value.param == "after"
        texts.append(refused.value.message)
    assert texts[0] == texts[1]


def test_a_file_is_due_once_its_time_is_over_and_no_open_work_uses_it(rig: ProductRig) -> None:
    batch_id = rig.create_batch()
    pinned = batch_of(rig, batch_id).input_file_id
    free = rig.store_file("batch")
    now = rig.clock.now() + timedelta(days=31)
    assert files.expired(rig.connection, now=now, limit=10) == [free]
    rig.run(batch_commands.cancel_batch, batch_commands.CancelBatch(rig.account_id, batch_id))
    rig.finish_batch(batch_id, completed=0, failed=0)
    assert set(files.expired(rig.connection, now=now, limit=10)) == {free, pinned}


# Batches ---------------------------------------------------------------------------------------


def test_a_batch_shows_each_step_and_its_exact_end(rig: ProductRig) -> None:
    batch_id = rig.create_batch(metadata={"for": "me"})
    created = batch_of(rig, batch_id)
    assert (created.status, created.total, created.metadata) == ("validating", 0, {"for": "me"})
    assert created.expires_at == created.created_at + timedelta(hours=24)
    rig.validate(batch_id)
    assert (batch_of(rig, batch_id).total, batch_of(rig, batch_id).base) == (0, BASE)
    rig.clock.advance(timedelta(minutes=1))
    rig.start(batch_id)
    started = batch_of(rig, batch_id)
    assert (started.status, started.total) == ("in_progress", 8)
    assert started.in_progress_at == rig.clock.now()
    rig.finish_chunk(rig.assign(batch_id, 0))
    rig.finish_chunk(rig.assign(batch_id, 1), failed=1)
    finalizing = batch_of(rig, batch_id)
    assert (finalizing.status, finalizing.completed, finalizing.failed) == ("finalizing", 7, 1)
    assert (finalizing.output_file_id, finalizing.usage) == (None, None)
    rig.clock.advance(timedelta(minutes=1))
    rig.finish_batch(batch_id, completed=7, failed=1)
    ended = batch_of(rig, batch_id)
    assert (ended.status, ended.completed_at) == ("completed", rig.clock.now())
    assert (ended.cancelled_at, ended.expired_at) == (None, None)
    assert ended.usage is not None
    assert [(used.input_tokens, used.output_tokens) for used in ended.usage] == [(2000, 200)]
    output = files.get(rig.connection, account_id=rig.account_id, file_id=str(ended.output_file_id))
    assert output is not None
    assert (output.purpose, output.filename) == ("batch_output", f"{batch_id}_output.jsonl")


def test_counts_of_a_running_batch_never_fall(rig: ProductRig) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id)
    rig.start(batch_id)
    seen = []

    def look() -> None:
        row = batch_of(rig, batch_id)
        seen.append((row.completed, row.failed))
        assert row.completed + row.failed <= row.total

    first = rig.assign(batch_id, 0)
    rig.report(first, ChunkProgress(completed=3, failed=0))
    look()
    rig.lose(first)
    look()
    second = rig.assign(batch_id, 0)
    rig.report(second, ChunkProgress(completed=1, failed=0))
    look()
    rig.finish_chunk(second, failed=1)
    look()
    rig.finish_chunk(rig.assign(batch_id, 1))
    look()
    assert seen == [(3, 0), (3, 0), (3, 0), (3, 1), (7, 1)]


def test_a_failed_batch_lists_its_faults(rig: ProductRig) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id, maximum_usd="1000")
    rig.start(batch_id)
    row = batch_of(rig, batch_id)
    assert (row.status, row.failed_at, row.total) == ("failed", rig.clock.now(), 0)
    assert [(error.code, error.line) for error in row.errors] == [("insufficient_quota", None)]


def test_batches_page_newest_first_within_the_account(rig: ProductRig) -> None:
    ids = [rig.create_batch() for _ in range(3)]
    page = batches.list_page(rig.connection, account_id=rig.account_id, limit=2)
    assert ([row.id for row in page.rows], page.has_more) == ([ids[2], ids[1]], True)
    page = batches.list_page(rig.connection, account_id=rig.account_id, limit=2, after=ids[1])
    assert ([row.id for row in page.rows], page.has_more) == ([ids[0]], False)
    other, _ = rig.open_account("other@example.com")
    assert batches.list_page(rig.connection, account_id=other, limit=2).rows == ()


# Fine-tuning jobs ------------------------------------------------------------------------------


def test_a_job_shows_its_quote_progress_and_result(rig: ProductRig) -> None:
    job_id = rig.job_that_succeeds(suffix="mine", metadata={"team": "a"})
    row = job_of(rig, job_id)
    assert (row.status, row.suffix, row.metadata) == ("succeeded", "mine", {"team": "a"})
    assert row.settings.quote
    assert row.estimated_finish > row.created_at
    assert (row.trained_tokens, row.step, row.steps) == (900, 9, 9)
    assert row.fine_tuned_model == row.model
    assert row.eval_source == "holdout"
    assert row.result is not None
    assert row.result.eval_loss == 0.75
    (checkpoint,) = fine_tuning_jobs.checkpoints(row)
    assert checkpoint.model == row.model
    assert checkpoint.metrics["full_valid_loss"] == 0.75
    model = models.get(rig.connection, account_id=rig.account_id, model=str(row.model))
    assert model is not None
    assert model.rank == row.settings.hyperparameters.lora_rank
    assert account_of(rig).models == 1


def test_a_jobs_events_tell_its_story_newest_first(rig: ProductRig) -> None:
    job_id = rig.job_that_succeeds(suffix="mine")
    page = fine_tuning_events.list_page(rig.connection, job_id=job_id, limit=100)
    codes = [(row.data or {}).get("code") for row in page.rows]
    assert "suffix_ignored" in codes
    metrics = [row for row in page.rows if row.type == "metrics"]
    assert metrics[0].data is not None
    assert metrics[0].data["eval_source"] == "holdout"
    assert metrics[0].data["eval_loss_before"] == 2.0
    assert metrics[1].data == {
        "step": 3,
        "total_steps": 9,
        "trained_tokens": 300,
        "train_loss": 1.5,
    }
    assert page.rows[-1].message.startswith("Created")
    walked: list[str] = []
    after = None
    while True:
        part = fine_tuning_events.list_page(rig.connection, job_id=job_id, limit=2, after=after)
        walked += [row.id for row in part.rows]
        if not part.has_more:
            break
        after = walked[-1]
    assert walked == [row.id for row in page.rows]


def test_a_waiting_job_says_what_it_waits_for(rig: ProductRig) -> None:
    first, second = rig.create_job(), rig.create_job()
    rig.start(first)
    rig.start(second)
    rig.start(second)
    row = job_of(rig, second)
    assert (row.status, row.waiting_for) == ("validating_files", "account_capacity")
    assert row.reason is not None
    assert row.reason.startswith("Account capacity")
    events = fine_tuning_events.list_page(rig.connection, job_id=second, limit=10).rows
    assert [(event.data or {}).get("code") for event in events] == ["waiting_for_capacity", None]


def test_the_last_event_of_a_failed_job_has_its_code(rig: ProductRig) -> None:
    job_id = rig.create_job()
    rig.start(job_id)
    attempt = rig.assign(job_id)
    rig.report(attempt, Started())
    rig.report(attempt, AttemptFailed(code="training_failed", message="The loss became NaN."))
    row = job_of(rig, job_id)
    assert (row.status, row.error_code) == ("failed", "training_failed")
    assert (row.fault_side, row.model, row.receipt) == ("platform", None, None)
    last = fine_tuning_events.list_page(rig.connection, job_id=job_id, limit=1).rows[0]
    assert (last.level, last.data) == ("error", {"code": "training_failed"})
    assert fine_tuning_jobs.checkpoints(row) == ()


def test_jobs_are_filtered_by_metadata_or_its_absence(rig: ProductRig) -> None:
    with_both = rig.create_job(metadata={"team": "a", "run": "1"})
    with_one = rig.create_job(metadata={"team": "a"})
    without = rig.create_job()

    def found(**filters: Any) -> list[str]:
        page = fine_tuning_jobs.list_page(
            rig.connection, account_id=rig.account_id, limit=10, **filters
        )
        return [row.id for row in page.rows]

    assert found() == [without, with_one, with_both]
    assert found(metadata={"team": "a"}) == [with_one, with_both]
    assert found(metadata={"team": "a", "run": "1"}) == [with_both]
    assert found(without_metadata=True) == [without]


def test_a_deleted_model_is_gone_and_leaves_a_tombstone(rig: ProductRig) -> None:
    job_id = rig.job_that_succeeds()
    name = str(job_of(rig, job_id).model)
    scope: dict[str, Any] = {"account_id": rig.account_id}
    assert [row.id for row in models.list_all(rig.connection, **scope)] == [name]
    assert models.deleted_at(rig.connection, **scope, model=name) is None
    rig.run(model_commands.delete_model, model_commands.DeleteModel(rig.account_id, name))
    assert models.list_all(rig.connection, **scope) == ()
    assert models.get(rig.connection, **scope, model=name) is None
    assert models.deleted_at(rig.connection, **scope, model=name) == rig.clock.now()
    assert account_of(rig).models == 0
    job = job_of(rig, job_id)
    assert (job.model, job.fine_tuned_model, job.is_servable) == (name, None, False)
    assert "deleted" in str(job.not_servable_because)


# Money, keys and prices ------------------------------------------------------------------------


def test_an_account_shows_credit_holds_and_charges(rig: ProductRig) -> None:
    before = account_of(rig)
    assert (before.available_nano_usd, before.email) == (nano_usd(25), "someone@example.com")
    batch_id = rig.create_batch()
    rig.validate(batch_id, maximum_usd="0.10")
    rig.start(batch_id)
    held = account_of(rig)
    assert held.held_nano_usd == nano_usd("0.10")
    assert held.open_batches == 1
    (hold,) = holds.open_of(rig.connection, account_id=rig.account_id)
    assert (hold.work_id, hold.maximum_nano_usd) == (batch_id, nano_usd("0.10"))
    rig.finish_chunk(rig.assign(batch_id, 0))
    rig.finish_chunk(rig.assign(batch_id, 1))
    rig.finish_batch(batch_id, completed=8, failed=0)
    after = account_of(rig)
    assert (after.held_nano_usd, after.open_batches) == (0, 0)
    assert after.charged_nano_usd == nano_usd("0.01")
    assert after.available_nano_usd == nano_usd("24.99")
    assert after.changed_position > before.changed_position
    assert holds.open_of(rig.connection, account_id=rig.account_id) == ()
    today = rig.clock.now().date()
    (key,) = keys.list_all(rig.connection, account_id=rig.account_id, day=today)
    assert (key.total_nano_usd, key.day_nano_usd) == (nano_usd("0.01"), nano_usd("0.01"))


def test_a_receipt_explains_the_charge_of_a_batch_and_of_a_job(rig: ProductRig) -> None:
    batch_id, job_id = rig.batch_that_completes(), rig.job_that_succeeds()
    for work_id in (batch_id, job_id):
        found = receipts.find(rig.connection, account_id=rig.account_id, work_id=work_id)
        assert found is not None
        assert found.receipt is not None
        assert found.hold is not None
        assert found.hold.state == "captured"
        assert found.hold.captured_nano_usd == found.receipt.charge_nano_usd
        assert found.hold.returned_nano_usd == found.receipt.returned_nano_usd
        assert found.maximum_nano_usd == found.hold.maximum_nano_usd
    other, _ = rig.open_account("other@example.com")
    assert receipts.find(rig.connection, account_id=other, work_id=batch_id) is None
    assert receipts.find(rig.connection, account_id=other, work_id="no such work") is None


def test_a_key_opens_its_account_until_it_is_revoked(rig: ProductRig) -> None:
    bearer = keys.authenticate(rig.connection, "sha of someone@example.com")
    assert bearer == keys.Bearer(key_id=rig.key_id, account_id=rig.account_id)
    assert keys.authenticate(rig.connection, "another") is None
    limits = SpendLimits(daily_nano_usd=5, total_nano_usd=7)
    rig.run(key_commands.limit_key, key_commands.LimitKey(rig.key_id, limits))
    rig.run(key_commands.revoke_key, key_commands.RevokeKey(rig.key_id))
    assert keys.authenticate(rig.connection, "sha of someone@example.com") is None
    day = rig.clock.now().date()
    (row,) = keys.list_all(rig.connection, account_id=rig.account_id, day=day)
    assert (row.revoked_at, row.prefix) == (rig.clock.now(), None)
    assert (row.daily_limit_nano_usd, row.total_limit_nano_usd) == (5, 7)


def test_the_newest_price_list_that_is_effective_is_in_force_and_old_ones_stay(
    rig: ProductRig,
) -> None:
    now = rig.clock.now()
    published = {PRICES.version: PRICES}
    for effective_from in (now - timedelta(days=1), now + timedelta(days=1), now):
        version = max(published) + 1
        published[version] = PRICES.model_copy(
            update={"version": version, "effective_from": effective_from}
        )
        publish = price_commands.PublishPrices(prices=published[version])
        rig.run(price_commands.publish_prices, publish)
    first = PRICES.version
    for at, in_force in (
        (PRICES.effective_from - timedelta(days=999), first),
        (now - timedelta(hours=1), first + 1),
        (now, first + 3),
        (now + timedelta(days=2), first + 3),
    ):
        assert prices.in_force(rig.connection, at) == published[in_force]
    for version, each in published.items():
        assert prices.of_version(rig.connection, version) == each


def test_statements_tile_and_end_in_the_accounts_balances(rig: ProductRig) -> None:
    rig.every_story()
    assert not statements.is_current(rig.connection, account_id=rig.account_id)
    rig.runner().catch_up()
    assert statements.is_current(rig.connection, account_id=rig.account_id)
    whole = statements.read(rig.connection, account_id=rig.account_id, limit=1000)
    account = account_of(rig)
    assert whole.opening_available_nano_usd == whole.opening_held_nano_usd == 0
    assert whole.closing_available_nano_usd == account.available_nano_usd
    assert whole.closing_held_nano_usd == account.held_nano_usd
    assert sum(line.charged_nano_usd for line in whole.lines) == account.charged_nano_usd
    lines: list[statements.StatementLine] = []
    part = statements.read(rig.connection, account_id=rig.account_id, limit=3)
    while True:
        lines += part.lines
        closing = (part.closing_available_nano_usd, part.closing_held_nano_usd)
        if not part.has_more:
            break
        part = statements.read(
            rig.connection, account_id=rig.account_id, limit=3, after=part.through
        )
        assert (part.opening_available_nano_usd, part.opening_held_nano_usd) == closing
    assert tuple(lines) == whole.lines


# The worker's questions ------------------------------------------------------------------------


def test_a_batch_walks_through_the_workers_lists(rig: ProductRig) -> None:
    batch_id = rig.create_batch(window="72h")
    assert ids(work.batches_to_validate(rig.connection, limit=9)) == [batch_id]
    rig.validate(batch_id)
    assert ids(work.batches_to_validate(rig.connection, limit=9)) == []
    (startable,) = work.startable(rig.connection)
    assert startable.work_id == batch_id
    assert startable.account_position == account_of(rig).changed_position
    assert work.waiting(rig.connection, each=9) == ()
    rig.start(batch_id)
    assert work.startable(rig.connection) == ()
    waiting = work.waiting(rig.connection, each=9)
    assert [(each.chunk, each.base, each.flexible) for each in waiting] == [
        (0, BASE, True),
        (1, BASE, True),
    ]
    assert len(work.waiting(rig.connection, each=1)) == 1
    attempt = rig.assign(batch_id, 0)
    assert [each.attempt for each in work.assigned(rig.connection)] == [attempt]
    assert [each.chunk for each in work.waiting(rig.connection, each=9)] == [1]
    rig.lose(attempt)
    assert work.assigned(rig.connection) == ()
    assert len(work.waiting(rig.connection, each=9)) == 2
    for chunk in (0, 1):
        rig.finish_chunk(rig.assign(batch_id, chunk))
    assert ids(work.batches_to_finalize(rig.connection, limit=9)) == [batch_id]
    rig.finish_batch(batch_id, completed=8, failed=0)
    assert ids(work.batches_to_finalize(rig.connection, limit=9)) == []


def test_a_cancelled_batch_wants_nothing_more_and_ends_once_its_attempts_have(
    rig: ProductRig,
) -> None:
    batch_id = rig.create_batch()
    rig.validate(batch_id)
    rig.start(batch_id)
    attempt = rig.assign(batch_id, 0)
    rig.run(batch_commands.cancel_batch, batch_commands.CancelBatch(rig.account_id, batch_id))
    assert work.waiting(rig.connection, each=9) == ()
    assert [each.stopping for each in work.assigned(rig.connection)] == [True]
    assert ids(work.batches_to_finalize(rig.connection, limit=9)) == []
    rig.lose(attempt)
    assert work.waiting(rig.connection, each=9) == ()
    assert ids(work.batches_to_finalize(rig.connection, limit=9)) == [batch_id]


def test_a_batch_is_past_its_window_once(rig: ProductRig) -> None:
    batch_id = rig.create_batch()
    rig.clock.advance(timedelta(hours=24))
    now = rig.clock.now()
    assert work.past_due(rig.connection, now=now, limit=9) == [batch_id]
    rig.run(work_commands.expire_work, work_commands.ExpireWork(batch_id))
    assert work.past_due(rig.connection, now=now, limit=9) == []
    assert ids(work.batches_to_validate(rig.connection, limit=9)) == []
    assert ids(work.batches_to_finalize(rig.connection, limit=9)) == [batch_id]


def test_a_job_is_overdue_when_its_command_says_so(rig: ProductRig) -> None:
    job_id = rig.create_job()
    assert [each.work_id for each in work.startable(rig.connection)] == [job_id]
    rig.start(job_id)
    assert [each.work_id for each in work.waiting(rig.connection, each=9)] == [job_id]
    rig.clock.advance(timedelta(hours=23))
    assert work.past_due(rig.connection, now=rig.clock.now(), limit=9) == []
    rig.clock.advance(timedelta(hours=1))
    assert work.past_due(rig.connection, now=rig.clock.now(), limit=9) == [job_id]
    rig.run(work_commands.expire_work, work_commands.ExpireWork(job_id))
    assert job_of(rig, job_id).error_code == "job_unavailable"
    assert work.past_due(rig.connection, now=rig.clock.now(), limit=9) == []
    assert work.waiting(rig.connection, each=9) == ()


def test_a_running_job_is_overdue_at_its_deadline(rig: ProductRig) -> None:
    job_id = rig.create_job()
    rig.start(job_id)
    rig.report(rig.assign(job_id), Started())
    rig.clock.advance(timedelta(hours=2))
    assert work.past_due(rig.connection, now=rig.clock.now(), limit=9) == []
    rig.clock.advance(timedelta(minutes=10))
    assert work.past_due(rig.connection, now=rig.clock.now(), limit=9) == [job_id]
    rig.run(work_commands.expire_work, work_commands.ExpireWork(job_id))
    assert job_of(rig, job_id).error_code == "job_expired"


def test_a_create_is_found_by_its_fingerprint_until_it_is_forgotten(rig: ProductRig) -> None:
    file_id = rig.store_file("batch")
    made_at = rig.clock.now()
    before = made_at - timedelta(seconds=1)

    def find(**changed: Any) -> str | None:
        asked = {"route": "POST /test", "body_sha256": file_id, "since": before, **changed}
        return fingerprints.find(rig.connection, key_id=rig.key_id, **asked)

    assert find() == file_id
    assert find(body_sha256="another") is None
    assert find(since=made_at) is None
    assert fingerprints.purge(rig.connection, before=made_at) > 0
    assert find() is None


def test_only_the_newest_heartbeat_of_a_runner_is_kept(rig: ProductRig) -> None:
    now = rig.clock.now()

    def beat(seconds: int, base: str) -> Heartbeat:
        return Heartbeat(
            runner_id="runner_a",
            gpu_class="cpu",
            sent_at=now + timedelta(seconds=seconds),
            slots={"train": 1},
            warm_base=base,
        )

    heartbeats.upsert(rig.connection, beat(3, "new"), seen_at=now)
    heartbeats.upsert(rig.connection, beat(1, "old"), seen_at=now)
    (row,) = heartbeats.list_all(rig.connection)
    assert row.heartbeat.warm_base == "new"
    later = now + timedelta(seconds=10)
    assert heartbeats.alive(rig.connection, now=later, lease_seconds=30) == 1
    assert heartbeats.alive(rig.connection, now=later, lease_seconds=5) == 0
    heartbeats.delete(rig.connection, "runner_a")
    assert heartbeats.list_all(rig.connection) == ()


# Rebuild (invariant 18) ------------------------------------------------------------------------


def all_tables(rig: ProductRig) -> dict[str, list[Any]]:
    return {
        table: sorted(
            rig.connection.execute(
                sql.SQL("SELECT t::text AS row FROM {} t").format(sql.Identifier(table))
            ).fetchall(),
            key=str,
        )
        for model in (*INLINE, *FOLLOWING)
        for table in model.tables
    }


def test_every_read_model_rebuilds_to_the_same_rows_for_every_split(rig: ProductRig) -> None:
    rig.every_story()
    rig.runner(batch_size=3).catch_up()
    before = all_tables(rig)
    assert not [table for table, rows in before.items() if not rows]
    for batch_size in (1, 7, 200):
        runner = rig.runner(batch_size=batch_size)
        for model in (*INLINE, *FOLLOWING):
            runner.rebuild(model)
        assert all_tables(rig) == before
    named = rig.connection.execute("SELECT count(*) AS n FROM file_names").fetchone()
    assert named is not None
    assert named["n"] > 0
