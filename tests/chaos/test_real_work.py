"""A real model, hit in the middle: its engine during a batch, then its runner during a training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from domain.ids import hold_id
from gpu_runners.weights.store import Weights
from tests.chaos.instance import (
    BASE,
    BATCH_ENDED,
    JOB_ENDED,
    QUICK,
    Instance,
    chat_lines,
    chat_rows,
    create_batch,
    create_training,
    instance_in,
    kill,
    until,
)

LINES = 9
CHUNK_LINES = 3
WORK_SECONDS_MAX = 240.0
"""Loading a model twice on a machine that does other things too."""
SETTINGS = {
    **QUICK,
    "GRIDLINE_ENGINE": "transformers",
    "GRIDLINE_BATCH_CHUNK_REQUESTS": str(CHUNK_LINES),
}


@pytest.fixture(scope="module")
def real_instance(
    tmp_path_factory: pytest.TempPathFactory, weights_root: Path
) -> Iterator[Instance]:
    Weights(weights_root).path(BASE)
    settings = {**SETTINGS, "GRIDLINE_WEIGHTS_DIR": str(weights_root)}
    with instance_in(tmp_path_factory.mktemp("real"), settings) as instance:
        yield instance


def test_a_real_batch_survives_its_engine(real_instance: Instance) -> None:
    instance = real_instance
    account = instance.open_account()

    def is_halfway() -> bool:
        finished = instance.named(batch_id, "ChunkFinished")
        assert len(finished) < LINES // CHUNK_LINES, "too fast to be hit"
        return len(instance.named(batch_id, "AttemptAssigned")) > len(finished) >= 1

    with instance.client(account) as client:
        batch_id = create_batch(
            client, chat_lines(LINES, text="Tell a story about the number", max_tokens=24)
        )
        until(is_halfway, "a chunk is finished and another runs", seconds=WORK_SECONDS_MAX)
        (engine,) = instance.children("runner", "gpu_runners.inference.child")
        kill(engine.pid)
        until(
            lambda: client.batches.retrieve(batch_id).status in BATCH_ENDED,
            "the batch ends",
            seconds=WORK_SECONDS_MAX,
        )
        batch = client.batches.retrieve(batch_id)
        assert batch.status == "completed"
        assert batch.error_file_id is None
        assert batch.output_file_id is not None
        output = client.files.content(batch.output_file_id).content

    assert instance.children("runner", "gpu_runners.inference.child")[0].pid != engine.pid
    answered = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert sorted(answered) == sorted(f"line-{number}" for number in range(LINES))
    finished = instance.named(batch_id, "ChunkFinished")
    assert sorted(event.chunk for _, event in finished) == list(range(LINES // CHUNK_LINES))
    hold = instance.events(hold_id(batch_id))
    assert [type(event).__name__ for _, event in hold] == ["Placed", "Captured"]
    assert instance.account(account).holds_nano_usd == {}
    assert instance.audit_differences() == ()


def test_a_real_training_is_interrupted_with_its_runner_and_costs_nothing(
    real_instance: Instance,
) -> None:
    instance = real_instance
    account = instance.open_account()
    with instance.client(account) as client:
        job_id = create_training(client, chat_rows(120, text="Where is my parcel?"))
        until(
            lambda: instance.named(job_id, "Progressed"),
            "the training makes progress",
            seconds=WORK_SECONDS_MAX,
        )
        (trainer,) = instance.children("runner", "gpu_runners.training.child")
        kill(instance.pid("runner"))
        until(
            lambda: client.fine_tuning.jobs.retrieve(job_id).status in JOB_ENDED,
            "the training ends",
            seconds=WORK_SECONDS_MAX,
        )
        job = client.fine_tuning.jobs.retrieve(job_id)

    assert not trainer.is_running()
    assert job.status == "failed"
    assert job.error is not None
    assert job.error.code == "platform_interrupted"
    hold = instance.events(hold_id(job_id))
    assert [type(event).__name__ for _, event in hold] == ["Placed", "Released"]
    state = instance.account(account)
    assert (state.charged_nano_usd, state.holds_nano_usd, state.open_fine_tunes) == (0, {}, [])
    assert state.training_job_id is None
    assert instance.audit_differences() == ()
