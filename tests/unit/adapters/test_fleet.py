"""Leases and free slots, as heartbeats tell them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from adapters.worker.fleet import Fleet
from domain import messages
from domain.log.stored import Attempt
from domain.messages import Heartbeat
from domain.work.scheduling import AssignedWork

LEASE = 30.0
BEAT = 3.0
SLOTS_MAX = 8


class Steady:
    """A clock that only ever grows, when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def steady() -> Steady:
    return Steady()


@pytest.fixture
def fleet(steady: Steady) -> Fleet:
    return Fleet(
        lease_seconds=LEASE, heartbeat_seconds=BEAT, slots_max=SLOTS_MAX, steady_seconds=steady
    )


def attempt(number: int = 1, runner_id: str = "r") -> Attempt:
    return Attempt(work_id="batch_1", chunk=0, attempt=number, runner_id=runner_id)


def beat(
    *running: Attempt, stopping: bool = False, draining: bool = False, slots: int = 2
) -> Heartbeat:
    return Heartbeat(
        runner_id="r",
        gpu_class="cpu",
        sent_at=datetime(2026, 1, 1, tzinfo=UTC),
        slots={"batch_chunk": slots},
        running=tuple(messages.Attempt.of(each) for each in running),
        bases=("qwen",),
        draining=draining,
        stopping=stopping,
    )


def rounds(fleet: Fleet, steady: Steady, seconds: float) -> None:
    """Time passes with a round each second, as in a worker that is well."""
    for _ in range(int(seconds)):
        steady.seconds += 1
        fleet.look()


def test_a_runner_is_lost_a_lease_after_its_last_word(fleet: Fleet, steady: Steady) -> None:
    fleet.hear(beat())
    rounds(fleet, steady, LEASE)
    assert not fleet.is_silent("r")
    rounds(fleet, steady, 1)
    assert fleet.is_silent("r")


def test_a_runner_never_heard_has_a_whole_lease_from_the_start(
    fleet: Fleet, steady: Steady
) -> None:
    rounds(fleet, steady, LEASE)
    assert not fleet.is_silent("r")
    rounds(fleet, steady, 1)
    assert fleet.is_silent("r")


def test_a_worker_that_was_frozen_gives_everybody_a_new_lease(fleet: Fleet, steady: Steady) -> None:
    fleet.hear(beat())
    steady.seconds += 10 * LEASE
    fleet.look()
    assert not fleet.is_silent("r")
    rounds(fleet, steady, LEASE + 1)
    assert fleet.is_silent("r")


def test_leases_start_again_once_heartbeats_can_come_in_again(fleet: Fleet, steady: Steady) -> None:
    fleet.hear(beat())
    rounds(fleet, steady, LEASE + 1)
    fleet.listen_anew()
    assert not fleet.is_silent("r")


def test_a_runner_that_says_goodbye_is_offered_nothing_until_it_is_heard_again(
    fleet: Fleet,
) -> None:
    fleet.hear(beat(stopping=True))
    assert fleet.offers([]) == []
    assert fleet.is_leaving("r")
    fleet.hear(beat())
    assert fleet.offers([])


def test_a_goodbye_abandons_what_it_names_and_leaves_the_rest_its_lease(fleet: Fleet) -> None:
    fleet.hear(beat(attempt(1), attempt(2)))
    fleet.hear(beat(attempt(1), stopping=True))
    assert fleet.has_abandoned(attempt(1))
    assert not fleet.has_abandoned(attempt(2))
    assert not fleet.is_silent("r")
    assert fleet.named() == []


def test_a_draining_runner_gets_nothing_new_and_keeps_what_it_runs(fleet: Fleet) -> None:
    fleet.hear(beat(attempt(1), draining=True))
    assert fleet.offers([]) == []
    assert fleet.names(attempt(1))
    assert not fleet.has_abandoned(attempt(1))


def test_free_slots_are_what_the_log_has_not_assigned(fleet: Fleet) -> None:
    fleet.hear(beat(attempt(1), attempt(2)))
    assigned = [AssignedWork(attempt=attempt(2), kind="batch_chunk", account_id="a")]
    assert fleet.offers(assigned)[0].free_slots == {"batch_chunk": 1}
    assert fleet.offers([])[0].free_slots == {"batch_chunk": 2}


def test_a_runner_with_more_assigned_than_slots_offers_none(fleet: Fleet) -> None:
    fleet.hear(beat(slots=1))
    assigned = [
        AssignedWork(attempt=attempt(n), kind="batch_chunk", account_id="a") for n in (1, 2)
    ]
    assert fleet.offers(assigned)[0].free_slots == {"batch_chunk": 0}


def test_a_runner_that_missed_heartbeats_gets_nothing_new(fleet: Fleet, steady: Steady) -> None:
    fleet.hear(beat())
    rounds(fleet, steady, 3 * BEAT)
    assert fleet.offers([])
    rounds(fleet, steady, 1)
    assert fleet.offers([]) == []


def test_only_the_newest_heartbeat_names_attempts(fleet: Fleet) -> None:
    fleet.hear(beat(attempt(1)))
    fleet.hear(beat(attempt(2)))
    assert not fleet.names(attempt(1))
    assert fleet.named() == [attempt(2)]
    assert fleet.beats("r") == 2


def test_a_runner_that_claims_a_thousand_slots_is_believed_a_few(fleet: Fleet) -> None:
    fleet.hear(beat(slots=1_000))
    assert fleet.offers([])[0].free_slots == {"batch_chunk": SLOTS_MAX}


def test_a_runner_of_an_unknown_class_is_not_heard(fleet: Fleet) -> None:
    assert fleet.hear(beat())
    assert not fleet.hear(beat().model_copy(update={"gpu_class": "forged", "runner_id": "f"}))
    assert [offer.runner_id for offer in fleet.offers([])] == ["r"]


def test_an_offer_says_the_memory_of_the_runners_class(fleet: Fleet) -> None:
    fleet.hear(beat().model_copy(update={"gpu_class": "gpu-48gb"}))
    assert fleet.offers([])[0].memory_gb == 48
