"""The spend limits of a key, at create: what they refuse and leave alone, and how they say so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest

from domain.commands.keys import LimitKey, limit_key
from domain.ledger.key_spend import SpendLimits
from domain.ledger.money import nano_usd
from tests.acceptance.conftest import Served
from tests.acceptance.stand_in_worker import BASE, finish, run_batch
from tests.acceptance.training_files import chat_file


def _limit(served: Served, *, daily: str | None = None, total: str | None = None) -> None:
    limits = SpendLimits(
        daily_nano_usd=nano_usd(daily) if daily is not None else None,
        total_nano_usd=nano_usd(total) if total is not None else None,
    )
    served.run(limit_key, LimitKey(served.tenant.key_id, limits))


def _create(served: Served, kind: str) -> None:
    client = served.openai().with_options(max_retries=0)
    if kind == "job":
        file = client.files.create(file=chat_file(), purpose="fine-tune")
        client.fine_tuning.jobs.create(model=BASE, training_file=file.id)
    else:
        file = client.files.create(file=b"{}\n" * 3, purpose="batch")
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )


def _refusal(served: Served, kind: str) -> openai.RateLimitError:
    with pytest.raises(openai.RateLimitError) as refused:
        _create(served, kind)
    assert refused.value.code == "limit_exceeded"
    assert refused.value.response.headers["x-should-retry"] == "false"
    return refused.value


def _body(refused: openai.RateLimitError) -> dict[str, Any]:
    assert isinstance(refused.body, dict)
    return refused.body


@pytest.mark.parametrize("kind", ["job", "batch"])
@pytest.mark.parametrize("which", ["daily", "total"])
def test_a_create_past_a_limit_of_its_key_is_refused_by_name_and_makes_nothing(
    served: Served, kind: str, which: str
) -> None:
    _limit(served, **{which: "0.00"})
    refused = _refusal(served, kind)
    assert _body(refused)["limit"] == {
        "name": f"api_key_{which}_spend_usd",
        "api_key_id": served.tenant.key_id,
        "spend_usd": 0.0,
        "limit_usd": 0.0,
    }
    client = served.openai()
    assert client.fine_tuning.jobs.list().data == []
    assert client.batches.list().data == []
    with served.http() as http:
        credit = http.get("/openai/v1/gridline/credits").json()
    assert (credit["held_usd"], credit["charged_usd"]) == ("0.00", "0.00")
    assert (credit["open_fine_tunes"]["open"], credit["open_batches"]["open"]) == (0, 0)
    [file] = client.files.list().data
    assert client.files.delete(file.id).deleted


def test_a_daily_refusal_says_when_the_next_utc_day_begins_and_a_total_one_does_not(
    served: Served,
) -> None:
    _limit(served, daily="0.00")
    before = datetime.now(UTC)
    refused = _refusal(served, "batch")
    midnight = (before + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    wait = timedelta(seconds=int(refused.response.headers["retry-after"]))
    assert midnight - timedelta(seconds=30) < before + wait < midnight + timedelta(seconds=30)
    _limit(served, total="0.00")
    assert "retry-after" not in _refusal(served, "batch").response.headers


def test_a_job_is_judged_with_its_quoted_maximum_and_a_batch_by_what_is_spent(
    served: Served,
) -> None:
    _limit(served, daily="0.04", total="0.04")
    _refusal(served, "job")  # its minimum, and so its maximum, is 0.05
    _create(served, "batch")
    _limit(served, daily="0.05", total="0.05")
    _create(served, "job")


def test_a_running_batch_ends_above_a_limit_that_refuses_the_next_one(served: Served) -> None:
    _create(served, "batch")
    client = served.openai()
    [batch] = client.batches.list().data
    _limit(served, daily="0.001", total="0.001")
    run_batch(served, batch.id, requests=3)
    finish(served, batch.id, output=b"{}\n{}\n", errors=b"{}\n")
    done: Any = client.batches.retrieve(batch.id)
    assert (done.status, done.gridline["charged_usd"]) == ("completed", "0.01")
    assert _body(_refusal(served, "batch"))["limit"]["spend_usd"] == 0.01


def test_the_limit_of_one_key_leaves_the_accounts_other_work_to_its_credit(served: Served) -> None:
    _limit(served, daily="1000.00", total="100000.00")
    for _ in range(3):
        _create(served, "job")
    with pytest.raises(openai.RateLimitError) as refused:
        _create(served, "job")
    assert _body(refused.value)["limit"]["name"] == "open_fine_tunes"
