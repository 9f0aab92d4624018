"""Kafka through aiokafka: topics, a producer, and the two ways in which we read.

The worker and the runner use it. Positions that count are kept by the caller beside its own data;
the offsets committed here only tell an operator how far we are. Nothing here may rely on a broker
that remembers: the embedded one starts from offset 0 each time, under a new cluster id, and answers
a fetch past its end with silence instead of an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import (
    KafkaError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.partitioner import DefaultPartitioner

from adapters.settings import Settings, Unusable
from domain.messages import PROGRESS_TOPIC, RUNNERS_TOPIC, WORK_TOPIC
from domain.ports import Consumer, Producer, Record

T = TypeVar("T")

log = structlog.stdlib.get_logger(__name__)

StartingPositions = Callable[[str, str, int], Awaitable[int | None]]
"""(cluster id, topic without prefix, partition) to the last offset that was handled, if any."""

CONNECT_SECONDS_MAX = 60.0
RETRY_SECONDS = 0.2
REQUEST_MILLISECONDS_MAX = 10_000
SESSION_MILLISECONDS = 6_000
"""How long the partitions of a killed member wait; the least that Apache Kafka allows."""
HEARTBEAT_MILLISECONDS = 1_500
COMMIT_SECONDS = 5.0
FETCH_WAIT_MILLISECONDS = 500


class KafkaUnusable(Unusable):
    """The broker does not answer, or has other topics than we need; the message says which."""


def work_topic(gpu_class: str) -> str:
    """The topic that carries the assignments of a class of runners, without the prefix."""
    return f"{WORK_TOPIC}.{gpu_class}"


async def ensure_topics(settings: Settings) -> None:
    """Creates our topics where they are missing, before any client of theirs connects, and waits
    for a broker that is still starting. Raises KafkaUnusable."""
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    names = (work_topic(settings.gpu_class), RUNNERS_TOPIC, PROGRESS_TOPIC)
    wanted = [settings.topic_prefix + name for name in names]
    told = False
    while True:
        try:
            await _create_and_check(settings, wanted)
        except (KafkaError, OSError) as error:
            if not told:
                told = True
                log.warning(
                    "the broker does not answer; it is asked again",
                    kafka_bootstrap=settings.kafka_bootstrap,
                    seconds_max=CONNECT_SECONDS_MAX,
                    error=type(error).__name__,
                )
            if time.monotonic() > deadline:
                raise KafkaUnusable(
                    f"GRIDLINE_KAFKA_BOOTSTRAP={settings.kafka_bootstrap!r} is not ready after "
                    f"{CONNECT_SECONDS_MAX:.0f} s: {error!r}"
                ) from error
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return


async def answers(bootstrap: str) -> bool:
    """Whether a broker answers there now."""
    host, port = bootstrap.rsplit(":", 1)
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=2_000)
    try:
        await _undivided(admin.start())
        await _undivided(admin.describe_cluster())
    except (KafkaError, OSError):
        return False
    finally:
        await _undivided(admin.close())
    return True


async def producer(settings: Settings) -> Producer:
    """Raises KafkaError if the broker is away."""
    client = AIOKafkaProducer(
        bootstrap_servers=settings.kafka_bootstrap,
        acks="all",
        enable_idempotence=settings.kafka_idempotent,
        request_timeout_ms=REQUEST_MILLISECONDS_MAX,
    )
    await _start(client)
    return KafkaProducer(client, topic_prefix=settings.topic_prefix)


async def runner_consumer(settings: Settings, runner_id: str) -> Consumer:
    """Reads the one partition that carries this runner's work, from now on: it stands at the end
    when this returns, and whatever was sent earlier is sent again. Other runners' messages come
    along. Raises KafkaError."""
    partitions = list(range(settings.kafka_partitions))
    chosen = DefaultPartitioner()(runner_id.encode(), partitions, partitions)
    return await _consumer_at_the_end(
        settings, topic=work_topic(settings.gpu_class), partitions=[chosen]
    )


async def heartbeat_consumer(settings: Settings) -> Consumer:
    """Reads all heartbeats from now on: old ones would bring dead runners back. Raises
    KafkaError."""
    return await _consumer_at_the_end(
        settings, topic=RUNNERS_TOPIC, partitions=range(settings.kafka_partitions)
    )


async def group_consumer(
    settings: Settings, *, topics: Sequence[str], group: str, starting_positions: StartingPositions
) -> Consumer:
    """Shares the partitions of `topics` with the other members of `group`; without
    `settings.kafka_groups` it reads them all itself.

    At each assignment it goes on after what `starting_positions` answers, else from the beginning.
    `poll` raises what `starting_positions` raised. Raises KafkaError.
    """
    cluster_id = await current_cluster_id(settings)
    names = [settings.topic_prefix + topic for topic in topics]
    grouped = settings.kafka_groups
    client = _consumer_client(settings, group=settings.topic_prefix + group if grouped else None)
    consumer = KafkaConsumer(
        client, topic_prefix=settings.topic_prefix, cluster_id=cluster_id, commits=grouped
    )
    positioning = _Positioning(consumer, starting_positions)
    if grouped:
        client.subscribe(names, listener=positioning)
    await _start(client)
    if grouped:
        return consumer
    try:
        every = [TopicPartition(t, p) for t in names for p in range(settings.kafka_partitions)]
        client.assign(every)
        await positioning.on_partitions_assigned(every)
    except BaseException:
        await _undivided(client.stop())
        raise
    return consumer


class KafkaProducer:
    """`domain.ports.Producer` over aiokafka."""

    def __init__(self, client: AIOKafkaProducer, *, topic_prefix: str) -> None:
        self._client = client
        self._prefix = topic_prefix

    async def send(self, topic: str, *, key: str, value: bytes) -> None:
        await self._client.send_and_wait(self._prefix + topic, value, key=key.encode())

    async def stop(self) -> None:
        await _undivided(self._client.stop())


class KafkaConsumer:
    """`domain.ports.Consumer` over aiokafka.

    Only partitions in `ready` are handed out: aiokafka may fetch from a committed offset while the
    caller's own position is still being read, and a seek fetches those records again.
    """

    def __init__(
        self,
        client: AIOKafkaConsumer,
        *,
        topic_prefix: str,
        cluster_id: str,
        commits: bool,
    ) -> None:
        self.client = client
        self.cluster_id = cluster_id
        self.ready: set[TopicPartition] = set()
        self.failure: Exception | None = None
        self._commits = commits
        self._prefix = topic_prefix
        self._handled: dict[TopicPartition, int] = {}
        self._next_commit = time.monotonic() + COMMIT_SECONDS

    async def poll(self, *, timeout_seconds: float) -> Sequence[Record]:
        """Whoever polls has handled what the last poll returned."""
        await self._commit_sometimes()
        fetched = await self.client.getmany(timeout_ms=int(timeout_seconds * 1000))
        if self.failure is not None:
            raise self.failure
        records: list[Record] = []
        for partition, messages in fetched.items():
            if partition not in self.ready:
                continue
            self._handled[partition] = messages[-1].offset + 1
            records.extend(
                Record(
                    topic=self.bare(partition.topic),
                    partition=partition.partition,
                    offset=message.offset,
                    key=(message.key or b"").decode(errors="replace"),
                    value=message.value or b"",
                )
                for message in messages
            )
        return records

    async def stop(self) -> None:
        await _undivided(self.client.stop())

    def bare(self, topic: str) -> str:
        """The topic's name without the deployment's prefix."""
        return topic.removeprefix(self._prefix)

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """These partitions may be another member's by now."""
        self.ready.difference_update(partitions)
        for partition in partitions:
            self._handled.pop(partition, None)

    async def _commit_sometimes(self) -> None:
        if not self._commits or not self._handled or time.monotonic() < self._next_commit:
            return
        self._next_commit = time.monotonic() + COMMIT_SECONDS
        try:
            await self.client.commit(dict(self._handled))
        except KafkaError as error:
            # Nothing depends on it; a rebalance makes this ordinary.
            log.info("offsets not committed", error=repr(error))


class _Positioning(ConsumerRebalanceListener):  # type: ignore[misc]
    """Puts newly assigned partitions where the caller left off."""

    def __init__(self, consumer: KafkaConsumer, starting_positions: StartingPositions) -> None:
        self._consumer = consumer
        self._starting_positions = starting_positions

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self._consumer.forget(revoked)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        try:
            client = self._consumer.client
            ends = await _undivided(client.end_offsets(list(assigned))) if assigned else {}
            for partition in assigned:
                await self._seek(partition, end=ends[partition])
        except Exception as error:  # noqa: BLE001
            # aiokafka would log it and read on from anywhere; the next poll raises it instead.
            self._consumer.failure = error

    async def _seek(self, partition: TopicPartition, *, end: int) -> None:
        consumer = self._consumer
        handled = await self._starting_positions(
            consumer.cluster_id, consumer.bare(partition.topic), partition.partition
        )
        start = 0 if handled is None else handled + 1
        if start > end:
            log.error(
                "partition is shorter than what was handled; topics must not be created again "
                "under the same cluster",
                topic=partition.topic,
                partition=partition.partition,
            )
            start = end
        consumer.client.seek(partition, start)
        consumer.ready.add(partition)


async def _consumer_at_the_end(
    settings: Settings, *, topic: str, partitions: Collection[int]
) -> KafkaConsumer:
    cluster_id = await current_cluster_id(settings)
    client = _consumer_client(settings, group=None)
    await _start(client)
    try:
        chosen = [TopicPartition(settings.topic_prefix + topic, number) for number in partitions]
        client.assign(chosen)
        for partition, end in (await _undivided(client.end_offsets(chosen))).items():
            client.seek(partition, end)
    except BaseException:
        await _undivided(client.stop())
        raise
    consumer = KafkaConsumer(
        client, topic_prefix=settings.topic_prefix, cluster_id=cluster_id, commits=False
    )
    consumer.ready.update(chosen)
    return consumer


def _consumer_client(settings: Settings, *, group: str | None) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        bootstrap_servers=settings.kafka_bootstrap,
        group_id=group,
        enable_auto_commit=False,
        # What retention has removed cannot be read; the log is the truth, so go on with the rest.
        auto_offset_reset="earliest",
        request_timeout_ms=REQUEST_MILLISECONDS_MAX,
        session_timeout_ms=SESSION_MILLISECONDS,
        heartbeat_interval_ms=HEARTBEAT_MILLISECONDS,
        fetch_max_wait_ms=FETCH_WAIT_MILLISECONDS,
    )


async def _start(client: AIOKafkaProducer | AIOKafkaConsumer) -> None:
    try:
        await _undivided(client.start())
    except BaseException:
        await _undivided(client.stop())
        raise


async def _undivided(work: Coroutine[Any, Any, T]) -> T:
    """Lets aiokafka finish what opens or closes even if we are cancelled meanwhile: it leaves a
    connection open that was cancelled while it opened, and its closing swallows a cancellation."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def current_cluster_id(settings: Settings) -> str:
    """Names the broker's life: the setting, or what the broker says. Raises KafkaError."""
    if settings.kafka_cluster_id:
        return settings.kafka_cluster_id
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka_bootstrap)
    try:
        await _undivided(admin.start())
        described = await _undivided(admin.describe_cluster())
    finally:
        await _undivided(admin.close())
    return str(described["cluster_id"])


async def _create_and_check(settings: Settings, wanted: Sequence[str]) -> None:
    admin = AIOKafkaAdminClient(
        bootstrap_servers=settings.kafka_bootstrap, request_timeout_ms=REQUEST_MILLISECONDS_MAX
    )
    try:
        await _undivided(admin.start())
        await _create_topics(admin, settings, wanted)
        found = {
            topic["topic"]: len(topic["partitions"]) for topic in await admin.describe_topics()
        }
    finally:
        await _undivided(admin.close())
    for topic in wanted:
        if topic not in found:
            # Apache Kafka tells of a new topic a moment after it has made it.
            raise UnknownTopicOrPartitionError(topic)
        if found[topic] != settings.kafka_partitions:
            raise KafkaUnusable(
                f"Topic {topic} has {found[topic]} partitions, GRIDLINE_KAFKA_PARTITIONS says "
                f"{settings.kafka_partitions}"
            )


async def _create_topics(
    admin: AIOKafkaAdminClient, settings: Settings, wanted: Sequence[str]
) -> None:
    existing = set(await admin.list_topics())
    missing = [
        NewTopic(topic, settings.kafka_partitions, settings.kafka_replication)
        for topic in wanted
        if topic not in existing
    ]
    if not missing:
        return
    answer = await admin.create_topics(missing)
    for topic, code, *_ in answer.topic_errors:
        problem = for_code(code)
        # Another process may create them at the same time.
        if code != 0 and problem is not TopicAlreadyExistsError:
            raise problem(topic)
