"""What the product relies on in a broker, on the embedded one and on Apache Kafka."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import suppress

import pytest
from aiokafka.errors import KafkaError

from adapters.embedded.process import free_port
from adapters.kafka import (
    SEND_SECONDS_MAX,
    KafkaUnusable,
    Partition,
    StartingPoint,
    answers,
    ensure_topics,
    group_consumer,
    producer,
    runner_consumer,
    work_topic,
)
from adapters.process.settings import Settings
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


async def from_the_beginning(partition: Partition) -> StartingPoint:
    return StartingPoint("here", handled=None)


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
        settings, topics=[PROGRESS_TOPIC], group="ingest", find_start=from_the_beginning
    )
    records = await read(consumer, len(messages))
    await consumer.stop()
    assert {record.topic for record in records} == {PROGRESS_TOPIC}
    for key in ("job-0", "job-1", "job-2"):
        assert [r.value for r in records if r.key == key] == [v for k, v in messages if k == key]


async def test_a_group_goes_on_after_the_position_that_its_caller_kept(settings: Settings) -> None:
    await send_all(settings, PROGRESS_TOPIC, [("job", str(n).encode()) for n in range(10)])
    first = await group_consumer(
        settings, topics=[PROGRESS_TOPIC], group="ingest", find_start=from_the_beginning
    )
    records = await read(first, 10)
    await first.stop()
    kept = records[6]
    assert kept.position_name == "here"

    async def position(partition: Partition) -> StartingPoint:
        assert partition.topic == settings.topic_prefix + PROGRESS_TOPIC
        is_kept = partition.number == kept.partition
        assert partition.end == (records[-1].offset + 1 if is_kept else 0)
        return StartingPoint("there", handled=kept.offset if is_kept else None)

    second = await group_consumer(
        settings, topics=[PROGRESS_TOPIC], group="ingest", find_start=position
    )
    again = await read(second, 3)
    await second.stop()
    assert [record.value for record in again] == [b"7", b"8", b"9"]
    assert {record.position_name for record in again} == {"there"}


async def test_one_address_that_answers_is_enough_to_be_reached(settings: Settings) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    there = settings.kafka_bootstrap
    assert await answers(there)
    assert await answers(f"{nobody},{there}")
    assert await answers(f"{there},{nobody}")
    assert not await answers(f"{nobody},{nobody}")


async def test_a_message_that_no_topic_takes_holds_its_sender_up_for_seconds_only(
    settings: Settings,
) -> None:
    sender = await producer(settings)
    async with asyncio.timeout(SEND_SECONDS_MAX + 2):
        # The embedded broker makes the topic; Apache Kafka, as it is run, does not.
        with suppress(KafkaError):
            await sender.send("work.no-such-class", key=RUNNER, value=b"lost")
    await sender.send(PROGRESS_TOPIC, key="job", value=b"heard")
    await sender.stop()


async def test_a_position_that_cannot_be_read_surfaces_in_the_poll(settings: Settings) -> None:
    async def unreadable(partition: Partition) -> StartingPoint:
        raise ConnectionError("database away")

    consumer = await group_consumer(
        settings, topics=[PROGRESS_TOPIC], group="ingest", find_start=unreadable
    )
    with pytest.raises(ConnectionError):
        await read(consumer, 1)
    await consumer.stop()


async def test_a_member_takes_over_the_partitions_of_one_that_left(settings: Settings) -> None:
    members = [
        await group_consumer(
            settings, topics=[RUNNERS_TOPIC], group="ingest", find_start=from_the_beginning
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
