"""`gridlined up` ended in the middle of work, by Ctrl-C or a kill, and the start that goes on with
it at once."""

from __future__ import annotations

import json
import signal

import psutil
import pytest

from tests.chaos.instance import (
    BATCH_ENDED,
    ENDED_SECONDS_MAX,
    RECOVERED_SECONDS_MAX,
    STOPPED_SECONDS_MAX,
    Instance,
    chat_lines,
    create_batch,
    until,
)


@pytest.mark.parametrize(
    ("how", "status"),
    [(signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["interrupt", "kill"],
)
def test_whatever_ends_it_nothing_is_left_and_the_next_start_goes_on(
    instance: Instance, how: signal.Signals, status: int
) -> None:
    instance.ensure_running()
    account = instance.open_account()

    def is_halfway() -> bool:
        return len(of_attempts("AttemptAssigned")) > len(of_attempts("ChunkFinished")) >= 1

    def of_attempts(*names: str) -> list[tuple[int, int]]:
        """The chunks and numbers of the attempts that such events are about."""
        return [(event.chunk, event.attempt) for _, event in instance.named(batch_id, *names)]

    with instance.client(account) as client:
        batch_id = create_batch(client, chat_lines(40, text="hello echo-delay-ms=60"))
        until(is_halfway, "a chunk is finished and another runs")
    running = instance.processes()
    given = of_attempts("AttemptAssigned")
    assert instance.process is not None
    instance.process.send_signal(how)
    assert instance.process.wait(timeout=STOPPED_SECONDS_MAX) == status
    assert psutil.wait_procs(running, timeout=ENDED_SECONDS_MAX)[1] == []
    assert instance.processes() == []

    assert instance.start() < RECOVERED_SECONDS_MAX
    # Nothing waits until the leases of runners end that died with the supervisor.
    assert set(given) <= set(of_attempts("ChunkFinished", "AttemptLost"))
    with instance.client(account) as client:
        until(lambda: client.batches.retrieve(batch_id).status in BATCH_ENDED, "the batch ends")
        batch = client.batches.retrieve(batch_id)
        assert batch.status == "completed"
        assert batch.output_file_id is not None
        output = client.files.content(batch.output_file_id).content
    answered = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert sorted(answered) == sorted(f"line-{number}" for number in range(40))
    finished = instance.named(batch_id, "ChunkFinished")
    assert sorted(event.chunk for _, event in finished) == list(range(4))
    charges = instance.named(account.account_id, "CreditCaptured")
    assert [event.work_id for _, event in charges] == [batch_id]
