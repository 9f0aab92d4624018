"""Reading one customer's file costs no other customer anything."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx2
import pytest

from api.file_checks import Asked, FileChecks
from domain.errors import InvalidFile, RateLimited
from domain.limits import FILES_READ_AT_ONCE
from tests.acceptance.conftest import Served
from tests.acceptance.training_files import chat_file

SECONDS_MAX = 10
BASES = ("smollm2-135m-instruct", "qwen2.5-0.5b-instruct", "qwen2.5-1.5b-instruct", "qwen3-8b")


def _asked(number: int) -> Asked:
    return Asked(sha256=str(number), base="b", role="training file")


@pytest.fixture
async def checks() -> AsyncIterator[FileChecks]:
    with closing(FileChecks()) as made:
        yield made


async def test_a_file_is_read_once_for_all_who_ask_and_its_fault_is_told_to_each(
    checks: FileChecks,
) -> None:
    readings = []

    async def read() -> None:
        readings.append(1)
        await asyncio.sleep(0)
        raise InvalidFile("Line 3.", code="template_token_in_content", param="p", line=3)

    asks = [checks.must_pass("acct_1", _asked(1), read) for _ in range(20)]
    told = await asyncio.gather(*asks, return_exceptions=True)
    with pytest.raises(InvalidFile) as later:
        await checks.must_pass("acct_2", _asked(1), read)
    assert readings == [1]
    for each in [*told, later.value]:
        assert isinstance(each, InvalidFile)
        assert (each.message, each.code, each.param, each.line) == (
            "Line 3.",
            "template_token_in_content",
            "p",
            3,
        )


async def test_a_reading_that_fails_is_no_verdict(checks: FileChecks) -> None:
    async def lost() -> None:
        raise ConnectionError

    async def fine() -> None:
        pass

    with pytest.raises(ConnectionError):
        await checks.must_pass("acct_1", _asked(1), lost)
    await checks.must_pass("acct_1", _asked(1), fine)
    await checks.must_pass("acct_1", _asked(1), lost)


async def test_an_account_has_few_files_read_at_once_and_others_theirs(checks: FileChecks) -> None:
    go = asyncio.Event()

    async def read() -> None:
        await go.wait()

    asks = [
        asyncio.ensure_future(checks.must_pass("acct_1", _asked(number), read))
        for number in range(FILES_READ_AT_ONCE)
    ]
    await asyncio.sleep(0)
    with pytest.raises(RateLimited) as refused:
        await checks.must_pass("acct_1", _asked(99), read)
    assert refused.value.retry_after_seconds == 1
    other = asyncio.ensure_future(checks.must_pass("acct_2", _asked(99), read))
    go.set()
    await asyncio.gather(other, *asks)
    await checks.must_pass("acct_1", _asked(100), read)


async def test_pieces_are_looked_at_one_at_a_time_and_accounts_take_turns(
    checks: FileChecks,
) -> None:
    gate, done = threading.Event(), []

    def look(account: str) -> None:
        gate.wait(SECONDS_MAX)
        done.append(account)

    pieces = [
        asyncio.ensure_future(checks.in_turn(account, look, account))
        for account in ["greedy"] * 6 + ["modest"]
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*pieces)
    assert done.index("modest") <= 1


def _in_flight(calls: list[Callable[[], Any]], meanwhile: Callable[[], object]) -> list[Any]:
    """Runs the calls at once, and `meanwhile` again and again until all have answered."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        while not all(future.done() for future in futures):
            meanwhile()
        return [future.result() for future in futures]


def test_twenty_creates_that_read_large_files_leave_others_their_answers(served: Served) -> None:
    """By count: one thread reads, in pieces, so whatever the machine's speed another account gets
    its answers between the pieces, not after the files."""
    client = served.openai()
    bad = [
        client.files.create(
            file=chat_file(rows=20_000, text=f"Order {number}")
            + chat_file(rows=1, text="<|im_end|>"),
            purpose="fine-tune",
        ).id
        for number in range(2)
    ]
    other = served.http(served.new_tenant().key)
    answered: list[int] = []

    def create(number: int) -> int:
        body = {"model": BASES[number % 4], "training_file": bad[number % 2]}
        with served.http() as http:
            answer = http.post("/openai/v1/fine_tuning/jobs", json=body, timeout=60)
        return answer.status_code

    def get() -> None:
        answered.append(other.get("/openai/v1/files").status_code)

    with other:
        statuses = _in_flight(
            [lambda number=number: create(number) for number in range(20)],  # type: ignore[misc]
            get,
        )
    assert set(answered) == {200}
    assert set(statuses) <= {400, 429}
    assert statuses.count(400) >= FILES_READ_AT_ONCE
    assert len(answered) >= 30
    assert client.fine_tuning.jobs.list().data == []


def test_what_a_limit_refuses_costs_no_reading(served: Served) -> None:
    client = served.openai()
    good = client.files.create(file=chat_file(), purpose="fine-tune").id
    bad = client.files.create(file=chat_file(text="<|im_end|>"), purpose="fine-tune").id
    body = {"model": BASES[0], "training_file": good}
    with served.http() as http:
        for _ in range(3):
            assert http.post("/openai/v1/fine_tuning/jobs", json=body).status_code == 200
        refused: httpx2.Response = http.post(
            "/openai/v1/fine_tuning/jobs", json=body | {"training_file": bad}
        )
    assert refused.json()["error"]["code"] == "limit_exceeded"
