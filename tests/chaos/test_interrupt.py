"""Ctrl-C in the middle of work: an orderly end, and a start that goes on with it."""

from __future__ import annotations

import json
import signal

import psutil

from tests.chaos.instance import (
    BATCH_ENDED,
    ENDED_SECONDS_MAX,
    RECOVERED_SECONDS_MAX,
    Instance,
    chat_lines,
    create_batch,
    until,
)

STOPPED_SECONDS_MAX = 20.0


def test_an_interrupt_ends_everything_in_order_and_the_next_start_goes_on(
    instance: Instance,
) -> None:
    instance.ensure_running()
    account = instance.open_account()
    with instance.client(account) as client:
        batch_id = create_batch(client, chat_lines(40, text="hello echo-delay-ms=60"))
        until(lambda: instance.named(batch_id, "ChunkFinished"), "a chunk is finished")
    running = instance.processes()
    assert instance.process is not None
    instance.process.send_signal(signal.SIGINT)
    assert instance.process.wait(timeout=STOPPED_SECONDS_MAX) == 0
    assert psutil.wait_procs(running, timeout=ENDED_SECONDS_MAX)[1] == []
    assert instance.processes() == []

    assert instance.start() < RECOVERED_SECONDS_MAX
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
