"""What the product relies on in a broker, on the embedded one and on Apache Kafka."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest

from adapters.kafka import (
    KafkaUnusable,
    ensure_topics,
    group_consumer,
    producer,
    runner_consumer,
    work_topic,
)
from adapters.settings import Settings
from domain.messages import PROGRESS_TOPIC, RUNNERS_TOPIC
from domain.ports import Consumer, Record

SECONDS_MAX = 15.0
RUNNER = "runner_" + "0" * 32


@pytest.fixture
async def settings(broker_settings: Settings) -> Settings:
    await ensure_topics(broker_settings)
    return broker_settings


async def read(consumer: Consumer, count: int) -> list[Record]:
    found: list[Record] = []
    async with asyncio.timeout(SECONDS_MAX):
        while len(found) < count:
            found += await consumer.poll(timeout_seconds=0.2)
    return found


async def from_the_beginning(cluster_id: str, topic: str, partition: int) -> None:
    return None


async def send_all(settings: Settings, topic: str, messages: Sequence[tuple[str, bytes]]) -> None:
    sender = await producer(settings)
    for key, value in messages:
        await sender.send(topic, key=key, value=value)
    await sender.stop()


async def test_topics_can_be_ensured_again_and_by_several_at_once(settings: Settings) -> None:
    await asyncio.gather(*(ensure_topics(settings) for _ in range(3)))


async def test_another_partition_count_is_refused(settings: Settings) -> None:
    other = dataclasses.replace(settings, kafka_partitions=settings.kafka_partitions + 1)
    with pytest.raises(KafkaUnusable, match="GRIDLINE_KAFKA_PARTITIONS"):
        await ensure_topics(other)


async def test_a_group_reads_each_key_in_order_without_the_prefix(settings: Settings) -> None:
    messages = [(f"job-{n % 3}", str(n).encode()) for n in range(30)]
    await send_all(settings, PROGRESS_TOPIC, messages)
    consumer = await group_consumer(
        settings, topics=[PROGRESS_TOPIC], group="ingest", starting_positions=from_the_beginning
    )
    records = await read(consumer, len(messages))
    await consumer.stop()
    assert {record.topic for record in records} == {PROGRESS_TOPIC}
    for key in ("job-0", "job-1", "job-2"):
        assert [r.value for r in records if r.key == key] == [v for k, v in messages if k == key]


async def test_a_group_goes_on_after_the_position_that_its_caller_kept(settings: Settings) -> None:
    await send_all(settings, PROGRESS_TOPIC, [("job", str(n).encode()) for n in range(10)])
    first = await group_consumer(
        settings, topics=[PROGRESS_TOPIC], group="ingest", starting_positions=from_the_beginning
    )
    records = await read(first, 10)
    cluster_id = first.cluster_id
    await first.stop()
    kept = records[6]

    async def position(cluster: str, topic: str, partition: int) -> int | None:
        assert (cluster, topic) == (cluster_id, PROGRESS_TOPIC)
        return kept.offset if partition == kept.partition else None

    second = await group_consumer(
        settings, topics=[PROGRESS_TOPIC], group="ingest", starting_positions=position
    )
    again = await read(second, 3)
    await second.stop()
    assert [record.value for record in again] == [b"7", b"8", b"9"]


async def test_a_position_past_the_end_waits_for_what_comes_next(settings: Settings) -> None:
    async def far_ahead(cluster: str, topic: str, partition: int) -> int:
        return 1_000

    await send_all(settings, PROGRESS_TOPIC, [("job", b"old")])
    consumer = await group_consumer(
        settings, topics=[PROGRESS_TOPIC], group="ingest", starting_positions=far_ahead
    )
    async with asyncio.timeout(SECONDS_MAX):
        while not consumer.ready:  # type: ignore[attr-defined]
            assert await consumer.poll(timeout_seconds=0.2) == []
    await send_all(settings, PROGRESS_TOPIC, [("job", b"new")])
    records = await read(consumer, 1)
    await consumer.stop()
    assert [record.value for record in records] == [b"new"]


async def test_a_position_that_cannot_be_read_surfaces_in_the_poll(settings: Settings) -> None:
    async def unreadable(cluster: str, topic: str, partition: int) -> int:
        raise ConnectionError("database away")

    consumer = await group_consumer(
        settings, topics=[PROGRESS_TOPIC], group="ingest", starting_positions=unreadable
    )
    with pytest.raises(ConnectionError):
        await read(consumer, 1)
    await consumer.stop()


async def test_a_member_takes_over_the_partitions_of_one_that_left(settings: Settings) -> None:
    members = [
        await group_consumer(
            settings, topics=[RUNNERS_TOPIC], group="ingest", starting_positions=from_the_beginning
        )
        for _ in range(2)
    ]
    await members[0].stop()
    await send_all(settings, RUNNERS_TOPIC, [(f"runner-{n}", b"beat") for n in range(20)])
    records = await read(members[1], 20)
    await members[1].stop()
    assert {record.key for record in records} == {f"runner-{n}" for n in range(20)}


async def test_a_runner_reads_its_own_work_in_order_and_nothing_from_before(
    settings: Settings,
) -> None:
    topic = work_topic(settings.gpu_class)
    await send_all(settings, topic, [(RUNNER, b"before")])
    consumer = await runner_consumer(settings, RUNNER)
    await send_all(settings, topic, [(RUNNER, str(n).encode()) for n in range(5)])
    records = await read(consumer, 5)
    await consumer.stop()
    assert [(r.topic, r.key, r.value) for r in records] == [
        (topic, RUNNER, str(n).encode()) for n in range(5)
    ]


async def test_an_idle_poll_ends_in_its_time_and_reading_goes_on(settings: Settings) -> None:
    consumer = await runner_consumer(settings, RUNNER)
    async with asyncio.timeout(SECONDS_MAX):
        assert await consumer.poll(timeout_seconds=0.1) == []
    await send_all(settings, work_topic(settings.gpu_class), [(RUNNER, b"late")])
    assert [record.value for record in await read(consumer, 1)] == [b"late"]
    await consumer.stop()
