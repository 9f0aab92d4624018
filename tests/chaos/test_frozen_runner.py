"""A runner that stands still for longer than its lease, while another one takes over, and goes on
then as if nothing had been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest
from openai import OpenAI

from adapters.operators.actions import OpenedAccount
from domain.messages import Heartbeat
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

LINES = 40


@dataclass(frozen=True)
class Outcome:
    """All that may not change any more, and the number of events of both works."""

    batch: str
    output: bytes
    job: str
    charged_nano_usd: int
    events: int


@dataclass(frozen=True)
class Work:
    """A batch and a training of one account."""

    instance: Instance
    account: OpenedAccount
    client: OpenAI
    batch_id: str
    job_id: str

    def runner_id(self) -> str:
        """Who was given the batch's first chunk."""
        return str(self.instance.named(self.batch_id, "AttemptAssigned")[0][1].runner_id)

    def is_halfway(self) -> bool:
        finished = self.instance.named(self.batch_id, "ChunkFinished")
        assigned = self.instance.named(self.batch_id, "AttemptAssigned")
        began = self.instance.named(self.job_id, "Progressed")
        return len(assigned) > len(finished) >= 1 and len(began) >= 1

    def is_taken_over(self) -> bool:
        """Whether the chunk of the frozen runner was given to the other one."""
        assigned = self.instance.named(self.batch_id, "AttemptAssigned")
        return any(event.attempt > 1 for _, event in assigned)

    def has_ended(self) -> bool:
        batch = self.client.batches.retrieve(self.batch_id)
        job = self.client.fine_tuning.jobs.retrieve(self.job_id)
        return batch.status in BATCH_ENDED and job.status in JOB_ENDED

    def outcome(self) -> Outcome:
        batch = self.client.batches.retrieve(self.batch_id)
        assert batch.output_file_id is not None
        return Outcome(
            batch=batch.to_json(),
            output=self.client.files.content(batch.output_file_id).content,
            job=self.client.fine_tuning.jobs.retrieve(self.job_id).to_json(),
            charged_nano_usd=self.instance.account(self.account).charged_nano_usd,
            events=len(self.instance.events(self.batch_id))
            + len(self.instance.events(self.job_id)),
        )


@contextmanager
def another_runner(instance: Instance) -> Iterator[None]:
    """A second runner, with the settings of the supervised one."""
    settings = psutil.Process(instance.pid("runner")).environ()
    with instance.output.open("ab") as output:
        runner = subprocess.Popen(
            [sys.executable, "-m", "gpu_runners"], env=settings, stdout=output, stderr=output
        )
    try:
        yield
    finally:
        runner.terminate()
        runner.wait(timeout=15)


@contextmanager
def halfway(instance: Instance) -> Iterator[Work]:
    account = instance.open_account()
    with instance.client(account) as client:
        work = Work(
            instance=instance,
            account=account,
            client=client,
            job_id=create_training(client, chat_rows(40, text="Where? echo-step-ms=150")),
            batch_id=create_batch(client, chat_lines(LINES, text="hello echo-delay-ms=60")),
        )
        until(work.is_halfway, "both are halfway")
        yield work


@pytest.mark.parametrize("thawed_when", ["taken over", "ended"])
def test_a_runner_frozen_past_its_lease_and_thawed_changes_nothing(
    instance: Instance, thawed_when: str
) -> None:
    instance.ensure_running()
    with halfway(instance) as work:
        frozen, frozen_id = psutil.Process(instance.pid("runner")), work.runner_id()
        frozen.send_signal(signal.SIGSTOP)
        with another_runner(instance):
            condition = work.is_taken_over if thawed_when == "taken over" else work.has_ended
            until(condition, f"the work is {thawed_when}")
            before = work.outcome() if thawed_when == "ended" else None
            frozen.send_signal(signal.SIGCONT)
            until(lambda: is_idle(instance, frozen_id), "the thawed runner is idle")
            until(work.has_ended, "both end")
        after = work.outcome()

    assert before in (None, after)
    answered = [json.loads(line)["custom_id"] for line in after.output.splitlines()]
    assert sorted(answered) == sorted(f"line-{number}" for number in range(LINES))
    batch, job = json.loads(after.batch), json.loads(after.job)
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    assert (job["status"], job["error"]["code"]) == ("failed", "platform_interrupted")
    finished = instance.named(work.batch_id, "ChunkFinished")
    assert sorted(event.chunk for _, event in finished) == list(range(LINES // 10))
    charges = instance.named(work.account.account_id, "CreditCaptured")
    assert [event.work_id for _, event in charges] == [work.batch_id]
    assert instance.account(work.account).holds_nano_usd == {}
    assert instance.audit_differences() == ()


def is_idle(instance: Instance, runner_id: str) -> bool:
    """Whether the runner is heard again and says that it runs nothing."""
    beat: Heartbeat | None = instance.heartbeat(runner_id)
    return beat is not None and not beat.running
