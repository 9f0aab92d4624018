"""Who gets the next free slot."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
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


def training(name: str, *, account: str, memory_gb: int = 0) -> WaitingWork:
    return replace(work(name, account=account), kind="train", memory_gb=memory_gb)


def names(chosen: list[tuple[WaitingWork, str]]) -> list[tuple[str, str]]:
    return [(item.work_id, runner_id) for item, runner_id in chosen]


def test_a_day_goes_before_three_days_and_the_earlier_deadline_first() -> None:
    waiting = [
        work("flexible", hours=1, flexible=True),
        work("late", hours=9),
        work("early", hours=2),
    ]
    chosen = choose(waiting, [runner("r", slots=3)], running={}, served={})
    assert [name for name, _ in names(chosen)] == ["early", "late", "flexible"]


def test_the_account_that_runs_less_goes_first_whatever_the_deadlines() -> None:
    waiting = [work("big", chunk=c) for c in range(5)]
    waiting += [work("small", account="b", hours=70, flexible=True)]
    chosen = choose(waiting, [runner("r", slots=2)], running={("batch_chunk", "a"): 1}, served={})
    assert [name for name, _ in names(chosen)] == ["small", "big"]


def test_a_runner_with_the_base_loaded_is_taken_then_an_empty_one_then_another() -> None:
    runners = [runner("0", warm="llama"), runner("1"), runner("2", warm="qwen")]
    waiting = [work("w", chunk=c) for c in range(3)]
    chosen = choose(waiting, runners, running={}, served={})
    assert [runner_id for _, runner_id in names(chosen)] == ["2", "1", "0"]


def test_work_that_no_runner_can_take_holds_nothing_up() -> None:
    waiting = [work("stuck", base="llama", hours=1), work("runs", hours=2)]
    chosen = choose(waiting, [runner("r", bases=("qwen",))], running={}, served={})
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
    chosen = choose(waiting, runners, running={}, served={})
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
    queues = {("batch_chunk", account): count for account, count in before.items()}
    chosen = choose(waiting, [runner("r", slots=slots)], running=queues, served={})
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
    first = choose(waiting, runners, running={}, served={})
    assert first == choose(waiting[::-1], runners[::-1], running={}, served={})


@given(
    accounts=st.permutations("abcdef"),
    slots=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=8),
)
def test_among_more_accounts_than_slots_each_gets_its_turn_within_a_round_of_all(
    accounts: list[str], slots: int, lengths: list[int]
) -> None:
    running: list[tuple[int, str]] = []  # the time at which each attempt ends, and its account
    served: dict[tuple[str, str], int] = {}
    passed_over: Counter[str] = Counter()
    granted = 0
    for now in range(60):
        running = [(end, account) for end, account in running if end > now]
        waiting = [work(f"{account}{now}", account=account) for account in accounts]
        chosen = choose(
            waiting,
            [runner("r", slots=slots - len(running))],
            running=Counter(("batch_chunk", account) for _, account in running),
            served=served,
        )
        for item, _ in chosen:
            running.append((now + lengths[granted % len(lengths)], item.account_id))
            granted += 1
            served[item.queue] = granted
            has_one = {account for _, account in running}
            passed_over = Counter({a: passed_over[a] + 1 for a in accounts if a not in has_one})
            assert all(times < len(accounts) for times in passed_over.values())


def test_what_an_account_trains_takes_no_turn_from_its_batches() -> None:
    waiting = [work("batch", account="a"), work("other", account="b")]
    running = {("train", "a"): 1}
    chosen = choose(waiting, [runner("r")], running=running, served={("batch_chunk", "b"): 1})
    assert names(chosen) == [("batch", "r")]


def test_work_waits_for_the_memory_that_it_needs() -> None:
    small = replace(runner("small", slots=0), free_slots={"train": 1}, memory_gb=24)
    large = replace(small, runner_id="large", memory_gb=48)
    waiting = [training("job", account="a", memory_gb=48)]
    assert choose(waiting, [small], running={}, served={}) == []
    assert names(choose(waiting, [small, large], running={}, served={})) == [("job", "large")]


def test_what_needs_little_memory_leaves_the_large_cards_to_others() -> None:
    small = replace(runner("small"), free_slots={"train": 1}, memory_gb=24)
    large = replace(small, runner_id="large", memory_gb=48)
    waiting = [
        training("light", account="a", memory_gb=24),
        training("heavy", account="b", memory_gb=48),
    ]
    chosen = choose(waiting, [large, small], running={}, served={})
    assert sorted(names(chosen)) == [("heavy", "large"), ("light", "small")]
