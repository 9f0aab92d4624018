"""A job's commands: what starts it, what ends it, and what each end costs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from domain.assets.file import File
from domain.assets.fine_tuned_model import FineTunedModel
from domain.commands import prices as price_commands
from domain.commands import work
from domain.commands.fine_tuning import CancelFineTuningJob, cancel_fine_tuning_job
from domain.errors import InvalidState, NotFound
from domain.ids import fine_tuned_model_name, hold_id
from domain.ledger.account import Account
from domain.ledger.credit_hold import CreditHold
from domain.ledger.key_spend import KeySpend
from domain.ledger.money import nano_usd
from domain.log.stored import Attempt
from domain.messages import AttemptFailed, Started, TrainCancelled, TrainProgress
from domain.work.fine_tuning_job import STARTS_MAX, FineTuningJob
from domain.work.job_errors import SIDES
from tests.integration.product_rig import BASE, PRICES, MemoryStory, train_finished

RATE = 50_123_457
"""Nano-USD per million tokens: no count of tokens below comes to whole nano-USD."""
THREE_EPOCHS = {"hyperparameters": {"n_epochs": 3}}
"""A maximum well above the minimum."""
NOTHING_RUNS = {"available": nano_usd("25"), "held": 0, "charged": 0}


def publish(story: MemoryStory, rate: int, *, version: int = 2) -> None:
    of_base = PRICES.models[BASE].model_copy(update={"training_nano_usd_per_mtok": rate})
    prices = PRICES.model_copy(
        update={
            "version": version,
            "models": {**PRICES.models, BASE: of_base},
            "effective_from": story.clock.now(),
        }
    )
    story.run(price_commands.publish_prices, price_commands.PublishPrices(prices=prices))


def charge_for(tokens: int, rate: int = RATE) -> int:
    whole, rest = divmod(tokens * rate, 1_000_000)
    return whole + (rest > 0)


def running(story: MemoryStory, **fields: Any) -> Attempt:
    """A job that has begun to train."""
    job_id = story.create_job(**fields)
    story.start(job_id)
    attempt = story.assign(job_id)
    story.report(attempt, Started())
    return attempt


def job(story: MemoryStory, job_id: str) -> FineTuningJob:
    return story.of(FineTuningJob, job_id)


def money(story: MemoryStory) -> dict[str, int]:
    account = story.of(Account, story.account_id)
    return {
        "available": account.available_nano_usd,
        "held": account.held_nano_usd,
        "charged": account.charged_nano_usd,
    }


def spend(story: MemoryStory) -> int:
    return story.of(KeySpend, story.key_id).total_nano_usd


def charged(nano: int) -> dict[str, int]:
    return {"available": nano_usd("25") - nano, "held": 0, "charged": nano}


def slots(story: MemoryStory) -> tuple[list[str], str | None, int]:
    account = story.of(Account, story.account_id)
    return account.open_fine_tunes, account.training_job_id, account.models


# Starting


def test_starting_holds_the_maximum_and_takes_the_training_slot(story: MemoryStory) -> None:
    job_id = story.create_job(**THREE_EPOCHS)
    maximum = job(story, job_id).settings.quote.maximum_nano_usd

    story.start(job_id)

    assert job(story, job_id).status == "queued"
    assert money(story) == {
        "available": nano_usd("25") - maximum,
        "held": maximum,
        "charged": 0,
    }
    hold = story.of(CreditHold, hold_id(job_id))
    assert (hold.maximum_nano_usd, hold.price_version, hold.state) == (maximum, 1, "placed")
    assert spend(story) == maximum
    assert slots(story) == ([job_id], job_id, 0)


def test_starting_twice_is_starting_once(story: MemoryStory) -> None:
    job_id = story.create_job()
    story.start(job_id)
    before = story.position
    story.start(job_id)
    assert story.position == before


@pytest.mark.parametrize(("missing_nano_usd", "status"), [(0, "queued"), (1, "failed")])
def test_credit_that_suffices_exactly_starts_a_job_and_one_nano_less_does_not(
    story: MemoryStory, missing_nano_usd: int, status: str
) -> None:
    maximum = PRICES.models[BASE].minimum_per_job_nano_usd
    credit = maximum - missing_nano_usd
    story.account_id, story.key_id = story.open_account_with(credit)
    job_id = story.create_job()

    story.start(job_id)

    found = job(story, job_id)
    assert found.settings.quote.maximum_nano_usd == maximum
    assert found.status == status
    if missing_nano_usd:
        assert (money(story), slots(story)) == (
            {"available": credit, "held": 0, "charged": 0},
            ([], None, 0),
        )
        assert story.last(FineTuningJob.Failed).code == "insufficient_quota"
    else:
        assert money(story) == {"available": 0, "held": maximum, "charged": 0}


def test_a_job_waits_for_credit_that_the_accounts_own_holds_may_give_back(
    story: MemoryStory,
) -> None:
    minimum = PRICES.models[BASE].minimum_per_job_nano_usd
    story.account_id, story.key_id = story.open_account_with(minimum + 1)
    batch_id = story.create_batch()
    story.validate(batch_id, maximum_usd="0.04")
    story.start(batch_id)
    job_id = story.create_job()

    story.start(job_id)
    assert job(story, job_id).waiting_for == "customer_credit"
    said = story.position
    story.start(job_id)
    assert story.position == said

    story.finish_chunk(story.assign(batch_id, 0), failed=4)
    story.finish_chunk(story.assign(batch_id, 1), failed=4)
    story.finish_batch(batch_id, completed=0, failed=8)
    story.start(job_id)
    assert (job(story, job_id).status, job(story, job_id).waiting_for) == ("queued", None)


def test_one_training_at_a_time_and_the_next_one_starts_when_it_ends(story: MemoryStory) -> None:
    first = running(story)
    second = story.create_job()

    story.start(second)
    assert job(story, second).waiting_for == "account_capacity"

    story.report(first, train_finished(first.work_id))
    story.start(second)
    assert job(story, second).status == "queued"


@pytest.mark.parametrize(("short", "status"), [(1, "validating_files"), (0, "failed")])
def test_a_job_waits_for_its_account_for_a_day(story: MemoryStory, short: int, status: str) -> None:
    running(story)
    waiting = story.create_job()
    story.clock.advance(timedelta(days=1) - timedelta(seconds=short))
    story.start(waiting)
    assert job(story, waiting).status == status
    if status == "failed":
        failed = story.last(FineTuningJob.Failed)
        assert (failed.code, failed.receipt) == ("job_unavailable", None)
        assert waiting not in slots(story)[0]


# Succeeding


def test_a_job_that_succeeds_costs_its_tokens_rounded_up_once(story: MemoryStory) -> None:
    publish(story, RATE)
    attempt = running(story, **THREE_EPOCHS)
    tokens = 1_000_003
    assert tokens * RATE % 1_000_000

    story.report(attempt, train_finished(attempt.work_id, trained_tokens=tokens))

    done = job(story, attempt.work_id)
    assert done.status == "succeeded"
    receipt = done.receipt
    assert receipt is not None
    assert receipt.charge_nano_usd == charge_for(tokens)
    assert receipt.decided_by == "tokens"
    assert (receipt.ended, receipt.code, receipt.side) == ("succeeded", None, None)
    (line,) = receipt.lines
    assert (line.what, line.tokens, line.rate_nano_usd_per_mtok) == ("training", tokens, RATE)
    assert receipt.returned_nano_usd == receipt.maximum_nano_usd - receipt.charge_nano_usd
    assert money(story) == charged(receipt.charge_nano_usd)
    assert spend(story) == receipt.charge_nano_usd
    assert slots(story) == ([], None, 1)
    hold = story.of(CreditHold, hold_id(attempt.work_id))
    assert (hold.state, hold.captured_nano_usd) == ("captured", receipt.charge_nano_usd)


def test_a_small_job_costs_the_minimum_and_a_large_one_no_more_than_its_quote(
    story: MemoryStory,
) -> None:
    small = running(story, **THREE_EPOCHS)
    story.report(small, train_finished(small.work_id, trained_tokens=10))
    receipt = job(story, small.work_id).receipt
    assert receipt is not None
    assert receipt.charge_nano_usd == PRICES.models[BASE].minimum_per_job_nano_usd
    assert receipt.decided_by == "minimum"

    large = running(story, **THREE_EPOCHS)
    quote = job(story, large.work_id).settings.quote
    most = quote.training_tokens_upper_bound
    story.report(large, train_finished(large.work_id, trained_tokens=most))
    receipt = job(story, large.work_id).receipt
    assert receipt is not None
    assert (receipt.charge_nano_usd, receipt.returned_nano_usd) == (quote.maximum_nano_usd, 0)

    larger = running(story, **THREE_EPOCHS)
    story.report(larger, train_finished(larger.work_id, trained_tokens=most + 1))
    receipt = job(story, larger.work_id).receipt
    assert receipt is not None
    assert receipt.charge_nano_usd == quote.maximum_nano_usd
    assert receipt.decided_by == "maximum"

    beyond = running(story, **THREE_EPOCHS)
    story.report(beyond, train_finished(beyond.work_id, trained_tokens=2 * most + 1))
    assert job(story, beyond.work_id).status == "failed"
    assert job(story, beyond.work_id).receipt is None


def test_a_job_is_charged_at_the_prices_that_its_quote_pinned(story: MemoryStory) -> None:
    publish(story, RATE)
    attempt = running(story, **THREE_EPOCHS)
    publish(story, 10 * RATE, version=3)

    story.report(attempt, train_finished(attempt.work_id, trained_tokens=1_000_003))

    receipt = job(story, attempt.work_id).receipt
    assert receipt is not None
    assert (receipt.price_version, receipt.charge_nano_usd) == (2, charge_for(1_000_003))


def test_a_receipt_names_the_digests_of_the_files_that_the_job_trained_on(
    story: MemoryStory,
) -> None:
    validation = story.store_file("fine-tune")
    attempt = running(story, validation_file=validation)
    settings = job(story, attempt.work_id).settings
    story.store_file("fine-tune")

    story.report(attempt, train_finished(attempt.work_id))

    receipt = job(story, attempt.work_id).receipt
    assert receipt is not None
    assert settings.validation is not None
    assert receipt.input_sha256 == (
        story.of(File, settings.training.file_id).object.sha256,
        story.of(File, validation).object.sha256,
    )
    assert len(set(receipt.input_sha256)) == 2


def test_a_job_that_succeeds_registers_its_model_under_its_own_name(story: MemoryStory) -> None:
    attempt = running(story, hyperparameters={"lora_rank": 8})
    story.report(attempt, train_finished(attempt.work_id))
    model = story.of(FineTunedModel, fine_tuned_model_name(BASE, story.account_id, attempt.work_id))
    assert (model.account_id, model.job_id, model.base) == (
        story.account_id,
        attempt.work_id,
        BASE,
    )
    assert (model.rank, model.servable, model.deleted) == (8, True, False)
    assert model.weights.key == f"adapters/{attempt.work_id}/1/adapter_model.safetensors"


def test_an_end_lets_go_of_the_files(story: MemoryStory) -> None:
    attempt = running(story)
    file_id = job(story, attempt.work_id).settings.training.file_id
    assert story.of(File, file_id).pins == [attempt.work_id]
    story.report(attempt, train_finished(attempt.work_id))
    assert story.of(File, file_id).pins == []


# Failing


@pytest.mark.parametrize("code", [code for code, side in SIDES.items() if side == "customer"])
def test_a_failure_on_the_customers_side_after_training_began_costs_its_tokens(
    story: MemoryStory, code: str
) -> None:
    publish(story, RATE)
    attempt = running(story, **THREE_EPOCHS)
    story.report(attempt, AttemptFailed(code=code, message="So.", trained_tokens=1_003))

    failed = job(story, attempt.work_id)
    assert failed.receipt is not None
    assert failed.receipt.charge_nano_usd == charge_for(1_003)
    assert not failed.receipt.minimum_applies
    assert (failed.receipt.ended, failed.receipt.code) == ("failed", code)
    assert failed.receipt.side == "customer"
    assert money(story) == charged(charge_for(1_003))
    assert slots(story) == ([], None, 0)


@pytest.mark.parametrize("code", [*(c for c, s in SIDES.items() if s == "platform"), "unheard_of"])
def test_a_failure_on_the_platforms_side_costs_nothing(story: MemoryStory, code: str) -> None:
    attempt = running(story, **THREE_EPOCHS)
    story.report(attempt, AttemptFailed(code=code, message="So.", trained_tokens=1_003))

    failed = job(story, attempt.work_id)
    assert (failed.status, failed.receipt) == ("failed", None)
    assert story.last(FineTuningJob.Failed).side == "platform"
    assert money(story) == NOTHING_RUNS
    assert spend(story) == 0
    assert story.of(CreditHold, hold_id(attempt.work_id)).state == "released"
    assert slots(story) == ([], None, 0)


def test_a_failure_on_the_customers_side_that_trained_nothing_costs_nothing(
    story: MemoryStory,
) -> None:
    attempt = running(story)
    story.report(attempt, AttemptFailed(code="context_too_long", message="So."))
    assert job(story, attempt.work_id).receipt is None
    assert money(story) == NOTHING_RUNS


# Cancelling


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_that_is_cancelled_costs_nothing_whatever_it_trained(
    story: MemoryStory, begun: bool
) -> None:
    job_id = story.create_job()
    if begun:
        story.start(job_id)
        attempt = story.assign(job_id)
        story.report(attempt, TrainProgress(step=1, steps=2, trained_tokens=500, train_loss=1.0))

    story.run(cancel_fine_tuning_job, CancelFineTuningJob(story.account_id, job_id))

    cancelled = job(story, job_id)
    assert (cancelled.status, cancelled.receipt) == ("cancelled", None)
    assert money(story) == NOTHING_RUNS
    assert slots(story) == ([], None, 0)
    with pytest.raises(InvalidState, match="cancelled"):
        story.run(cancel_fine_tuning_job, CancelFineTuningJob(story.account_id, job_id))
    if begun:
        before = story.position
        story.report(attempt, train_finished(job_id))
        story.report(attempt, TrainCancelled(trained_tokens=700))
        assert story.position == before


def test_another_accounts_job_cannot_be_cancelled(story: MemoryStory) -> None:
    job_id = story.create_job()
    stranger, _ = story.open_account("other@example.com")
    with pytest.raises(NotFound):
        story.run(cancel_fine_tuning_job, CancelFineTuningJob(stranger, job_id))
    assert job(story, job_id).status == "validating_files"


# Runners


def test_an_attempt_that_never_began_is_made_again_a_bounded_number_of_times(
    story: MemoryStory,
) -> None:
    job_id = story.create_job()
    story.start(job_id)
    for number in range(1, STARTS_MAX):
        story.lose(story.assign(job_id, runner_id=f"runner_{number}"))
        assert job(story, job_id).may_assign
    story.lose(story.assign(job_id))
    assert story.last(FineTuningJob.Failed).code == "job_unavailable"
    assert money(story) == NOTHING_RUNS


def test_a_training_whose_runner_is_lost_is_not_tried_again(story: MemoryStory) -> None:
    attempt = running(story)
    story.lose(attempt)
    assert story.last(FineTuningJob.Failed).code == "platform_interrupted"
    assert money(story) == NOTHING_RUNS


def test_a_runner_that_does_not_take_a_training_that_began_is_left_to_the_deadline(
    story: MemoryStory,
) -> None:
    attempt = running(story)
    before = story.position
    story.run(work.give_attempt_back, work.LoseAttempt(attempt))
    assert story.position == before


def test_what_an_older_attempt_reports_changes_nothing(story: MemoryStory) -> None:
    job_id = story.create_job()
    story.start(job_id)
    old = story.assign(job_id, runner_id="runner_a")
    story.lose(old)
    story.assign(job_id, runner_id="runner_b")
    before = story.position
    story.report(old, train_finished(job_id))
    story.lose(old)
    assert story.position == before


def test_progress_never_falls(story: MemoryStory) -> None:
    attempt = running(story)
    for step, tokens in ((2, 200), (1, 100), (2, 900)):
        story.report(
            attempt, TrainProgress(step=step, steps=9, trained_tokens=tokens, train_loss=1.0)
        )
    found = job(story, attempt.work_id)
    assert (found.step, found.trained_tokens) == (2, 200)


# Time


@pytest.mark.parametrize("short", [0, 1])
def test_a_queued_job_is_given_up_after_a_day_without_a_gpu(story: MemoryStory, short: int) -> None:
    job_id = story.create_job()
    story.start(job_id)
    story.clock.advance(timedelta(days=1) - timedelta(seconds=short))
    story.run(work.expire_work, work.ExpireWork(job_id))
    assert job(story, job_id).status == ("queued" if short else "failed")
    if not short:
        assert story.last(FineTuningJob.Failed).code == "job_unavailable"
        assert money(story) == NOTHING_RUNS


def test_a_training_past_its_deadline_ends_and_costs_nothing(story: MemoryStory) -> None:
    attempt = running(story)
    deadline = job(story, attempt.work_id).deadline
    assert deadline is not None
    story.clock.advance(deadline - story.clock.now() - timedelta(seconds=1))
    story.run(work.expire_work, work.ExpireWork(attempt.work_id))
    assert job(story, attempt.work_id).status == "running"
    story.clock.advance(timedelta(seconds=1))
    story.run(work.expire_work, work.ExpireWork(attempt.work_id))
    assert story.last(FineTuningJob.Failed).code == "job_expired"
    assert money(story) == NOTHING_RUNS


def test_a_hold_that_is_released_after_its_end_says_that_it_expired(story: MemoryStory) -> None:
    attempt = running(story)
    ends = story.of(CreditHold, hold_id(attempt.work_id)).expires_at
    story.clock.advance(ends - story.clock.now())
    story.lose(attempt)
    assert story.of(CreditHold, hold_id(attempt.work_id)).state == "expired"
    assert money(story) == NOTHING_RUNS
