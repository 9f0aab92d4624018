"""Who gets the next free slot."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from domain.work.scheduling import RunnerOffer, WaitingWork, choose

START = datetime(2026, 1, 1, tzinfo=UTC)
BASES = ("qwen", "llama", "minilm")


def work(
    name: str,
    *,
    account: str = "a",
    base: str = "qwen",
    hours: int = 24,
    flexible: bool = False,
    chunk: int = 0,
) -> WaitingWork:
    return WaitingWork(
        work_id=name,
        chunk=chunk,
        kind="batch_chunk",
        account_id=account,
        base=base,
        deadline=START + timedelta(hours=hours),
        flexible=flexible,
    )


def runner(
    name: str, *, slots: int = 1, warm: str | None = None, bases: tuple[str, ...] = BASES
) -> RunnerOffer:
    return RunnerOffer(
        runner_id=name,
        bases=frozenset(bases),
        warm_base=warm,
        free_slots={"batch_chunk": slots},
    )


def names(chosen: list[tuple[WaitingWork, str]]) -> list[tuple[str, str]]:
    return [(item.work_id, runner_id) for item, runner_id in chosen]


def test_a_day_goes_before_three_days_and_the_earlier_deadline_first() -> None:
    waiting = [
        work("flexible", hours=1, flexible=True),
        work("late", hours=9),
        work("early", hours=2),
    ]
    chosen = choose(waiting, [runner("r", slots=3)], running_by_account={})
    assert [name for name, _ in names(chosen)] == ["early", "late", "flexible"]


def test_the_account_that_runs_less_goes_first_whatever_the_deadlines() -> None:
    waiting = [work("big", chunk=c) for c in range(5)]
    waiting += [work("small", account="b", hours=70, flexible=True)]
    chosen = choose(waiting, [runner("r", slots=2)], running_by_account={"a": 1})
    assert [name for name, _ in names(chosen)] == ["small", "big"]


def test_a_runner_with_the_base_loaded_is_taken_then_an_empty_one_then_another() -> None:
    runners = [runner("0", warm="llama"), runner("1"), runner("2", warm="qwen")]
    waiting = [work("w", chunk=c) for c in range(3)]
    chosen = choose(waiting, runners, running_by_account={})
    assert [runner_id for _, runner_id in names(chosen)] == ["2", "1", "0"]


def test_work_that_no_runner_can_take_holds_nothing_up() -> None:
    waiting = [work("stuck", base="llama", hours=1), work("runs", hours=2)]
    chosen = choose(waiting, [runner("r", bases=("qwen",))], running_by_account={})
    assert names(chosen) == [("runs", "r")]


def waiting_work() -> st.SearchStrategy[WaitingWork]:
    return st.builds(
        WaitingWork,
        work_id=st.uuids().map(str),
        chunk=st.integers(0, 3),
        kind=st.sampled_from(["batch_chunk", "train"]),
        account_id=st.sampled_from("abc"),
        base=st.sampled_from(BASES),
        deadline=st.integers(0, 72).map(lambda hours: START + timedelta(hours=hours)),
        flexible=st.booleans(),
    )


def offers() -> st.SearchStrategy[list[RunnerOffer]]:
    slots = st.integers(0, 2)
    return st.lists(
        st.builds(
            RunnerOffer,
            runner_id=st.uuids().map(str),
            bases=st.frozensets(st.sampled_from(BASES)),
            warm_base=st.none() | st.sampled_from(BASES),
            free_slots=st.fixed_dictionaries({"batch_chunk": slots, "train": slots}),
        ),
        max_size=4,
    )


@given(st.lists(waiting_work(), max_size=20), offers())
def test_slots_are_never_overfilled_and_nothing_that_fits_is_left(
    waiting: list[WaitingWork], runners: list[RunnerOffer]
) -> None:
    chosen = choose(waiting, runners, running_by_account={})
    taken = Counter((runner_id, item.kind) for item, runner_id in chosen)
    by_id = {offer.runner_id: offer for offer in runners}
    assert all(
        count <= by_id[runner_id].free_slots[kind] for (runner_id, kind), count in taken.items()
    )
    assert all(item.base in by_id[runner_id].bases for item, runner_id in chosen)
    items = [item for item, _ in chosen]
    assert len({(item.work_id, item.chunk) for item in items}) == len(items)
    for left in waiting:
        if left not in items:
            assert all(
                taken[offer.runner_id, left.kind] == offer.free_slots[left.kind]
                for offer in runners
                if left.base in offer.bases
            )


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=4),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.integers(0, 12),
)
def test_no_account_gets_a_second_slot_more_while_another_waits(
    sizes: list[int], running: list[int], slots: int
) -> None:
    accounts = "abcd"[: len(sizes)]
    waiting = [
        work(f"{account}{n}", account=account)
        for account, size in zip(accounts, sizes, strict=True)
        for n in range(size)
    ]
    before = dict(zip("abcd", running, strict=True))
    chosen = choose(waiting, [runner("r", slots=slots)], running_by_account=before)
    gained = Counter(item.account_id for item, _ in chosen)
    share = {account: before[account] + gained[account] for account in accounts}
    for account, size in zip(accounts, sizes, strict=True):
        if gained[account] < size:
            assert all(
                share[other] <= share[account] + 1 or gained[other] == 0 for other in accounts
            )


def test_the_same_question_has_the_same_answer_in_any_order() -> None:
    waiting = [work("w", account=a, chunk=c) for a in "ab" for c in range(3)]
    runners = [runner("1"), runner("2", slots=2)]
    first = choose(waiting, runners, running_by_account={})
    assert first == choose(waiting[::-1], runners[::-1], running_by_account={})
