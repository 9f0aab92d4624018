"""A batch's commands: from its plan to its end, and what each end costs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from domain.assets.file import File
from domain.assets.fine_tuned_model import FineTunedModel
from domain.commands import batches, work
from domain.commands import models as model_commands
from domain.commands import prices as price_commands
from domain.errors import InvalidState, NotFound
from domain.ids import derived_file_id, fine_tuned_model_name, hold_id
from domain.inputs.batch_line import LineError
from domain.ledger.account import Account
from domain.ledger.credit_hold import CreditHold
from domain.ledger.key_spend import KeySpend
from domain.ledger.money import nano_usd
from domain.ledger.prices import PriceList
from domain.ledger.receipt import Receipt
from domain.log.stored import Attempt
from domain.messages import AttemptFailed, ChunkFinished, ChunkProgress, ModelUsage
from domain.work.batch import CHUNK_FAILURES_MAX, CHUNK_LOSSES_MAX, STOP_WITHIN, Batch
from tests.integration.product_rig import (
    BASE,
    LINES_PER_CHUNK,
    PRICES,
    MemoryStory,
    batch_quote,
    chunk_plans,
    object_ref,
)

INPUT_RATE, OUTPUT_RATE = 5_000_003, 10_000_019
MAXIMUM = nano_usd("0.10")
MINIMUM = PRICES.models[BASE].minimum_per_batch_nano_usd
UNTOUCHED = {"available": nano_usd("25"), "held": 0, "charged": 0}


def publish_odd_rates(story: MemoryStory, *, version: int = 2, times: int = 1) -> PriceList:
    of_base = PRICES.models[BASE].model_copy(
        update={
            "input_nano_usd_per_mtok": times * INPUT_RATE,
            "output_nano_usd_per_mtok": times * OUTPUT_RATE,
            "minimum_per_batch_nano_usd": times,
        }
    )
    prices = PRICES.model_copy(
        update={
            "version": version,
            "models": {**PRICES.models, BASE: of_base},
            "effective_from": story.clock.now(),
        }
    )
    story.run(price_commands.publish_prices, price_commands.PublishPrices(prices=prices))
    return prices


def plan(story: MemoryStory, batch_id: str, **changed: Any) -> None:
    fields: dict[str, Any] = {
        "batch_id": batch_id,
        "chunks": chunk_plans(2),
        "first_lines": {},
        "quote": batch_quote(requests=2 * LINES_PER_CHUNK, maximum_nano_usd=MAXIMUM),
    }
    command = batches.RecordBatchPlan(**(fields | changed))
    story.run(batches.record_batch_plan, command)


def started(story: MemoryStory, *, prices: PriceList = PRICES, **fields: Any) -> str:
    """A batch of two chunks of four lines that may run."""
    batch_id = story.create_batch(**fields)
    requests = 2 * LINES_PER_CHUNK
    quote = batch_quote(requests=requests, maximum_nano_usd=MAXIMUM, prices=prices)
    plan(story, batch_id, quote=quote)
    story.start(batch_id)
    return batch_id


def batch(story: MemoryStory, batch_id: str) -> Batch:
    return story.of(Batch, batch_id)


def receipt_of(story: MemoryStory, batch_id: str) -> Receipt:
    receipt = batch(story, batch_id).receipt
    assert receipt is not None
    return receipt


def money(story: MemoryStory) -> dict[str, int]:
    account = story.of(Account, story.account_id)
    return {
        "available": account.available_nano_usd,
        "held": account.held_nano_usd,
        "charged": account.charged_nano_usd,
    }


def charged(nano: int) -> dict[str, int]:
    return {"available": nano_usd("25") - nano, "held": 0, "charged": nano}


def answer(
    story: MemoryStory, attempt: Attempt, *, tokens: tuple[int, int], failed: int = 0, **more: Any
) -> None:
    usage = ModelUsage(model=BASE, input_tokens=tokens[0], output_tokens=tokens[1])
    prefix = f"chunks/{attempt.work_id}/{attempt.chunk}/{attempt.attempt}"
    completed = LINES_PER_CHUNK - failed
    story.report(
        attempt,
        ChunkFinished(
            completed=completed,
            failed=failed,
            usage=(usage,),
            output=object_ref(f"{prefix}/output.jsonl") if completed else None,
            errors=object_ref(f"{prefix}/errors.jsonl") if failed else None,
            **more,
        ),
    )


def cancel(story: MemoryStory, batch_id: str) -> None:
    story.run(batches.cancel_batch, batches.CancelBatch(story.account_id, batch_id))


def end_window(story: MemoryStory, batch_id: str) -> None:
    story.clock.advance(batch(story, batch_id).expires_at - story.clock.now())
    story.run(work.expire_work, work.ExpireWork(batch_id))


# The plan


def test_a_plan_after_the_end_of_the_window_counts_no_more(story: MemoryStory) -> None:
    batch_id = story.create_batch()
    end_window(story, batch_id)
    before = story.position
    plan(story, batch_id)
    assert story.position == before


def test_a_second_plan_changes_nothing(story: MemoryStory) -> None:
    batch_id = story.create_batch()
    plan(story, batch_id)
    before = story.position
    plan(story, batch_id)
    assert story.position == before


def test_a_batch_on_a_model_that_was_deleted_meanwhile_fails_with_its_line(
    story: MemoryStory,
) -> None:
    name = fine_tuned_model_name(BASE, story.account_id, story.job_that_succeeds())
    batch_id = story.create_batch()
    story.run(model_commands.delete_model, model_commands.DeleteModel(story.account_id, name))
    plan(story, batch_id, first_lines={name: 3})
    assert batch(story, batch_id).status == "failed"
    (error,) = story.last(Batch.Failed).errors
    assert (error.code, error.param, error.line) == ("model_not_found", "body.model", 3)
    assert story.of(Account, story.account_id).open_batches == []


def test_a_batch_stages_the_models_that_its_lines_name(story: MemoryStory) -> None:
    name = fine_tuned_model_name(BASE, story.account_id, story.job_that_succeeds())
    batch_id = story.create_batch()
    plan(story, batch_id, first_lines={name: 1})
    found = batch(story, batch_id).plan
    assert found is not None
    assert found.adapters == (story.of(FineTunedModel, name).adapter,)


def test_faults_end_a_batch_that_held_nothing_and_let_go_of_its_file(story: MemoryStory) -> None:
    batch_id = story.create_batch()
    fault = LineError(code="invalid_json_line", message="Line 1: no.", param=None, line=1)
    story.run(batches.fail_batch, batches.FailBatch(batch_id, (fault,)))
    failed = batch(story, batch_id)
    assert failed.status == "failed"
    assert story.of(File, failed.input_file_id).pins == []
    assert money(story) == UNTOUCHED
    before = story.position
    story.run(batches.fail_batch, batches.FailBatch(batch_id, (fault,)))
    plan(story, batch_id)
    story.start(batch_id)
    assert story.position == before


# Starting


def test_starting_holds_the_maximum_until_an_hour_after_the_window(story: MemoryStory) -> None:
    batch_id = started(story, window="72h")
    found = batch(story, batch_id)
    hold = story.of(CreditHold, hold_id(batch_id))
    assert (found.status, hold.maximum_nano_usd) == ("in_progress", MAXIMUM)
    assert found.expires_at == story.clock.now() + timedelta(hours=72)
    assert hold.expires_at == found.expires_at + timedelta(hours=1)
    assert money(story) == {
        "available": nano_usd("25") - MAXIMUM,
        "held": MAXIMUM,
        "charged": 0,
    }
    before = story.position
    story.start(batch_id)
    assert story.position == before


@pytest.mark.parametrize(("missing_nano_usd", "status"), [(0, "in_progress"), (1, "failed")])
def test_credit_that_suffices_exactly_starts_a_batch_and_one_nano_less_does_not(
    story: MemoryStory, missing_nano_usd: int, status: str
) -> None:
    story.account_id, story.key_id = story.open_account_with(MAXIMUM - missing_nano_usd)
    batch_id = started(story)
    assert batch(story, batch_id).status == status
    if missing_nano_usd:
        (error,) = story.last(Batch.Failed).errors
        assert (error.code, error.line) == ("insufficient_quota", None)


def test_a_batch_waits_for_credit_that_the_accounts_own_holds_may_give_back(
    story: MemoryStory,
) -> None:
    story.account_id, story.key_id = story.open_account_with(MAXIMUM + 1)
    first, second = started(story), started(story)
    assert batch(story, second).waiting_for == "customer_credit"
    cancel(story, first)
    story.finish_batch(first, completed=0, failed=8)
    story.start(second)
    assert batch(story, second).status == "in_progress"


# Ending, and what it costs


def test_a_batch_that_completes_costs_all_its_tokens_rounded_up_once(story: MemoryStory) -> None:
    batch_id = started(story, prices=publish_odd_rates(story))
    tokens = ((1_001, 13), (501, 7))
    for chunk, used in enumerate(tokens):
        answer(story, story.assign(batch_id, chunk), tokens=used)
    story.finish_batch(batch_id, completed=8, failed=0)

    receipt = receipt_of(story, batch_id)
    whole, rest = divmod(1_502 * INPUT_RATE + 20 * OUTPUT_RATE, 1_000_000)
    assert rest
    assert receipt.charge_nano_usd == whole + 1
    assert [(line.what, line.tokens) for line in receipt.lines] == [
        ("input", 1_502),
        ("output", 20),
    ]
    assert money(story) == charged(whole + 1)
    assert story.of(KeySpend, story.key_id).total_nano_usd == whole + 1
    assert story.of(CreditHold, hold_id(batch_id)).captured_nano_usd == whole + 1
    assert story.of(Account, story.account_id).open_batches == []


def test_a_batch_is_charged_at_the_prices_of_its_create(story: MemoryStory) -> None:
    batch_id = started(story, prices=publish_odd_rates(story))
    publish_odd_rates(story, version=3, times=10)
    for chunk in (0, 1):
        answer(story, story.assign(batch_id, chunk), tokens=(1_000, 0))
    story.finish_batch(batch_id, completed=8, failed=0)
    assert receipt_of(story, batch_id).price_version == 2
    assert receipt_of(story, batch_id).charge_nano_usd == 2_000 * INPUT_RATE // 1_000_000 + 1


def test_a_batch_costs_at_least_the_minimum_and_at_most_what_was_held(story: MemoryStory) -> None:
    small, large = started(story), started(story)
    for batch_id, tokens in ((small, (10, 1)), (large, (490_000_000, 1))):
        for chunk in (0, 1):
            answer(story, story.assign(batch_id, chunk), tokens=tokens)
        story.finish_batch(batch_id, completed=8, failed=0)
    assert receipt_of(story, small).charge_nano_usd == MINIMUM
    assert receipt_of(story, small).decided_by == "minimum"
    assert receipt_of(story, large).charge_nano_usd == MAXIMUM
    assert receipt_of(story, large).decided_by == "maximum"


def test_a_receipt_names_the_digest_of_the_file_that_the_batch_read(story: MemoryStory) -> None:
    batch_id = started(story)
    story.store_file("batch")
    for chunk in (0, 1):
        answer(story, story.assign(batch_id, chunk), tokens=(10, 1))
    story.finish_batch(batch_id, completed=8, failed=0)
    file = story.of(File, batch(story, batch_id).input_file_id)
    assert receipt_of(story, batch_id).input_sha256 == (file.object.sha256,)


def test_a_batch_without_a_line_that_succeeded_costs_nothing(story: MemoryStory) -> None:
    batch_id = started(story)
    for chunk in (0, 1):
        answer(story, story.assign(batch_id, chunk), tokens=(10, 0), failed=LINES_PER_CHUNK)
    story.finish_batch(batch_id, completed=0, failed=8)
    found = batch(story, batch_id)
    assert (found.status, found.receipt) == ("completed", None)
    assert money(story) == UNTOUCHED
    assert story.of(CreditHold, hold_id(batch_id)).state == "released"


def test_a_batch_past_its_window_costs_what_finished_without_the_minimum(
    story: MemoryStory,
) -> None:
    batch_id = started(story)
    answer(story, story.assign(batch_id, 0), tokens=(100, 10))
    end_window(story, batch_id)
    story.finish_batch(batch_id, completed=4, failed=4)
    receipt = receipt_of(story, batch_id)
    assert batch(story, batch_id).status == "expired"
    assert not receipt.minimum_applies
    assert receipt.charge_nano_usd == 100 * 5 + 10 * 10 < MINIMUM


@pytest.mark.parametrize("answered", [0, 1])
def test_a_batch_that_is_cancelled_costs_what_finished(story: MemoryStory, answered: int) -> None:
    batch_id = started(story)
    for chunk in range(answered):
        answer(story, story.assign(batch_id, chunk), tokens=(100, 10))
    cancel(story, batch_id)
    assert batch(story, batch_id).status == "cancelling"
    story.finish_batch(batch_id, completed=4 * answered, failed=8 - 4 * answered)
    assert batch(story, batch_id).status == "cancelled"
    assert money(story) == charged(600 * answered)


@pytest.mark.parametrize(("succeeded", "applies"), [(7, False), (8, True)])
def test_a_batch_cancelled_as_good_as_complete_costs_the_minimum(
    story: MemoryStory, succeeded: int, applies: bool
) -> None:
    batch_id = started(story)
    answer(story, story.assign(batch_id, 0), tokens=(10, 1))
    last = story.assign(batch_id, 1)
    cancel(story, batch_id)
    answer(story, last, tokens=(10, 1), failed=8 - succeeded)
    story.finish_batch(batch_id, completed=succeeded, failed=8 - succeeded)
    receipt = receipt_of(story, batch_id)
    assert receipt.minimum_applies is applies
    assert receipt.charge_nano_usd == (MINIMUM if applies else 2 * (10 * 5 + 10))


def test_finishing_twice_is_finishing_once(story: MemoryStory) -> None:
    batch_id = started(story)
    for chunk in (0, 1):
        answer(story, story.assign(batch_id, chunk), tokens=(10, 1))
    story.finish_batch(batch_id, completed=8, failed=0)
    before = story.position
    story.finish_batch(batch_id, completed=8, failed=0)
    assert story.position == before


def test_result_files_are_the_accounts_and_expire(story: MemoryStory) -> None:
    batch_id = started(story)
    answer(story, story.assign(batch_id, 0), tokens=(10, 1))
    answer(story, story.assign(batch_id, 1), tokens=(10, 1), failed=1)
    story.finish_batch(batch_id, completed=7, failed=1)
    for role in ("output", "error"):
        file = story.of(File, derived_file_id(batch_id, role))
        assert (file.account_id, file.purpose) == (story.account_id, "batch_output")
        assert file.expires_at == story.clock.now() + timedelta(days=30)


# Cancelling and time


def test_a_batch_that_ended_cannot_be_cancelled(story: MemoryStory) -> None:
    batch_id = story.batch_that_completes()
    with pytest.raises(InvalidState, match="completed"):
        cancel(story, batch_id)


def test_cancelling_twice_changes_nothing_more(story: MemoryStory) -> None:
    batch_id = started(story)
    story.assign(batch_id, 0)
    cancel(story, batch_id)
    at = batch(story, batch_id).ending_since
    story.clock.advance(timedelta(seconds=5))
    cancel(story, batch_id)
    assert batch(story, batch_id).ending_since == at


def test_another_accounts_batch_cannot_be_cancelled(story: MemoryStory) -> None:
    batch_id = started(story)
    stranger, _ = story.open_account("other@example.com")
    with pytest.raises(NotFound):
        story.run(batches.cancel_batch, batches.CancelBatch(stranger, batch_id))
    assert batch(story, batch_id).status == "in_progress"


def test_a_window_ends_at_its_end_and_not_before(story: MemoryStory) -> None:
    batch_id = started(story)
    ends = batch(story, batch_id).expires_at
    story.clock.advance(ends - story.clock.now() - timedelta(seconds=1))
    before = story.position
    story.run(work.expire_work, work.ExpireWork(batch_id))
    assert story.position == before
    story.clock.advance(timedelta(seconds=1))
    story.run(work.expire_work, work.ExpireWork(batch_id))
    assert batch(story, batch_id).may_finalize


@pytest.mark.parametrize("short", [0, 1])
def test_an_attempt_that_does_not_stop_in_time_is_given_up(story: MemoryStory, short: int) -> None:
    batch_id = started(story)
    attempt = story.assign(batch_id, 0)
    cancel(story, batch_id)
    assert not batch(story, batch_id).may_finalize
    story.clock.advance(STOP_WITHIN - timedelta(seconds=short))
    story.run(batches.stop_waiting, batches.StopWaiting(batch_id))
    assert batch(story, batch_id).may_finalize is (short == 0)
    if short == 0:
        before = story.position
        answer(story, attempt, tokens=(10, 1))
        assert story.position == before


# Chunks


def test_a_chunk_that_always_fails_is_abandoned_and_its_batch_ends(story: MemoryStory) -> None:
    batch_id = started(story)
    answer(story, story.assign(batch_id, 1), tokens=(10, 1))
    for _ in range(CHUNK_FAILURES_MAX):
        assert batch(story, batch_id).chunks[0].state == "pending"
        story.report(story.assign(batch_id, 0), AttemptFailed(code="engine_failed", message="x"))
    assert batch(story, batch_id).chunks[0].state == "abandoned"
    assert batch(story, batch_id).may_finalize


def test_losses_say_little_about_a_chunk_and_are_bounded_all_the_same(story: MemoryStory) -> None:
    batch_id = started(story)
    for number in range(CHUNK_LOSSES_MAX):
        story.lose(story.assign(batch_id, 0, runner_id=f"runner_{number}"))
    assert batch(story, batch_id).chunks[0].state == "abandoned"
    assert CHUNK_LOSSES_MAX > CHUNK_FAILURES_MAX


def test_a_chunk_counts_once_whoever_reports_it_again(story: MemoryStory) -> None:
    batch_id = started(story)
    first = story.assign(batch_id, 0, runner_id="runner_a")
    story.lose(first)
    second = story.assign(batch_id, 0, runner_id="runner_b")
    answer(story, second, tokens=(10, 1))
    before = story.position
    answer(story, first, tokens=(99, 9))
    answer(story, second, tokens=(99, 9))
    assert story.position == before
    assert [each.input_tokens for each in batch(story, batch_id).usage()] == [10]


def test_counts_of_a_running_chunk_never_fall(story: MemoryStory) -> None:
    batch_id = started(story)
    attempt = story.assign(batch_id, 0)
    for completed in (2, 1, 2):
        story.report(attempt, ChunkProgress(completed=completed, failed=0))
    assert batch(story, batch_id).chunks[0].completed == 2


def test_a_chunk_is_not_assigned_twice_nor_after_the_end(story: MemoryStory) -> None:
    batch_id = started(story)
    story.assign(batch_id, 0)
    again = work.AssignWork(batch_id, 0, "runner_b")
    assert story.run(work.assign_work, again) is None
    cancel(story, batch_id)
    assert story.run(work.assign_work, work.AssignWork(batch_id, 1, "runner_b")) is None


def test_a_result_that_the_store_lost_is_lost_only_after_the_hold_ends(story: MemoryStory) -> None:
    batch_id = started(story)
    for chunk in (0, 1):
        answer(story, story.assign(batch_id, chunk), tokens=(100, 10))
    key = f"chunks/{batch_id}/0/1/output.jsonl"
    before = story.position
    story.run(batches.lose_result, batches.LoseResult(batch_id, key))
    assert story.position == before
    story.clock.advance(batch(story, batch_id).expires_at + timedelta(hours=1) - story.clock.now())
    story.run(batches.lose_result, batches.LoseResult(batch_id, key))
    assert [each.input_tokens for each in batch(story, batch_id).usage()] == [100]
    story.run(batches.lose_result, batches.LoseResult(batch_id, key))
    story.finish_batch(batch_id, completed=4, failed=4)
    assert receipt_of(story, batch_id).lines[0].tokens == 100
