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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.partitioner import DefaultPartitioner

from adapters.process.settings import Settings, Unusable
from domain.catalog import GPU_CLASSES
from domain.messages import PROGRESS_TOPIC, RUNNERS_TOPIC, WORK_TOPIC
from domain.ports import Consumer, Producer, Record

T = TypeVar("T")

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition as it is found when it is assigned: `topic` with the deployment's prefix, `end`
    the offset that its next record will have."""

    cluster_id: str
    topic: str
    number: int
    end: int


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """`position_name` names positions in this life of the partition; the record at `handled` was
    the last one that was handled in it, None: none was."""

    position_name: str
    handled: int | None


FindStart = Callable[[Partition], Awaitable[StartingPoint]]

CONNECT_SECONDS_MAX = 60.0
SAY_SECONDS = 2.0
"""A broker that does not answer is spoken of after this, and then now and again."""
SAY_AGAIN_SECONDS = 15.0
ANSWER_SECONDS_MAX = 2.0
CLOSE_SECONDS_MAX = 5.0
SEND_SECONDS_MAX = 5.0
"""A message that the broker has not acknowledged by then counts as not sent."""
CHECK_SECONDS = 5.0
RETRY_SECONDS = 0.2
REQUEST_MILLISECONDS_MAX = 10_000
SESSION_MILLISECONDS = 6_000
"""How long the partitions of a killed member wait; the least that Apache Kafka allows."""
HEARTBEAT_MILLISECONDS = 1_500
COMMIT_SECONDS = 5.0
FETCH_WAIT_MILLISECONDS = 500


class KafkaUnusable(Unusable):
    """The broker has other topics than we need, or (KafkaAway) does not answer."""


class KafkaAway(KafkaUnusable):
    """No broker answers; one may later."""


class BrokerChanged(Exception):
    """What was read from is not what it was: another broker, or a topic that was made anew. The
    consumer must be made anew too, with the positions that count there."""


def work_topic(gpu_class: str) -> str:
    """The topic that carries the assignments of a class of runners, without the prefix."""
    return f"{WORK_TOPIC}.{gpu_class}"


async def ensure_topics(
    settings: Settings, *, patience_seconds: float = CONNECT_SECONDS_MAX
) -> None:
    """Creates our topics where they are missing, before any client of theirs connects, and waits
    for a broker that is still starting. Raises KafkaUnusable."""
    began = time.monotonic()
    say_at = began + SAY_SECONDS
    classes = {*GPU_CLASSES, settings.gpu_class}
    names = (*sorted(map(work_topic, classes)), RUNNERS_TOPIC, PROGRESS_TOPIC)
    wanted = [settings.topic_prefix + name for name in names]
    while True:
        try:
            await _create_and_check(settings, wanted)
        except (KafkaError, OSError) as error:
            waited = time.monotonic() - began
            if waited > patience_seconds:
                raise KafkaAway(
                    f"No broker of GRIDLINE_KAFKA_BOOTSTRAP={settings.kafka_bootstrap} is ready "
                    f"after {waited:.0f} s ({type(error).__name__}): start it, or name another"
                ) from error
            if time.monotonic() > say_at:
                say_at = time.monotonic() + SAY_AGAIN_SECONDS
                log.warning(
                    "no broker of GRIDLINE_KAFKA_BOOTSTRAP is ready; it is tried again",
                    bootstrap=settings.kafka_bootstrap,
                    error=type(error).__name__,
                )
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return


async def answers(bootstrap: str) -> bool:
    """Whether a broker answers now at any of the addresses."""
    asked = await asyncio.gather(*(_answers(address) for address in bootstrap.split(",")))
    return any(asked)


async def _answers(address: str) -> bool:
    host, _, port = address.strip().rpartition(":")
    try:
        # A bare connection first: the client would wait for a host that is away, and then say so.
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:
        return False
    writer.close()
    milliseconds = int(ANSWER_SECONDS_MAX * 1000)
    admin = AIOKafkaAdminClient(bootstrap_servers=address, request_timeout_ms=milliseconds)
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
    settings: Settings, *, topics: Sequence[str], group: str, find_start: FindStart
) -> Consumer:
    """Shares the partitions of `topics` with the other members of `group`; without
    `settings.kafka_groups` it reads them all itself.

    At each assignment it goes on after what `find_start` answers, else from the beginning. `poll`
    raises what `find_start` raised. Raises KafkaError.
    """
    cluster_id = await current_cluster_id(settings)
    names = [settings.topic_prefix + topic for topic in topics]
    grouped = settings.kafka_groups
    client = _consumer_client(settings, group=settings.topic_prefix + group if grouped else None)
    consumer = KafkaConsumer(client, settings, topics=names, cluster_id=cluster_id, commits=grouped)
    positioning = _Positioning(consumer, find_start)
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
        await _stop(client)
        raise
    return consumer


class KafkaProducer:
    """`domain.ports.Producer` over aiokafka."""

    def __init__(self, client: AIOKafkaProducer, *, topic_prefix: str) -> None:
        self._client = client
        self._prefix = topic_prefix

    async def send(self, topic: str, *, key: str, value: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS_MAX):
                await self._client.send_and_wait(self._prefix + topic, value, key=key.encode())
        except TimeoutError:
            raise KafkaTimeoutError(topic) from None

    async def stop(self) -> None:
        await _stop(self._client)


class KafkaConsumer:
    """`domain.ports.Consumer` over aiokafka.

    Only partitions in `positions` are handed out: aiokafka may fetch from a committed offset while
    the caller's own position is still being read, and a seek fetches those records again.
    """

    def __init__(
        self,
        client: AIOKafkaConsumer,
        settings: Settings,
        *,
        topics: Collection[str],
        cluster_id: str,
        commits: bool,
    ) -> None:
        self.client = client
        self.cluster_id = cluster_id
        self.positions: dict[TopicPartition, _Position] = {}
        self.failure: Exception | None = None
        self.records_behind = 0
        self._settings = settings
        self._topics = frozenset(topics)
        self._commits = commits
        self._next_commit = time.monotonic() + COMMIT_SECONDS
        self._next_check = time.monotonic() + CHECK_SECONDS

    async def poll(self, *, timeout_seconds: float) -> Sequence[Record]:
        """Whoever polls has handled what the last poll returned. Raises BrokerChanged, and
        KafkaError while the broker is away."""
        await self._commit_sometimes()
        await self._check_sometimes()
        fetched = await self.client.getmany(timeout_ms=int(timeout_seconds * 1000))
        if self.failure is not None:
            raise self.failure
        records: list[Record] = []
        for partition, messages in fetched.items():
            position = self.positions.get(partition)
            if position is None:
                continue
            if position.name and messages[0].offset < position.next:
                # aiokafka went back to the beginning of a partition that ends before our position.
                raise BrokerChanged(partition.topic)
            position.next = messages[-1].offset + 1
            position.moved = True
            records.extend(
                Record(
                    topic=partition.topic.removeprefix(self._settings.topic_prefix),
                    partition=partition.partition,
                    offset=message.offset,
                    key=(message.key or b"").decode(errors="replace"),
                    value=message.value or b"",
                    position_name=position.name,
                )
                for message in messages
            )
        return records

    async def stop(self) -> None:
        await _stop(self.client)

    def start(self, partition: TopicPartition, point: StartingPoint, *, beginning: int) -> None:
        """Reads it from there, and hands its records out."""
        next_offset = beginning if point.handled is None else max(beginning, point.handled + 1)
        self.client.seek(partition, next_offset)
        self.positions[partition] = _Position(name=point.position_name, next=next_offset)

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """These partitions may be another member's by now."""
        for partition in partitions:
            self.positions.pop(partition, None)

    async def _commit_sometimes(self) -> None:
        moved = {tp: position.next for tp, position in self.positions.items() if position.moved}
        if not self._commits or not moved or time.monotonic() < self._next_commit:
            return
        self._next_commit = time.monotonic() + COMMIT_SECONDS
        try:
            # While no broker can be asked, the client would wait for one for ever.
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                await self.client.commit(moved)
            for tp in moved.keys() & self.positions.keys():
                self.positions[tp].moved = False
        except (KafkaError, TimeoutError) as error:
            # Nothing depends on it; a rebalance makes this ordinary.
            log.info("offsets not committed", error=repr(error))

    async def _check_sometimes(self) -> None:
        """A broker or topic that was made anew may answer what we ask of the old one with silence
        for ever."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + CHECK_SECONDS
        if await current_cluster_id(self._settings) != self.cluster_id:
            raise BrokerChanged(self.cluster_id)
        # A group whose topic is gone is given nothing to read, and no word.
        if gone := self._topics - await _undivided(self.client.topics()):
            raise BrokerChanged(*gone)
        known = {tp: each.next for tp, each in self.positions.items() if each.name}
        ends = await _undivided(self.client.end_offsets(list(known))) if known else {}
        for partition, end in ends.items():
            if end < known[partition]:
                raise BrokerChanged(partition.topic)
        self.records_behind = sum(end - known[partition] for partition, end in ends.items())


@dataclass(slots=True)
class _Position:
    name: str
    next: int
    moved: bool = False


class _Positioning(ConsumerRebalanceListener):  # type: ignore[misc]
    """Puts newly assigned partitions where the caller left off."""

    def __init__(self, consumer: KafkaConsumer, find_start: FindStart) -> None:
        self._consumer = consumer
        self._find_start = find_start

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self._consumer.forget(revoked)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        if not assigned:
            return
        try:
            client = self._consumer.client
            beginnings = await _undivided(client.beginning_offsets(list(assigned)))
            ends = await _undivided(client.end_offsets(list(assigned)))
            for partition in assigned:
                found = Partition(
                    cluster_id=self._consumer.cluster_id,
                    topic=partition.topic,
                    number=partition.partition,
                    end=ends[partition],
                )
                point = await self._find_start(found)
                self._consumer.start(partition, point, beginning=beginnings[partition])
        except Exception as error:  # noqa: BLE001
            # aiokafka would log it and read on from anywhere; the next poll raises it instead.
            self._consumer.failure = error


async def _consumer_at_the_end(
    settings: Settings, *, topic: str, partitions: Collection[int]
) -> KafkaConsumer:
    cluster_id = await current_cluster_id(settings)
    client = _consumer_client(settings, group=None)
    await _start(client)
    name = settings.topic_prefix + topic
    consumer = KafkaConsumer(client, settings, topics=[name], cluster_id=cluster_id, commits=False)
    try:
        chosen = [TopicPartition(name, number) for number in partitions]
        client.assign(chosen)
        for partition, end in (await _undivided(client.end_offsets(chosen))).items():
            consumer.start(partition, StartingPoint("", handled=None), beginning=end)
    except BaseException:
        await _stop(client)
        raise
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
        await _stop(client)
        raise


async def _stop(client: AIOKafkaProducer | AIOKafkaConsumer) -> None:
    await _undivided(_closed(client))


async def _closed(client: AIOKafkaProducer | AIOKafkaConsumer) -> None:
    """Closes it whole, within seconds. aiokafka would wait for a broker that is away as long as it
    is away, and its consumer ends halfway where a request was under way, its connections open.
    What was still to be sent is sent again by who wanted it."""
    stopping = asyncio.ensure_future(client.stop())
    await asyncio.wait({stopping}, timeout=CLOSE_SECONDS_MAX)
    if stopping.done() and not stopping.cancelled() and stopping.exception() is None:
        return
    stopping.cancel()
    await asyncio.wait({stopping})
    with suppress(KafkaError, asyncio.CancelledError):
        if isinstance(client, AIOKafkaProducer):
            await client._sender.close()
    connections = client.client if isinstance(client, AIOKafkaProducer) else client._client
    with suppress(KafkaError):
        await connections.close()


async def _undivided(work: Coroutine[Any, Any, T]) -> T:
    """Lets aiokafka finish what opens or closes even if we are cancelled meanwhile: it leaves a
    connection open that was cancelled while it opened, and its closing swallows a cancellation.

    It may also raise the cancellation of a task of its own, which nobody asked of us: that is a
    KafkaConnectionError."""
    task = asyncio.ensure_future(work)
    ours = asyncio.current_task()
    assert ours is not None
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if task.cancelled() and not ours.cancelling():
            raise KafkaConnectionError("a request was cut off") from None
        raise


async def current_cluster_id(settings: Settings) -> str:
    """Names the broker's life: the setting, or what the broker says. Raises KafkaError."""
    if settings.kafka_cluster_id:
        return settings.kafka_cluster_id
    admin = AIOKafkaAdminClient(
        bootstrap_servers=settings.kafka_bootstrap, request_timeout_ms=REQUEST_MILLISECONDS_MAX
    )
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
