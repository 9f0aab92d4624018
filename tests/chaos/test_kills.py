"""`kill -9` of every part of an instance, while a batch and a training of one account are halfway.

Each case kills one process, lets the instance recover (or starts it again), waits for both to end,
and is then looked at from several sides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
from openai import OpenAI
from openai.types import Batch
from openai.types.fine_tuning import FineTuningJob

from adapters.operators.actions import OpenedAccount
from domain.ids import hold_id
from gpu_runners.parent.work_directory import PREFIX
from tests.chaos.instance import (
    BATCH_ENDED,
    ENDED_SECONDS_MAX,
    JOB_ENDED,
    RECOVERED_SECONDS_MAX,
    Instance,
    chat_lines,
    chat_rows,
    create_batch,
    create_training,
    kill,
    until,
)

LINES = 60
ENGINE = "gpu_runners.inference.child"
TRAINER = "gpu_runners.training.echo_child"
PARTS = ("api", "worker", "runner", "broker", "postgres")
VICTIMS = (*PARTS, "engine", "trainer", "up")
TRAINING_SURVIVES = ("api", "worker", "postgres", "engine")
"""Killing these leaves the runner and its training child alone."""


@dataclass(frozen=True)
class Aftermath:
    """What there is after both ended. `killed_at` is the log's position just before."""

    victim: str
    instance: Instance
    account: OpenedAccount
    killed_at: int
    batch: Batch
    output: bytes
    errors: bytes
    job: FineTuningJob


@pytest.fixture(scope="module", params=VICTIMS)
def aftermath(request: pytest.FixtureRequest, instance: Instance) -> Iterator[Aftermath]:
    instance.ensure_running()
    account = instance.open_account()
    with instance.client(account) as client:
        job_id = create_training(client, chat_rows(40, text="Where? echo-step-ms=200"))
        batch_id = create_batch(client, chat_lines(LINES, text="hello echo-delay-ms=60"))
        until(lambda: is_halfway(instance, batch_id, job_id), "both are halfway")
    killed_at = instance.events()[-1][0]
    kill_and_recover(instance, request.param)
    with instance.client(account) as client:
        batch = until(lambda: ended_batch(client, batch_id), f"the batch ends: {batch_id}")
        job = until(lambda: ended_job(client, job_id), f"the training ends: {job_id}")
        yield Aftermath(
            victim=request.param,
            instance=instance,
            account=account,
            killed_at=killed_at,
            batch=batch,
            output=content_of(client, batch.output_file_id),
            errors=content_of(client, batch.error_file_id),
            job=job,
        )


def is_halfway(instance: Instance, batch_id: str, job_id: str) -> bool:
    """Some chunks are finished, another runs, and so does the training."""
    finished = instance.named(batch_id, "ChunkFinished")
    assigned = instance.named(batch_id, "AttemptAssigned")
    progressed = instance.named(job_id, "Progressed")
    assert len(finished) < LINES // 10, "too fast to be hit"
    return len(finished) >= 2 and len(assigned) > len(finished) and len(progressed) >= 1


def kill_and_recover(instance: Instance, victim: str) -> None:
    if victim == "up":
        before = instance.processes()
        assert instance.process is not None
        instance.process.kill()
        instance.process.wait()
        assert psutil.wait_procs(before, timeout=ENDED_SECONDS_MAX)[1] == []
        assert instance.processes() == []
        assert instance.start() < RECOVERED_SECONDS_MAX
    elif victim in PARTS:
        pid = instance.pid(victim)
        kill(pid)
        until(lambda: instance.pid(victim) != pid, f"{victim} is started again")
        until(lambda: instance.is_alive(victim), f"{victim} lives")
    else:
        (child,) = instance.children("runner", ENGINE if victim == "engine" else TRAINER)
        kill(child.pid)


def ended_batch(client: OpenAI, batch_id: str) -> Batch | None:
    batch = client.batches.retrieve(batch_id)
    return batch if batch.status in BATCH_ENDED else None


def ended_job(client: OpenAI, job_id: str) -> FineTuningJob | None:
    job = client.fine_tuning.jobs.retrieve(job_id)
    return job if job.status in JOB_ENDED else None


def content_of(client: OpenAI, file_id: str | None) -> bytes:
    return b"" if file_id is None else client.files.content(file_id).content


def custom_ids(lines: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in lines.splitlines()]


def test_the_batch_completes_with_each_line_answered_once(aftermath: Aftermath) -> None:
    batch = aftermath.batch
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.total == LINES
    answered = custom_ids(aftermath.output) + custom_ids(aftermath.errors)
    assert sorted(answered) == sorted(f"line-{number}" for number in range(LINES))
    assert batch.request_counts.completed == len(custom_ids(aftermath.output)) == LINES


def test_no_chunk_runs_again_after_it_finished(aftermath: Aftermath) -> None:
    finished: dict[int, int] = {}
    output = aftermath.output
    for position, event in aftermath.instance.named(
        aftermath.batch.id, "AttemptAssigned", "ChunkFinished"
    ):
        assert event.chunk not in finished
        if type(event).__name__ == "ChunkFinished":
            finished[event.chunk] = position
    assert sorted(finished) == list(range(LINES // 10))
    assert sum(position <= aftermath.killed_at for position in finished.values()) >= 2
    # The file is made of the chunks' recorded results, byte for byte.
    for _, event in sorted(
        aftermath.instance.named(aftermath.batch.id, "ChunkFinished"), key=lambda e: e[1].chunk
    ):
        stored = event.result.output
        assert hashlib.sha256(output[: stored.bytes]).hexdigest() == stored.sha256
        output = output[stored.bytes :]
    assert output == b""


def test_the_batch_is_charged_once(aftermath: Aftermath) -> None:
    hold = aftermath.instance.events(hold_id(aftermath.batch.id))
    assert [type(event).__name__ for _, event in hold] == ["Placed", "Captured"]
    charges = [
        event
        for _, event in aftermath.instance.named(aftermath.account.account_id, "CreditCaptured")
        if event.work_id == aftermath.batch.id
    ]
    assert len(charges) == 1
    assert charges[0].charge_nano_usd == hold[1][1].charge_nano_usd > 0


def test_the_training_succeeds_or_is_interrupted_without_a_charge(aftermath: Aftermath) -> None:
    job = aftermath.job
    hold = [type(e).__name__ for _, e in aftermath.instance.events(hold_id(job.id))]
    if job.status == "succeeded":
        assert hold == ["Placed", "Captured"]
        assert job.fine_tuned_model is not None
    else:
        assert aftermath.victim not in TRAINING_SURVIVES
        assert job.status == "failed"
        assert job.error is not None
        assert job.error.code == "platform_interrupted"
        assert hold == ["Placed", "Released"]
        assert job.fine_tuned_model is None
    assert len(aftermath.instance.named(job.id, "AttemptAssigned")) == 1


def test_nothing_stays_taken(aftermath: Aftermath) -> None:
    account = aftermath.instance.account(aftermath.account)
    assert account.holds_nano_usd == {}
    assert account.open_batches == []
    assert account.open_fine_tunes == []
    assert account.training_job_id is None
    assert account.models == (aftermath.job.status == "succeeded")


def test_no_files_of_killed_runners_are_left(aftermath: Aftermath) -> None:
    assert len(list(aftermath.instance.temporary.glob(f"{PREFIX}*"))) == 1


def test_log_holds_journal_and_balances_agree(aftermath: Aftermath) -> None:
    assert aftermath.instance.audit_differences() == ()
