"""The runner's promises to the worker, on the echo engine: once each, never lost, never stuck."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from domain.messages import (
    PROGRESS_TOPIC,
    AdapterRef,
    AttemptFailed,
    Cancel,
    ChunkProgress,
    ObjectRef,
    Report,
    Revoke,
    TrainCancelled,
    TrainFinished,
    TrainProgress,
)
from tests.unit.gpu_runners.running_runner import (
    BASE,
    RUNNER_ID,
    Bench,
    beats,
    chat,
    finished,
    running_runner,
    training,
)

SLOW = "echo-delay-ms=30"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with running_runner(tmp_path) as bench:
        yield bench


async def test_each_line_ends_in_one_of_the_two_files(bench: Bench) -> None:
    bodies = [chat("one"), chat("two", temperature="hot"), chat("three words now", n=2)]
    report = await bench.final(await bench.assign(bench.chunk(bodies)))
    body = finished(report)
    output, errors = bench.lines(body.output), bench.lines(body.errors)
    assert (body.completed, body.failed, body.cancelled) == (2, 1, False)
    assert [line["custom_id"] for line in output] == ["c0", "c2"]
    assert [line["custom_id"] for line in errors] == ["c1"]
    answer = output[0]["response"]["body"]
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "base: one",
        "refusal": None,
    }
    assert answer["model"] == BASE
    assert errors[0]["error"] is None
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
    used = [line["response"]["body"]["usage"] for line in output]
    assert [(u.model, u.input_tokens, u.output_tokens) for u in body.usage] == [
        (BASE, sum(u["prompt_tokens"] for u in used), sum(u["completion_tokens"] for u in used))
    ]


async def test_a_file_that_would_be_empty_is_not_written(bench: Bench) -> None:
    body = finished(await bench.final(await bench.assign(bench.chunk([chat("one", n=0)]))))
    assert body.output is None
    assert [key for key in bench.objects.stored if key.startswith("chunks/")] == [
        body.errors.key if body.errors else ""
    ]


async def test_a_repeated_assignment_runs_once_and_gets_the_same_report_again(
    bench: Bench,
) -> None:
    task = bench.chunk([chat(SLOW) for _ in range(5)])
    attempt = await bench.assign(task)
    await bench.assign(task)
    first = await bench.final(attempt)
    await bench.assign(task)
    await bench.broker.wait_for(PROGRESS_TOPIC, lambda _: len(bench.finals(attempt)) == 2)
    assert bench.finals(attempt) == [first, first]


async def test_work_of_another_runner_is_left_alone(bench: Bench) -> None:
    task = bench.chunk([chat("one")])
    mine = await bench.assign(task)
    other = mine.model_copy(update={"runner_id": "runner_2"})
    await bench.say(Cancel(attempt=other))
    await bench.final(mine)
    assert {
        Report.model_validate_json(record.value).attempt.runner_id
        for record in bench.broker.topics[PROGRESS_TOPIC]
    } == {RUNNER_ID}


async def test_a_cancel_keeps_the_finished_lines(bench: Bench) -> None:
    attempt = await bench.assign(bench.chunk([chat(SLOW) for _ in range(100)]))
    await bench.broker.wait_for(
        PROGRESS_TOPIC, lambda records: _completed(records) > 0, seconds=10.0
    )
    await bench.say(Cancel(attempt=attempt))
    body = finished(await bench.final(attempt))
    assert body.cancelled
    assert 0 < body.completed < 100
    assert len(bench.lines(body.output)) == body.completed
    assert sum(used.output_tokens for used in body.usage) > 0


async def test_a_cancel_that_overtakes_its_assignment_stops_it(bench: Bench) -> None:
    task = bench.chunk([chat(SLOW) for _ in range(100)])
    attempt = await bench.assign(task, attempt=1)
    late = attempt.model_copy(update={"attempt": 2})
    await bench.say(Cancel(attempt=late))
    await bench.assign(task, attempt=2)
    await bench.say(Cancel(attempt=attempt))
    assert finished(await bench.final(late)).completed == 0


async def test_a_revoked_attempt_reports_nothing_and_never_runs_again(bench: Bench) -> None:
    task = bench.chunk([chat(SLOW) for _ in range(100)])
    attempt = await bench.assign(task)
    await bench.heartbeat(lambda beat: attempt in beat.running)
    await bench.say(Revoke(attempt=attempt))
    await bench.heartbeat(lambda beat: not beat.running)
    await bench.assign(task)
    after = await bench.assign(bench.chunk([chat("after")]), work_id="batch_2")
    assert finished(await bench.final(after)).completed == 1
    assert bench.finals(attempt) == []


async def test_a_killed_engine_costs_no_line(bench: Bench) -> None:
    attempt = await bench.assign(bench.chunk([chat(SLOW) for _ in range(40)]))
    await bench.broker.wait_for(
        PROGRESS_TOPIC, lambda records: _completed(records) > 0, seconds=10.0
    )
    os.kill(await bench.engine_pid(), signal.SIGKILL)
    body = finished(await bench.final(attempt))
    assert (body.completed, body.failed) == (40, 0)
    assert sorted(line["custom_id"] for line in bench.lines(body.output)) == sorted(
        f"c{i}" for i in range(40)
    )


async def test_a_line_that_kills_engines_becomes_an_error_line(bench: Bench) -> None:
    bodies = [chat("one"), chat("echo-crash"), *(chat("more") for _ in range(20))]
    body = finished(await bench.final(await bench.assign(bench.chunk(bodies))))
    errors = bench.lines(body.errors)
    assert body.completed + body.failed == 22
    assert "c1" in {line["custom_id"] for line in errors}
    assert len(errors) <= 8
    assert {line["response"]["body"]["error"]["code"] for line in errors} == {"engine_failed"}


async def test_heartbeats_go_on_during_work_and_name_it(bench: Bench) -> None:
    attempt = await bench.assign(bench.chunk([chat("echo-delay-ms=800")]))
    for _ in range(4):
        beat = await bench.heartbeat(lambda beat: attempt in beat.running)
        assert beat.slots == {"batch_chunk": 1, "train": 1}
    await bench.final(attempt)
    idle = await bench.heartbeat(lambda beat: not beat.running)
    assert idle.warm_base == BASE


async def test_the_engine_stays_warm_for_the_next_chunk(bench: Bench) -> None:
    await bench.final(await bench.assign(bench.chunk([chat("one")])))
    pid = await bench.engine_pid()
    await bench.final(await bench.assign(bench.chunk([chat("two")]), work_id="batch_2"))
    assert bench.runner.engines.pids == [pid]


async def test_an_adapter_that_cannot_load_fails_its_lines_alone(bench: Bench) -> None:
    good = _adapter(bench, "ft:good", b"\x02\0\0\0\0\0\0\0{}")
    broken = _adapter(bench, "ft:broken", b"\xff\0\0\0\0\0\0\0{")
    gone = _adapter(bench, "ft:gone", b"\x02\0\0\0\0\0\0\0{} ")
    del bench.objects.stored[gone.weights.key]
    bodies = [chat("x", model) for model in (BASE, "ft:good", "ft:broken", "ft:gone", "ft:none")]
    task = bench.chunk(bodies, adapters=(good, broken, gone))
    body = finished(await bench.final(await bench.assign(task)))
    assert {line["custom_id"] for line in bench.lines(body.output)} == {"c0", "c1"}
    errors = {
        line["custom_id"]: line["response"]["body"]["error"]["code"]
        for line in bench.lines(body.errors)
    }
    assert errors == dict.fromkeys(("c2", "c3", "c4"), "adapter_unusable")
    texts = {
        line["response"]["body"]["choices"][0]["message"]["content"]
        for line in bench.lines(body.output)
    }
    assert len(texts) == 2
    assert [used.model for used in body.usage] == ["ft:good", BASE]


async def test_a_final_report_outlives_a_broken_broker(bench: Bench) -> None:
    attempt = await bench.assign(bench.chunk([chat("echo-delay-ms=300")]))
    await bench.heartbeat(lambda beat: attempt in beat.running)
    bench.broker.refuse_next = 6
    assert finished(await bench.final(attempt)).completed == 1


async def test_trouble_with_the_object_store_passes(bench: Bench) -> None:
    task = bench.chunk([chat("one")])
    bench.objects.failures = 1
    assert finished(await bench.final(await bench.assign(task))).completed == 1


async def test_an_input_that_is_gone_fails_the_attempt(bench: Bench) -> None:
    task = bench.chunk([chat("one")])
    bench.objects.stored.clear()
    body = (await bench.final(await bench.assign(task))).body
    assert isinstance(body, AttemptFailed)
    assert body.code == "engine_failed"


async def test_an_input_that_changed_since_it_was_checked_runs_none_of_it(bench: Bench) -> None:
    task = bench.chunk([chat("one"), chat("two")])
    stored = bench.objects.stored[task.input_key]
    bench.objects.stored[task.input_key] = stored.replace(b"two", b"ten")
    body = (await bench.final(await bench.assign(task))).body
    assert isinstance(body, AttemptFailed)
    assert body.code == "input_changed"
    assert bench.runner.engines.pids == []
    assert [key for key in bench.objects.stored if key.startswith("chunks/")] == []


async def test_a_stopped_runner_names_what_it_abandons_and_leaves_no_child(tmp_path: Path) -> None:
    async with running_runner(tmp_path) as bench:
        attempt = await bench.assign(bench.chunk([chat(SLOW) for _ in range(100)]))
        pid = await bench.engine_pid()
    last = beats(bench.broker.topics["runners"])[-1]
    assert last.stopping
    assert last.running == (attempt,)
    assert bench.finals(attempt) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_training_reports_progress_and_uploads_its_adapter(bench: Bench) -> None:
    attempt = await bench.assign(training(bench.objects, rows=20), work_id="ftjob-1")
    body = (await bench.final(attempt)).body
    assert isinstance(body, TrainFinished)
    assert body.steps == 20
    assert body.adapter_config.key == "adapters/ftjob-1/1/adapter_config.json"
    assert bench.objects.stored[body.adapter_weights.key]
    assert body.step_metrics.key == "adapters/ftjob-1/1/step_metrics.csv"
    rows = bench.objects.stored[body.step_metrics.key].decode().splitlines()
    assert rows[0] == "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
    assert [row.split(",")[0] for row in rows[1:]] == [str(step) for step in range(1, 21)]
    reports = [
        Report.model_validate_json(record.value) for record in bench.broker.topics[PROGRESS_TOPIC]
    ]
    assert [report.seq for report in reports] == list(range(1, len(reports) + 1))
    assert any(isinstance(report.body, TrainProgress) for report in reports)


async def test_an_echo_training_gives_the_same_files_for_the_same_data(bench: Bench) -> None:
    task = training(bench.objects, rows=2)
    first = (await bench.final(await bench.assign(task, work_id="ftjob-1"))).body
    again = task.model_copy(update={"output_prefix": "adapters/ftjob-2/1/"})
    second = (await bench.final(await bench.assign(again, work_id="ftjob-2"))).body
    assert isinstance(first, TrainFinished)
    assert isinstance(second, TrainFinished)
    assert first.adapter_weights.sha256 == second.adapter_weights.sha256


async def test_a_training_stops_when_asked_to(bench: Bench) -> None:
    task = training(bench.objects, rows=100, text="echo-step-ms=100")
    attempt = await bench.assign(task, work_id="ftjob-1")
    await bench.broker.wait_for(PROGRESS_TOPIC, lambda records: len(records) > 1, seconds=10.0)
    await bench.say(Cancel(attempt=attempt))
    body = (await bench.final(attempt)).body
    assert isinstance(body, TrainCancelled)
    assert body.trained_tokens > 0


def _adapter(bench: Bench, name: str, weights: bytes) -> AdapterRef:
    return AdapterRef(
        name=name,
        config=ObjectRef.of(bench.objects.add(f"adapters/{name}/config", b"{}")),
        weights=ObjectRef.of(bench.objects.add(f"adapters/{name}/weights", weights)),
        rank=8,
    )


def _completed(records: list) -> int:
    bodies = [Report.model_validate_json(record.value).body for record in records]
    return max((body.completed for body in bodies if isinstance(body, ChunkProgress)), default=0)
