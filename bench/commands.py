"""`commands_over_stock_save`: creates of batches through the writer, read models included, over the
same creates each saved by itself through the library."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import cycle
from statistics import median

from adapters.event_log.event_store import Append, EventStore
from adapters.event_log.writer import Writer
from adapters.process.clock import RandomIds, SystemClock
from bench.database import cluster
from bench.library import CACHED_AGGREGATES, StockApplication, StockUnit, stock_environment
from bench.report import Figure
from domain import ids
from domain.assets.file import File
from domain.commands.create_batch import CreateBatch, create_batch
from domain.commands.idempotency import Origin
from domain.inputs.batch_create import BatchCreate
from domain.ledger.account import Account, AccountLimits
from domain.ledger.key_spend import KeySpend
from domain.ledger.price_book import PriceBook
from domain.ledger.prices import PriceList
from domain.log.aggregate import Aggregate, Envelope
from domain.log.stored import StoredObject
from domain.log.unit_of_work import CommandContext
from projections.registry import INLINE

CLIENTS = 32
ROUNDS = 5
ROUND_SECONDS = 2.0
ACCOUNTS_PER_CLIENT = 8
CREATES_PER_ACCOUNT = 25
"""Then a client goes on with its next account, so that no stream grows without bound."""

CONTEXT = CommandContext(
    actor="key_bench", correlation_id="req_bench", causation="POST /batches", command_id="cmd_bench"
)


@dataclass(frozen=True, slots=True)
class Tenant:
    account_id: str
    key_id: str
    file_id: str


def measure() -> list[Figure]:
    """Interleaved rounds; the median of their ratios."""
    with cluster() as server:
        stock_url = server.database("stock")
        merged_url = server.database("merged")
        rounds = [
            (_merged_per_second(merged_url), _stock_per_second(stock_url)) for _ in range(ROUNDS)
        ]
        conditions = (
            f"{CLIENTS} clients; medians {median(m for m, _ in rounds):.0f} and "
            f"{median(s for _, s in rounds):.0f} commands/s; {server.conditions}"
        )
    return [
        Figure(
            name="commands_over_stock_save",
            value=round(median(merged / stock for merged, stock in rounds), 2),
            unit="times",
            goal=">= 3",
            peer="eventsourcing 9.5 Application.save with its cache, 32 threads, events alone",
            conditions=conditions,
        )
    ]


def _merged_per_second(url: str) -> float:
    store = EventStore(url, projections=INLINE)
    tenants = _seed(store)
    writer = Writer(store, clock=SystemClock(), ids=RandomIds())

    async def client(number: int) -> int:
        done = 0
        for command in _commands(tenants[number::CLIENTS]):
            if time.perf_counter() > deadline:
                break
            await writer.execute(create_batch, command, CONTEXT)
            done += 1
        return done

    async def clients() -> int:
        return sum(await asyncio.gather(*(client(number) for number in range(CLIENTS))))

    start = time.perf_counter()
    deadline = start + ROUND_SECONDS
    done = asyncio.run(clients())
    seconds = time.perf_counter() - start
    writer.close()
    return done / seconds


def _stock_per_second(url: str) -> float:
    store = EventStore(url)
    tenants = _seed(store)
    store.close()
    application = StockApplication(
        stock_environment(
            url,
            connections=CLIENTS,
            settings={"AGGREGATE_CACHE_MAXSIZE": str(CACHED_AGGREGATES)},
        )
    )
    clock, id_source = SystemClock(), RandomIds()
    done = [0] * CLIENTS

    def client(number: int) -> None:
        for command in _commands(tenants[number::CLIENTS]):
            if time.perf_counter() > deadline:
                break
            unit = StockUnit(application, context=CONTEXT, clock=clock, ids=id_source)
            create_batch(unit, command)
            unit.save()
            done[number] += 1

    start = time.perf_counter()
    deadline = start + ROUND_SECONDS
    _in_threads(client)
    seconds = time.perf_counter() - start
    application.close()
    return sum(done) / seconds


def _in_threads(client: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _commands(tenants: Sequence[Tenant]) -> Iterator[CreateBatch]:
    for tenant in cycle(tenants):
        for _ in range(CREATES_PER_ACCOUNT):
            yield CreateBatch(
                origin=Origin(
                    account_id=tenant.account_id,
                    key_id=tenant.key_id,
                    route="/batches",
                    body_sha256=RandomIds().new(""),
                ),
                create=BatchCreate(
                    input_file_id=tenant.file_id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    output_expires_seconds=None,
                    metadata={"run": "bench"},
                ),
            )


def _seed(store: EventStore) -> list[Tenant]:
    """Fresh accounts, each with a key and a file; prices once."""
    envelope = Envelope(
        at=SystemClock().now(),
        actor="system:bench",
        command_id="seed",
        correlation_id="seed",
        causation="seed",
    )
    new_id = RandomIds().new
    aggregates: list[Aggregate] = []
    tenants = []
    if store.load(PriceBook, ids.PRICE_BOOK_ID) is None:
        prices = (
            resources.files("domain.ledger").joinpath("prices.json").read_text(encoding="utf-8")
        )
        aggregates.append(
            PriceBook(
                id=ids.PRICE_BOOK_ID,
                envelope=envelope,
                prices=PriceList.model_validate_json(prices),
            )
        )
    for _ in range(CLIENTS * ACCOUNTS_PER_CLIENT):
        tenant = Tenant(new_id(ids.ACCOUNT), new_id(ids.KEY), new_id(ids.FILE))
        limits = AccountLimits(open_fine_tunes=3, open_batches=1_000_000)
        key = f"files/{tenant.file_id}"
        aggregates += [
            Account(id=tenant.account_id, envelope=envelope, limits=limits),
            KeySpend(
                id=tenant.key_id,
                envelope=envelope,
                account_id=tenant.account_id,
                secret_digest="0" * 64,
            ),
            File(
                id=tenant.file_id,
                envelope=envelope,
                account_id=tenant.account_id,
                purpose="batch",
                object=StoredObject(key=key, bytes=1, sha256="0" * 64),
                expires_at=None,
                training=None,
            ),
        ]
        tenants.append(tenant)
    events = [event for each in aggregates for event in each.collect_events()]
    store.append(Append(events=[event for event in events if isinstance(event, Aggregate.Event)]))
    return tenants
