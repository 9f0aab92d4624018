"""Many creates at once against one account's credit and slots, with the worker deciding beside the
API."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI
from openai.types import Batch

from domain.ids import hold_id
from domain.ledger.money import usd_text
from tests.chaos.instance import (
    BATCH_ENDED,
    JOB_ENDED,
    Instance,
    chat_lines,
    chat_rows,
    create_batch,
    create_training,
    until,
)

AT_ONCE = 50
ROUNDS = 4
LINES = chat_lines(6, text="hello echo-delay-ms=400")


def hold_of_one(instance: Instance) -> int:
    """What a batch of these lines holds, in nano-USD."""
    account = instance.open_account()
    with instance.client(account) as client:
        batch_id = create_batch(client, LINES)
        placed = until(lambda: instance.named(hold_id(batch_id), "Placed"), "the hold is placed")
        client.batches.cancel(batch_id)
    return int(placed[0][1].maximum_nano_usd)


def statuses(client: OpenAI) -> list[Batch]:
    return list(client.batches.list(limit=100))


def test_fifty_creates_at_once_never_hold_more_than_the_credit_for_one(instance: Instance) -> None:
    instance.ensure_running()
    maximum = hold_of_one(instance)
    account = instance.open_account(credit_usd=usd_text(maximum), open_batches=AT_ONCE + 10)
    with instance.client(account) as client, ThreadPoolExecutor(AT_ONCE) as threads:
        file = client.files.create(file=("lines.jsonl", LINES), purpose="batch")

        def create(number: int) -> str:
            return client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata={"number": str(number)},
            ).id

        created = list(threads.map(create, range(AT_ONCE)))
        assert len(set(created)) == AT_ONCE
        until(
            lambda: all(each.status in BATCH_ENDED for each in statuses(client)), "every one ends"
        )
        ended = statuses(client)

    assert sorted(each.id for each in ended) == sorted(created)
    (ran,) = (each for each in ended if each.status == "completed")
    refused = [each for each in ended if each.status == "failed"]
    assert len(refused) == AT_ONCE - 1
    for each in refused:
        assert each.errors is not None
        assert each.errors.data is not None
        assert [error.code for error in each.errors.data] == ["insufficient_quota"]
        assert instance.events(hold_id(each.id)) == []
    waited = {
        event.waiting_for for each in refused for _, event in instance.named(each.id, "Waiting")
    }
    assert waited == {"customer_credit"}
    assert_credit_covers_holds_at_every_moment(instance, account.account_id)
    assert set(instance.account(account).holds_nano_usd) == set()
    assert instance.account(account).charged_nano_usd > 0
    assert instance.events(hold_id(ran.id)) != []
    assert instance.audit_differences() == ()


def assert_credit_covers_holds_at_every_moment(instance: Instance, account_id: str) -> None:
    """Sums grants, and holds as their own streams tell of them, through the log."""
    credit, held = 0, dict[str, int]()
    for _, event in instance.events():
        kind = type(event).__qualname__
        if kind == "Account.CreditGranted" and event.originator_id == account_id:
            credit += event.amount_nano_usd
        elif kind == "CreditHold.Placed" and event.account_id == account_id:
            held[event.originator_id] = event.maximum_nano_usd
        elif kind.startswith("CreditHold.") and event.originator_id in held:
            credit -= event.charge_nano_usd if kind.endswith("Captured") else 0
            del held[event.originator_id]
        assert sum(held.values()) <= credit


def batch_from_create_to_end(client: OpenAI) -> str:
    batch_id = create_batch(client, chat_lines(1, text="hello"))
    until(lambda: client.batches.retrieve(batch_id).status in BATCH_ENDED, "the batch ends")
    return client.batches.retrieve(batch_id).status


def training_from_create_to_end(client: OpenAI) -> str:
    job_id = create_training(client, chat_rows(11, text="Where? echo-step-ms=1"))
    until(lambda: client.fine_tuning.jobs.retrieve(job_id).status in JOB_ENDED, "the job ends")
    return client.fine_tuning.jobs.retrieve(job_id).status


@pytest.mark.parametrize(
    ("run_one", "good_end"),
    [(batch_from_create_to_end, "completed"), (training_from_create_to_end, "succeeded")],
    ids=["batch", "training"],
)
def test_a_slot_that_the_worker_freed_is_free_for_the_next_create(
    instance: Instance, run_one: Callable[[OpenAI], str], good_end: str
) -> None:
    instance.ensure_running()
    account = instance.open_account(open_batches=1, open_fine_tunes=1)
    with instance.client(account) as client:
        assert [run_one(client) for _ in range(ROUNDS)] == [good_end] * ROUNDS
    assert instance.audit_differences() == ()
