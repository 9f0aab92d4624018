"""`projection_over_stock_runner`: the journal catching up with a long log through our follower,
over the same statements through the library's runner, which commits each event by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import psycopg
from eventsourcing.persistence import Tracking
from eventsourcing.postgres import PostgresTrackingRecorder
from eventsourcing.projection import Projection as StockProjection
from eventsourcing.projection import ProjectionRunner as StockRunner

from adapters.event_log.event_store import Append, EventStore, decode
from adapters.event_log.postgres import connect
from adapters.process.clock import RandomIds, SystemClock
from bench.database import cluster
from bench.library import StockApplication, stock_environment
from bench.report import Figure
from domain import ids
from domain.ledger.account import Account, AccountLimits
from domain.log.aggregate import Aggregate, Envelope
from projections.follower import Follower
from projections.money.journal import JOURNAL

ACCOUNTS = 50
JOBS_PER_ACCOUNT = 100
ROUNDS = 3
STOCK_SECONDS = 4.0
POLL_SECONDS = 0.02

_FORGET = """
    DELETE FROM journal_entries;
    DELETE FROM journal_balances;
    UPDATE gridline_tracking SET notification_id = 0 WHERE application_name <> '__migration__'
"""


class StockView(PostgresTrackingRecorder):
    """The library's place for rows and position in one transaction."""

    def write(self, event: Aggregate.Event, tracking: Tracking) -> None:
        with self.datastore.transaction(commit=True) as cursor:
            for text, parameters in JOURNAL.apply(event, tracking.notification_id):
                cursor.execute(text, parameters, prepare=True)
            self._insert_tracking(cursor, tracking)


class StockJournal(StockProjection[StockView]):
    """The same journal; its name makes the library use our tracking table."""

    name = "gridline"

    def process_event(self, domain_event: Any, tracking: Tracking) -> None:
        self.view.write(domain_event, tracking)


def measure() -> list[Figure]:
    """Interleaved rounds; the median of their ratios."""
    with cluster() as server:
        url = server.database("projection")
        events = _fill(url)
        rounds = []
        for _ in range(ROUNDS):
            _forget(url)
            ours = _ours_per_second(url)
            _forget(url)
            rounds.append((ours, _stock_per_second(url)))
        conditions = (
            f"{events} events, journal; medians {median(o for o, _ in rounds):.0f} and "
            f"{median(s for _, s in rounds):.0f} events/s; {server.conditions}"
        )
    return [
        Figure(
            name="projection_over_stock_runner",
            value=round(median(ours / stock for ours, stock in rounds), 2),
            unit="times",
            goal=">= 10",
            peer="eventsourcing 9.5 ProjectionRunner, the same statements",
            conditions=conditions,
        )
    ]


def _ours_per_second(url: str) -> float:
    follower = Follower(lambda: connect(url, name="bench"), decode, [JOURNAL])
    start = time.perf_counter()
    done = follower.catch_up()
    return done / (time.perf_counter() - start)


def _stock_per_second(url: str) -> float:
    """Over a few seconds, since catching up would take minutes."""
    with StockRunner(
        application_class=StockApplication,
        projection_class=StockJournal,
        view_class=StockView,
        env=stock_environment(url, connections=2),
    ) as runner:
        first = _await_position(runner, at_least=1)
        start = time.perf_counter()
        runner.run_forever(timeout=STOCK_SECONDS)
        last = _await_position(runner, at_least=first)
        return (last - first) / (time.perf_counter() - start)


def _await_position(runner: StockRunner[Any, StockView], *, at_least: int) -> int:
    while (position := runner.view.max_tracking_id("gridline") or 0) < at_least:
        time.sleep(POLL_SECONDS)
    return position


def _forget(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(_FORGET)


def _fill(url: str) -> int:
    """Accounts whose work was reserved and charged; returns the number of events."""
    store = EventStore(url)
    count = 0
    for _ in range(ACCOUNTS):
        events = _events_of_an_account()
        count += len(store.append(Append(events=events)))
    store.close()
    return count


def _events_of_an_account() -> Sequence[Aggregate.Event]:
    new_id = RandomIds().new
    envelope = Envelope(
        at=SystemClock().now(),
        actor="system:bench",
        command_id="seed",
        correlation_id="seed",
        causation="seed",
    )
    limits = AccountLimits(open_fine_tunes=3, open_batches=10)
    account = Account(id=new_id(ids.ACCOUNT), envelope=envelope, limits=limits)
    account.grant_credit(10**12, grant_id="grant_bench", envelope=envelope)
    for _ in range(JOBS_PER_ACCOUNT):
        batch_id = new_id(ids.BATCH)
        account.take_batch_slot(batch_id, envelope=envelope)
        account.reserve(batch_id, 2_000_000, envelope=envelope)
        account.capture(batch_id, 1_500_000, envelope=envelope)
        account.free_batch_slot(batch_id, envelope=envelope)
    return [event for event in account.collect_events() if isinstance(event, Aggregate.Event)]
