"""What an Apache Kafka may go through while work is under way: away for a while, one address of it
dead, its topics made anew, the deployment restored under another prefix.

The worker is the product's own, in a consumer group; the runner is scripted; the broker is the
test's own, so that it can be taken away.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from adapters import kafka
from adapters.embedded.process import free_port
from adapters.process.settings import Settings
from domain.messages import PROGRESS_TOPIC, ChunkProgress
from tests.conftest import KAFKA_HOME, Database, _kafka, kafka_port
from tests.integration.worker_rig import (
    Rig,
    ScriptedRunner,
    chat_lines,
    eventually,
    running_worker,
    scripted_runner,
)

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(not KAFKA_HOME, reason="GRIDLINE_KAFKA_HOME names no Kafka to start"),
]

REPORTS_BEFORE = 12


class OwnKafka:
    """A broker that tests stop and start."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = kafka_port()
        self.start()

    def start(self) -> None:
        """Returns when it listens, with what it kept."""
        self.bootstrap = _kafka("start", self._directory, self._port)

    def stop(self, how: str = "stop") -> None:
        """Returns when it is gone."""
        _kafka(how, self._directory)


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnKafka]:
    broker = OwnKafka(tmp_path_factory.mktemp("kafka"))
    yield broker
    broker.stop()


@pytest.fixture
def settings(own_kafka: OwnKafka) -> Settings:
    """As operators write them: several addresses, of which the last one is dead here."""
    own_kafka.start()
    return Settings(
        kafka_bootstrap=f"{own_kafka.bootstrap},127.0.0.1:{free_port()}",
        kafka_idempotent=True,
        kafka_groups=True,
        topic_prefix=f"test-{uuid.uuid4().hex}.",
    )


@pytest.fixture
async def rig(database: Database, settings: Settings, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_worker(database, settings, tmp_path) as running:
        yield running


async def run_a_chunk(rig: Rig, runner: ScriptedRunner) -> None:
    """Runs one with many reports, so that the position of its partition is well past 0."""
    assigned = await runner.next_assign()
    for done in range(REPORTS_BEFORE):
        progress = ChunkProgress(completed=min(done, 3), failed=0)
        await runner.send_report(runner.report(assigned.attempt, progress, seq=done + 1))
    await runner.finish(assigned)


async def loop_restarted(rig: Rig, name: str, times: int) -> None:
    async def look() -> bool:
        return name in rig.loops.states and rig.loops.states[name].restarts >= times

    await eventually(look, seconds=60.0)


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_an_outage_in_the_middle_of_a_batch_delays_it_and_no_more(
    rig: Rig, own_kafka: OwnKafka, how: str
) -> None:
    batch_id = await rig.create_batch(chat_lines(8))
    async with scripted_runner(rig, "runner_a") as runner:
        await run_a_chunk(rig, runner)
        running = await runner.next_assign()
        own_kafka.stop(how)
        # Long enough for every client to have noticed, and to have tried to come back.
        await loop_restarted(rig, "ingest", times=1)
        await loop_restarted(rig, "heartbeats", times=3)
        own_kafka.start()
        await eventually(lambda: runner.tried(running), seconds=60.0)
        await rig.batch_when(batch_id, "completed", seconds=60.0)
    assert (await rig.events(batch_id)).count("gridline.batch.chunk_finished") == 2
    assert (await rig.events(batch_id)).count("gridline.batch.attempt_lost") == 0


async def test_a_lost_runner_is_given_up_though_one_address_of_the_broker_is_dead(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(2))
    async with scripted_runner(rig, "runner_a") as lost:
        left = await lost.next_assign()
        lost.silent = True
        async with scripted_runner(rig, "runner_b") as other:
            again = await other.next_assign()
            assert again.attempt.chunk == left.attempt.chunk
            await other.finish(again)
            await rig.batch_when(batch_id, "completed")


async def test_a_deployment_restored_under_another_prefix_takes_reports_in(
    rig: Rig, database: Database, tmp_path: Path
) -> None:
    first = await rig.create_batch(chat_lines(4))
    async with scripted_runner(rig, "runner_a") as runner:
        await run_a_chunk(rig, runner)
        await rig.batch_when(first, "completed")
    await rig.stop_worker()
    elsewhere = replace(rig.settings, topic_prefix=f"restored-{uuid.uuid4().hex}.")
    await kafka.ensure_topics(elsewhere)
    restored = Rig(elsewhere, replace(rig.plane, settings=elsewhere), rig.account, rig.clock_file)
    restored.start_worker()
    try:
        second = await restored.create_batch(chat_lines(4))
        async with scripted_runner(restored, "runner_b") as runner:
            await runner.finish(await runner.next_assign())
            await restored.batch_when(second, "completed")
    finally:
        await restored.stop_worker()


async def test_a_topic_that_is_deleted_and_made_anew_begins_a_new_life(rig: Rig) -> None:
    batch_id = await rig.create_batch(chat_lines(12))
    async with scripted_runner(rig, "runner_a") as runner:
        await run_a_chunk(rig, runner)
        running = await runner.next_assign()
        admin = AIOKafkaAdminClient(bootstrap_servers=rig.settings.kafka_bootstrap)
        await admin.start()
        await admin.delete_topics([rig.settings.topic_prefix + PROGRESS_TOPIC])
        await admin.close()
        await loop_restarted(rig, "ingest", times=1)
        await eventually(lambda: runner.tried(running), seconds=30.0)
        await runner.finish(await runner.next_assign())
        await rig.batch_when(batch_id, "completed")
        names = await rig.rows("SELECT application_name AS name FROM gridline_tracking")
    topic = f"/{rig.settings.topic_prefix}{PROGRESS_TOPIC}/"
    lives = [row["name"].partition(topic)[2] for row in names if topic in row["name"]]
    assert any("/" in life for life in lives)
