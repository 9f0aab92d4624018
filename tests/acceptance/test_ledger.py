"""What the books answer over HTTP: credit, prices, receipts and statements."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from domain.commands.prices import PublishPrices, publish_prices
from domain.ledger.prices import PriceList
from tests.acceptance.conftest import PRICES, Served
from tests.acceptance.stand_in_worker import BASE, finish, follow, run_batch, succeed_training
from tests.acceptance.training_files import chat_file

LEDGER = "/openai/v1/gridline"


def _job(served: Served) -> str:
    client = served.openai()
    file = client.files.create(file=chat_file(), purpose="fine-tune")
    return client.fine_tuning.jobs.create(model=BASE, training_file=file.id).id


def _batch(served: Served) -> str:
    client = served.openai()
    file = client.files.create(file=b"{}\n" * 3, purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id


def test_what_is_held_is_the_sum_of_the_holds_in_every_answer(served: Served) -> None:
    batches = [_batch(served) for _ in range(5)]

    def move(batch_id: str) -> None:
        run_batch(served, batch_id, requests=3)
        finish(served, batch_id, output=b"{}\n{}\n", errors=b"{}\n")

    with ThreadPoolExecutor(1) as threads, served.http() as http:
        moving = threads.submit(lambda: [move(batch_id) for batch_id in batches])
        looks = 0
        while not moving.done() or looks < 20:
            credit = http.get(f"{LEDGER}/credits").json()
            held = sum(Decimal(hold["maximum_usd"]) for hold in credit["holds"])
            assert Decimal(credit["held_usd"]) == held
            looks += 1
        moving.result()


def _wire(prices: PriceList) -> object:
    return json.loads(json.dumps(prices.to_wire()))


def test_every_price_list_that_was_published_can_be_read(served: Served) -> None:
    first = PriceList.from_json(PRICES.read_bytes())
    later = first.model_copy(
        update={"version": 2, "effective_from": datetime.now(UTC) + timedelta(days=30)}
    )
    served.run(publish_prices, PublishPrices(later))
    with served.http() as http:
        in_force = http.get(f"{LEDGER}/prices").json()
        assert in_force == http.get(f"{LEDGER}/prices?version=1").json() == _wire(first)
        assert http.get(f"{LEDGER}/prices?version=2").json() == _wire(later)
        assert http.get(f"{LEDGER}/prices?version=").json() == in_force
        for version, status in (("3", 404), ("0", 404), ("x", 400), ("9" * 30, 400), ("-1", 400)):
            answer = http.get(f"{LEDGER}/prices?version={version}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, "version")
    job = _job(served)
    with served.http() as http:
        assert http.get(f"{LEDGER}/receipts/{job}").json()["price_version"] == 1


def test_a_receipt_says_where_its_charge_stands_in_the_statement(served: Served) -> None:
    job, batch = _job(served), _batch(served)
    succeed_training(served, job)
    run_batch(served, batch, requests=3)
    finish(served, batch, output=b"{}\n{}\n", errors=b"{}\n")
    waiting = _job(served)
    follow(served)
    with served.http() as http:
        statement = http.get(f"{LEDGER}/statement").json()
        assert statement["is_current"]
        for work_id in (job, batch):
            receipt = http.get(f"{LEDGER}/receipts/{work_id}").json()
            [line] = [
                line
                for line in statement["data"]
                if line["position"] == receipt["statement_position"]
            ]
            assert (line["work_id"], line["kind"]) == (work_id, "charge")
            assert line["charged_usd"] == receipt["charge_usd"] != "0.00"
        assert http.get(f"{LEDGER}/receipts/{waiting}").json()["statement_position"] is None


def test_a_statement_goes_on_from_its_end_and_from_nowhere_past_it(served: Served) -> None:
    succeed_training(served, _job(served))
    follow(served)
    with served.http() as http:
        whole = http.get(f"{LEDGER}/statement").json()
        rest = http.get(f"{LEDGER}/statement?after={whole['through']}").json()
        assert (rest["data"], rest["opening"]) == ([], whole["closing"])
        for after in (10**12, 10**17, "x", -1, "1e3"):
            answer = http.get(f"{LEDGER}/statement?after={after}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


@pytest.mark.parametrize("path", ["receipts/batch_none", "receipts/ftjob-none", "receipts/x"])
def test_a_receipt_of_nothing_is_not_found(served: Served, path: str) -> None:
    with served.http() as http:
        assert http.get(f"{LEDGER}/{path}").status_code == 404


def test_both_windows_cost_the_same(served: Served) -> None:
    client = served.openai()
    receipts = []
    for window in ("24h", "72h"):
        file = client.files.create(file=b"{}\n" * 3, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_body={"completion_window": window},
        )
        assert batch.completion_window == window
        run_batch(served, batch.id, requests=3)
        finish(served, batch.id, output=b"{}\n{}\n", errors=b"{}\n")
        with served.http() as http:
            receipts.append(http.get(f"{LEDGER}/receipts/{batch.id}").json())
    day, three_days = receipts
    for amount in ("max_charge_usd", "charge_usd", "charge", "price_version"):
        assert day[amount] == three_days[amount]
