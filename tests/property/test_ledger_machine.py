"""Random histories of the whole domain: creates, starts, reports that repeat, reorder and come
late, lost and stubborn runners, cancels, deadlines, new prices, limits and keys, deleted models and
files; after each step the auditor's invariants must hold, and at the end all work must come to its
end without any runner's help.

The same machine runs over the in-memory store, and with fewer histories over PostgreSQL through the
writer, where the work projection says what is due.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from importlib import resources
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from adapters.event_log import snapshots
from adapters.event_log.event_store import EventStore, decode
from adapters.event_log.memory_store import MemoryWriter
from adapters.event_log.postgres import Connection, connect
from adapters.event_log.writer import Writer
from domain import messages
from domain.assets.file import File
from domain.assets.fine_tuned_model import FineTunedModel, StoredAdapter
from domain.commands import accounts, batches, files, fine_tuning, work
from domain.commands import keys as key_commands
from domain.commands import models as model_commands
from domain.commands import prices as price_commands
from domain.commands.attempts.trainings import OWN_OBJECTS
from domain.commands.create_batch import CreateBatch, create_batch
from domain.commands.create_fine_tuning_job import CreateFineTuningJob, create_fine_tuning_job
from domain.commands.idempotency import Origin
from domain.errors import (
    DuplicateDelivery,
    InvalidApiKey,
    InvalidRequest,
    InvalidState,
    LimitExceeded,
    NotFound,
)
from domain.ids import BATCH, PRICE_BOOK_ID, fine_tuned_model_name, hold_id
from domain.inputs.batch_create import parse_batch_create
from domain.inputs.job_create import parse_fine_tuning_create
from domain.inputs.training_file import TrainingFacts
from domain.ledger.account import Account, AccountLimits
from domain.ledger.credit_hold import CreditHold
from domain.ledger.key_spend import KeySpend, SpendLimits
from domain.ledger.price_book import PriceBook
from domain.ledger.prices import PriceList
from domain.log.aggregate import Aggregate
from domain.log.stored import Attempt, StoredObject
from domain.log.unit_of_work import CommandContext
from domain.messages import (
    CHUNK_ERRORS,
    CHUNK_OUTPUT,
    AttemptFailed,
    ChunkFinished,
    ChunkProgress,
    ModelUsage,
    ObjectRef,
    Report,
    Started,
    TrainFinished,
    TrainProgress,
)
from domain.work.batch import Batch
from domain.work.fine_tuning_job import FineTuningJob
from projections.follower import Follower
from projections.money import statements
from projections.registry import FOLLOWING, INLINE
from projections.work import files as file_rows
from projections.work import open_work as work_rows
from tests.conftest import Database
from tests.integration.product_rig import LINES_PER_CHUNK, batch_quote, chunk_plans
from tests.property.ledger_auditor import Auditor, StatementLine

BASE = "smollm2-135m-instruct"
CENT = 10_000_000
SHIPPED = PriceList.from_json(resources.files("domain.ledger").joinpath("prices.json").read_bytes())
PRICES = SHIPPED.model_copy(
    update={
        "models": {
            **SHIPPED.models,
            BASE: SHIPPED.models[BASE].model_copy(
                update={
                    "training_nano_usd_per_mtok": 50_123_457,
                    "input_nano_usd_per_mtok": 5_000_003,
                    "output_nano_usd_per_mtok": 10_000_019,
                    "minimum_per_job_nano_usd": 50_000_001,
                    "minimum_per_batch_nano_usd": 10_000_007,
                }
            ),
        }
    }
)
"""Prices by which nothing divides evenly."""
COSTS = st.sampled_from([2, 40, 150])
"""Cents that a batch can cost at most: some are more than an account ever has at first."""
TOKENS_BOUND = 900_000
"""What every training file here can bill at most."""


HISTORIES = itertools.count(1)
"""Its number is part of the ids of a history, since several may share one database."""


class StepClock:
    """Moves when the machine says so."""

    def __init__(self) -> None:
        self.time = datetime(2026, 11, 30, 23, 0, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time


class CountingIds:
    """Ids in order, the same for the same history."""

    def __init__(self, start: int) -> None:
        self._next = itertools.count(start)

    def new(self, prefix: str) -> str:
        # The digits that differ come first: a model is named by the job id's first twelve.
        return prefix + f"{next(self._next):012x}".ljust(32, "0")


class LedgerMachine(RuleBasedStateMachine):
    """Subclasses say where the log is kept."""

    def open_log(self) -> Any:
        raise NotImplementedError

    def new_events(self) -> list[Aggregate.Event]:
        raise NotImplementedError

    def load(self, cls: type[Any], id: str) -> Any:
        raise NotImplementedError

    def due(self, what: str) -> Iterable[str]:
        """The ids that the worker would act on now; all of them where only commands decide."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.clock = StepClock()
        self.history = next(HISTORIES)
        self.writer = self.open_log()
        self.auditor = Auditor()
        self.accounts: list[str] = []
        self.keys: list[tuple[str, str]] = []
        self.file_ids: list[tuple[str, str]] = []
        self.work_ids: list[str] = []
        self.attempts: list[Attempt] = []
        self.reports: list[Report] = []
        self.commands = itertools.count(1)
        self.offsets = itertools.count(1)
        self._open_the_price_book()

    def _open_the_price_book(self) -> None:
        """The shipped prices, also where a history before this one has published others."""
        book = self.load(PriceBook, PRICE_BOOK_ID)
        version = max(book.lists) + 1 if book is not None else PRICES.version
        if book is not None:
            self.auditor.prices.update(book.lists)
            self.auditor.versions[PRICE_BOOK_ID] = book.version
        prices = PRICES.model_copy(update={"version": version})
        self.run(price_commands.publish_prices, price_commands.PublishPrices(prices=prices))

    def run(self, handler: Callable[..., Any], command: Any, **options: Any) -> Any:
        """Runs a command and lets the auditor read what it wrote."""
        context = CommandContext(
            actor="system:test",
            correlation_id="machine",
            causation="machine",
            command_id=f"command-{next(self.commands)}",
        )
        future: Future[Any] = self.writer.submit(handler, command, context, **options)
        try:
            return future.result(timeout=30)
        finally:
            for event in self.new_events():
                self.auditor.read(event)

    # Customers ------------------------------------------------------------------------------

    @initialize(cents=st.integers(5, 120), jobs=st.integers(1, 3))
    def open_an_account(self, cents: int, jobs: int) -> None:
        opened = self.run(
            accounts.open_account,
            accounts.OpenAccount(
                email="someone@example.com",
                limits=AccountLimits(open_fine_tunes=jobs, open_batches=jobs),
                credit_nano_usd=cents * CENT,
                secret=self._secret(),
            ),
        )
        self.accounts.append(opened.account_id)
        self.keys.append((opened.account_id, opened.key_id))

    @precondition(lambda self: len(self.accounts) < 2)
    @rule(cents=st.integers(5, 120), jobs=st.integers(1, 3))
    def open_another_account(self, cents: int, jobs: int) -> None:
        self.open_an_account(cents, jobs)

    @rule(data=st.data())
    def an_operator_acts(self, data: st.DataObject) -> None:
        """One rule for all of it, so that most steps are the customers' and the worker's."""
        acts = [
            self._grant_credit,
            self._grant_what_is_missing,
            self._limit_a_key,
            self._make_another_key,
            self._revoke_a_key,
            self._change_an_accounts_limits,
            self._publish_other_prices,
        ]
        data.draw(st.sampled_from(acts))(data)

    def _grant_credit(self, data: st.DataObject) -> None:
        account_id = data.draw(st.sampled_from(self.accounts))
        cents = data.draw(st.integers(1, 30))
        self.run(accounts.grant_credit, accounts.GrantCredit(account_id, cents * CENT, "a gift"))

    def _grant_what_is_missing(self, data: st.DataObject) -> None:
        """Just what some work needs to start."""
        for work_id in self.due("start"):
            account_id = self.auditor.owners[work_id]
            missing = self.auditor.plans.get(work_id, 0) - self.auditor.available(account_id)
            if missing > 0:
                command = accounts.GrantCredit(account_id, missing, "what is missing")
                self.run(accounts.grant_credit, command)

    def _limit_a_key(self, data: st.DataObject) -> None:
        cents = data.draw(st.integers(1, 60))
        limits = SpendLimits(daily_nano_usd=cents * CENT, total_nano_usd=2 * cents * CENT)
        key_id = data.draw(st.sampled_from(self.keys))[1]
        if self.load(KeySpend, key_id).revoked:
            with pytest.raises(NotFound):
                self.run(key_commands.limit_key, key_commands.LimitKey(key_id, limits))
        else:
            self.run(key_commands.limit_key, key_commands.LimitKey(key_id, limits))

    def _make_another_key(self, data: st.DataObject) -> None:
        account_id = data.draw(st.sampled_from(self.accounts))
        command = key_commands.RegisterKey(account_id=account_id, secret=self._secret())
        self.keys.append((account_id, self.run(key_commands.register_key, command)))

    def _revoke_a_key(self, data: st.DataObject) -> None:
        command = key_commands.RevokeKey(data.draw(st.sampled_from(self.keys))[1])
        self.run(key_commands.revoke_key, command)
        self._changes_nothing(key_commands.revoke_key, command)

    def _change_an_accounts_limits(self, data: st.DataObject) -> None:
        account_id = data.draw(st.sampled_from(self.accounts))
        open_fine_tunes, open_batches = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        limits = AccountLimits(open_fine_tunes=open_fine_tunes, open_batches=open_batches)
        self.run(accounts.set_account_limits, accounts.SetAccountLimits(account_id, limits))

    def _publish_other_prices(self, data: st.DataObject) -> None:
        percent = data.draw(st.sampled_from([0, 50, 300]))
        changed = {name: amount * percent // 100 for name, amount in PRICES.models[BASE] if amount}
        models = {**PRICES.models, BASE: PRICES.models[BASE].model_copy(update=changed)}
        version = max(self.auditor.prices) + 1
        prices = PRICES.model_copy(update={"version": version, "models": models})
        self.run(price_commands.publish_prices, price_commands.PublishPrices(prices=prices))

    @rule(data=st.data(), kind=st.sampled_from(["batch", "fine-tune"]), keyed=st.booleans())
    def create_work(self, data: st.DataObject, kind: str, keyed: bool) -> None:
        owner = data.draw(st.sampled_from(self.keys))
        file_id = self._store_file(owner, kind)
        origin = self._origin(owner, kind, file_id, key=f"key-{file_id}" if keyed else None)
        before = self._money(*owner)
        made = self._create_as_predicted(owner, kind, file_id, origin)
        assert self._money(*owner) == before, "a create moves no money (10)"
        if made is None:
            return
        if keyed:
            versions = dict(self.auditor.versions)
            assert self._create(origin, kind, file_id) == made, "the same key, the same work (14)"
            other = self._origin(owner, kind, "another body", key=f"key-{file_id}")
            with pytest.raises(InvalidRequest):
                self._create(other, kind, file_id)
            assert self.auditor.versions == versions

    def _create_as_predicted(
        self, owner: tuple[str, str], kind: str, file_id: str, origin: Origin
    ) -> str | None:
        """The id of what was made; None for a create that had to be refused, and was, for the
        reason that the bookkeeper knows."""
        bound = self.auditor.maximum_of_a_job(BASE, TOKENS_BOUND)
        refusal = self.auditor.refusal_of_create(
            kind, *owner, maximum=bound if kind == "fine-tune" else None, now=self.clock.now()
        )
        if refusal is not None:
            with pytest.raises((LimitExceeded, InvalidApiKey)) as refused:
                self._create(origin, kind, file_id)
            limit = refused.value.limit
            assert refusal == (limit["name"] if limit is not None else "a revoked key")
            return None
        made = self._create(origin, kind, file_id)
        self.work_ids.append(made)
        return made

    @rule(
        data=st.data(),
        kind=st.sampled_from(["batch", "fine-tune"]),
        other=st.booleans(),
        topped_up=st.booleans(),
    )
    def some_work_comes_to_its_end(
        self, data: st.DataObject, kind: str, other: bool, topped_up: bool
    ) -> None:
        """From create to its end in one step, as far as limits and credit allow; perhaps with other
        prices published in between, or with just the credit that it takes."""
        self.create_work(data, kind, keyed=False)
        if other:
            self._publish_other_prices(data)
        for batch_id in self.due("validate"):
            self._validate(batch_id, chunks=1, cents=data.draw(COSTS), fine_tuned=True)
        if topped_up:
            self._grant_what_is_missing(data)
        self._start_what_may()
        for work_id in self.work_ids:
            self._assign(work_id, "runner_a")
        for attempt in self._running():
            if attempt.work_id.startswith(BATCH):
                body = self._all_lines(attempt, data.draw(st.integers(1, 3_000_000)))
            else:
                self._deliver(self._report(attempt, Started()))
                body = data.draw(_ends_of_training())
            self._deliver(self._report(attempt, body))
        self.finish_what_can_be()

    def _all_lines(self, attempt: Attempt, tokens: int) -> ChunkFinished:
        plan = self._work(attempt.work_id).plan
        models = [BASE, *(adapter.name for adapter in plan.adapters)]
        usage = tuple(
            ModelUsage(model=name, input_tokens=tokens, output_tokens=9) for name in models
        )
        return ChunkFinished(completed=LINES_PER_CHUNK, failed=0, usage=usage)

    @precondition(lambda self: self.file_ids)
    @rule(data=st.data(), kind=st.sampled_from(["batch", "fine-tune"]))
    def create_work_on_an_older_file(self, data: st.DataObject, kind: str) -> None:
        owner = data.draw(st.sampled_from(self.keys))
        account_id, file_id = data.draw(st.sampled_from(self.file_ids))
        file = self.load(File, file_id)
        fits = account_id == owner[0] and not file.deleted and file.purpose == kind
        origin = self._origin(owner, kind, file_id)
        if fits:
            self._create_as_predicted(owner, kind, file_id, origin)
        else:
            with pytest.raises((NotFound, InvalidRequest)):
                self._create(origin, kind, file_id)

    @precondition(lambda self: self.work_ids)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        work_id = data.draw(st.sampled_from(self.work_ids))
        before = self._work(work_id)
        try:
            if work_id.startswith(BATCH):
                self.run(batches.cancel_batch, batches.CancelBatch(before.account_id, work_id))
            else:
                self.run(
                    fine_tuning.cancel_fine_tuning_job,
                    fine_tuning.CancelFineTuningJob(before.account_id, work_id),
                )
        except InvalidState:
            assert before.is_terminal or before.ending is not None

    @precondition(lambda self: self.file_ids)
    @rule(data=st.data())
    def delete_a_file(self, data: st.DataObject) -> None:
        account_id, file_id = data.draw(st.sampled_from(self.file_ids))
        file = self.load(File, file_id)
        users = self._users_of(file_id)
        try:
            self.run(files.delete_file, files.DeleteFile(account_id, file_id))
            assert not users, "open work keeps its files"
        except InvalidState:
            assert users
        except NotFound:
            assert file.deleted

    @rule()
    def files_expire(self) -> None:
        for file_id in self.due("files"):
            users = self._users_of(file_id)
            gone = self.run(files.expire_file, files.ExpireFile(file_id))
            assert gone is None or not users, "open work keeps its files"

    @precondition(lambda self: any(self._models()))
    @rule(data=st.data())
    def delete_a_model(self, data: st.DataObject) -> None:
        account_id, name = data.draw(st.sampled_from(list(self._models())))
        command = model_commands.DeleteModel(account_id, name)
        keys = self.run(model_commands.delete_model, command)
        assert not keys or name not in self._staged(), "an open batch keeps what it staged"
        assert keys or self.load(Account, account_id).open_batches
        with pytest.raises(NotFound):
            self.run(model_commands.delete_model, command)

    @precondition(lambda self: self.work_ids)
    @invariant()
    def no_object_of_a_staged_adapter_is_swept(self) -> None:
        for name, adapter in self._staged().items():
            model = self.load(FineTunedModel, name)
            for ref in (adapter.config, adapter.weights):
                asked = model_commands.AdapterObject(job_id=model.job_id, key=ref.key)
                assert self.run(model_commands.adapter_is_wanted, asked)

    # The worker -----------------------------------------------------------------------------

    @precondition(lambda self: self.work_ids)
    @rule(
        chunks=st.integers(1, 3),
        cents=st.integers(1, 20),
        runner=st.sampled_from("ab"),
        fine_tuned=st.booleans(),
    )
    def the_worker_looks_at_everything(
        self, chunks: int, cents: int, runner: str, fine_tuned: bool
    ) -> None:
        for batch_id in self.due("validate"):
            self._validate(batch_id, chunks=chunks, cents=cents, fine_tuned=fine_tuned)
        self._start_what_may()
        for work_id in self.work_ids:
            self._assign(work_id, f"runner_{runner}")

    @precondition(lambda self: self.work_ids)
    @rule(data=st.data(), chunks=st.integers(1, 3))
    def a_command_of_an_old_look_comes_late(self, data: st.DataObject, chunks: int) -> None:
        """What was due when somebody looked need not be any more."""
        work_id = data.draw(st.sampled_from(self.work_ids))
        before, versions = self._work(work_id), dict(self.auditor.versions)
        if work_id.startswith(BATCH):
            self._validate(work_id, chunks=chunks, cents=3, fine_tuned=False)
        self._start(work_id)
        if work_id.startswith(BATCH):
            assert before.ending is None or self.auditor.versions == versions

    def _start_what_may(self) -> None:
        for work_id in self.due("start"):
            self._start(work_id)

    def _start(self, work_id: str) -> None:
        """It starts, waits or fails, as the bookkeeper knows."""
        status, waits_for = self.auditor.start_of(work_id, now=self.clock.now())
        self.run(work.start_work, work.StartWork(work_id))
        found = self._work(work_id)
        assert (found.status, found.waiting_for) == (status, waits_for)

    def _validate(self, batch_id: str, *, chunks: int, cents: int, fine_tuned: bool) -> None:
        named = [name for _, name in self._models(deleted=True)] if fine_tuned else []
        self.run(
            batches.record_batch_plan,
            batches.RecordBatchPlan(
                batch_id=batch_id,
                chunks=chunk_plans(chunks),
                first_lines=dict.fromkeys(named, 1),
                quote=batch_quote(
                    requests=chunks * LINES_PER_CHUNK,
                    maximum_nano_usd=cents * CENT,
                    models=(BASE, *named),
                    prices=self.auditor.prices[self._work(batch_id).price_version],
                ),
            ),
        )

    def _assign(self, work_id: str, runner_id: str) -> None:
        found = self._work(work_id)
        for chunk in range(len(found.chunks) if isinstance(found, Batch) else 1):
            command = work.AssignWork(work_id=work_id, chunk=chunk, runner_id=runner_id)
            attempt = self.run(work.assign_work, command)
            if attempt is not None:
                self.attempts.append(attempt)

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def every_runner_reports(self, data: st.DataObject) -> None:
        for attempt in self._running():
            report = self._draw_report(attempt, data)
            self.reports.append(report)
            self._deliver(report)

    def _running(self) -> list[Attempt]:
        return [each for each in self.attempts if self._work(each.work_id).is_current(each)]

    def _draw_report(self, attempt: Attempt, data: st.DataObject) -> Report:
        if attempt.work_id.startswith(BATCH):
            plan = self._work(attempt.work_id).plan
            bodies = _chunk_bodies([BASE, *(adapter.name for adapter in plan.adapters)])
        else:
            bodies = _train_bodies()
        return self._report(attempt, data.draw(bodies))

    def _report(self, attempt: Attempt, body: Any) -> Report:
        named = messages.Attempt.of(attempt)
        return Report(attempt=named, seq=1, at=self.clock.now(), body=_placed(attempt, body))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def lose_a_runner(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        self.run(work.lose_attempt, work.LoseAttempt(attempt))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def a_runner_does_not_take_its_attempt(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        before = self._work(attempt.work_id).status
        self.run(work.give_attempt_back, work.LoseAttempt(attempt))
        assert before != "running" or self._work(attempt.work_id).status == "running"

    @precondition(lambda self: self.work_ids)
    @rule()
    def finish_what_can_be(self) -> None:
        for work_id in self.due("finalize"):
            batch = self._work(work_id)
            if not isinstance(batch, Batch) or not batch.may_finalize:
                continue
            done = sum(each.completed for each in batch.chunks if each.state == "finished")
            total = batch.plan.quote.requests if batch.plan else 0
            command = batches.FinishBatch(
                batch_id=batch.id,
                output=self._result(batch.id, "output", done),
                errors=self._result(batch.id, "errors", total - done),
            )
            self.run(batches.finish_batch, command)
            self._changes_nothing(batches.finish_batch, command)

    @rule(minutes=st.sampled_from([1, 50, 50, 50, 700, 1500]))
    def time_passes(self, minutes: int) -> None:
        self.clock.time += timedelta(minutes=minutes)
        self._watch()

    def _watch(self) -> None:
        for work_id in self.due("past due"):
            self.run(work.expire_work, work.ExpireWork(work_id))
        for batch_id in self.due("stops"):
            self.run(batches.stop_waiting, batches.StopWaiting(batch_id))

    def all_work_ends_by_itself(self) -> None:
        """No runner says anything more, though all of them beat: the clock ends everything, and
        nothing is left held, taken or pinned."""
        for _ in range(8):
            self.clock.time += timedelta(hours=13)
            self._start_what_may()
            self._watch()
            self.finish_what_can_be()
        for work_id in self.work_ids:
            found = self._work(work_id)
            assert found.is_terminal, f"{work_id} stays {found.status}"
        for account_id in self.accounts:
            account = self.load(Account, account_id)
            assert account.holds_nano_usd == {}
            assert (account.open_batches, account.open_fine_tunes) == ([], [])
            assert account.training_job_id is None
            assert account.models == sum(owner == account_id for owner, _ in self._models())
        for key in self.keys:
            assert self.load(KeySpend, key[1]).open == {}
        for _, file_id in self.file_ids:
            assert self.load(File, file_id).pins == []
        self.the_books_balance()

    # Runners --------------------------------------------------------------------------------

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), late=st.booleans())
    def some_runner_reports(self, data: st.DataObject, late: bool) -> None:
        """Perhaps of an old attempt; and the broker may keep the message for later."""
        report = self._draw_report(data.draw(st.sampled_from(self.attempts)), data)
        self.reports.append(report)
        if not late:
            self._deliver(report)

    @precondition(lambda self: self.reports)
    @rule(data=st.data())
    def deliver_again_or_late(self, data: st.DataObject) -> None:
        self._deliver(data.draw(st.sampled_from(self.reports)))

    def _deliver(self, report: Report) -> None:
        """Any message, in any order, any number of times: the second time changes nothing."""
        was_current = self._work(report.attempt.work_id).is_current(report.attempt)
        before = dict(self.auditor.versions)
        command = work.RecordReport(report, self.run(work.claimed_objects, report))
        tracking = (f"cluster-{self.history}/progress/0", next(self.offsets))
        self.run(work.record_report, command, tracking=tracking)
        if not was_current:
            assert self.auditor.versions == before, "an older attempt changes nothing (16)"
        with pytest.raises(DuplicateDelivery):
            self.run(work.record_report, command, tracking=tracking)
        self._changes_nothing(work.record_report, command)

    # What must always hold ------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        for account_id in self.accounts:
            self.auditor.check_account(self.load(Account, account_id))
        for _, key_id in self.keys:
            self.auditor.check_key(self.load(KeySpend, key_id))
        charges = 0
        for work_id in self.work_ids:
            self.auditor.check_work(self._work(work_id))
            charges += self.auditor.charges.get(work_id, 0)
            hold = self.load(CreditHold, hold_id(work_id))
            assert (hold is not None) == (work_id in self.auditor.holds)
            if hold is not None:
                self.auditor.check_hold(hold)
        assert charges == sum(self.auditor.captured.values()), "spend is what was captured (8)"

    @precondition(lambda self: self.work_ids)
    @invariant()
    def replay_equals_the_live_state(self) -> None:
        """Invariant 17: what the log folds to is what the writer decides on."""
        work_id = self.work_ids[-1]
        cls: type[Any] = Batch if work_id.startswith(BATCH) else FineTuningJob

        def read(uow: Any, _: None) -> dict[str, Any]:
            return {k: v for k, v in vars(uow.get(cls, work_id)).items() if k != "_pending_events"}

        replayed = {
            k: v for k, v in vars(self.load(cls, work_id)).items() if k != "_pending_events"
        }
        assert self.run(read, None) == replayed
        self._equals_its_snapshot(self.load(cls, work_id))
        for account_id in self.accounts:
            self._equals_its_snapshot(self.load(Account, account_id))

    def _equals_its_snapshot(self, live: Any) -> None:
        state = snapshots.encode(live)
        copy = snapshots.decode(type(live), id=live.id, version=live.version, state=state)
        assert copy == live

    # ----------------------------------------------------------------------------------------

    def _changes_nothing(self, handler: Callable[..., Any], command: Any) -> None:
        before = dict(self.auditor.versions)
        self.run(handler, command)
        assert self.auditor.versions == before, "the second time changes nothing (15)"

    def _work(self, work_id: str) -> Any:
        return self.load(Batch if work_id.startswith(BATCH) else FineTuningJob, work_id)

    def _models(self, *, deleted: bool = False) -> Iterator[tuple[str, str]]:
        """(Account, name) of the models that are not deleted, or of all."""
        for found in map(self._work, self.work_ids):
            if found.status == "succeeded":
                name = fine_tuned_model_name(BASE, found.account_id, found.id)
                if deleted or not self.load(FineTunedModel, name).deleted:
                    yield found.account_id, name

    def _staged(self) -> dict[str, StoredAdapter]:
        """The adapters that open batches have staged."""
        return {
            adapter.name: adapter
            for found in map(self._work, self.work_ids)
            if isinstance(found, Batch) and not found.is_terminal and found.plan is not None
            for adapter in found.plan.adapters
        }

    def _users_of(self, file_id: str) -> list[Any]:
        return [
            each
            for each in map(self._work, self.work_ids)
            if not each.is_terminal and file_id in self._files_of(each)
        ]

    def _secret(self) -> key_commands.KeySecret:
        sha256 = f"{next(self.commands):064x}{self.history:x}"
        return key_commands.KeySecret(sha256=sha256, prefix="gl_test", name="a key")

    def _files_of(self, found: Any) -> list[str]:
        if isinstance(found, Batch):
            return [found.input_file_id]
        return [found.settings.training.file_id]

    def _store_file(self, owner: tuple[str, str], purpose: str) -> str:
        file_id = f"file-{next(self.commands):08x}{self.history:024x}"
        facts = TrainingFacts(
            kind="chat",
            rows=40,
            messages=80,
            token_bounds={BASE: TOKENS_BOUND},
            token_estimates={BASE: 10_000},
            first_row_that_does_not_alternate=None,
        )
        self.run(
            files.store_file,
            files.StoreFile(
                origin=self._origin(owner, "files", file_id),
                file_id=file_id,
                purpose=purpose,  # type: ignore[arg-type]
                object=StoredObject(key=f"files/{file_id}", bytes=100, sha256=digest_of(file_id)),
                filename="rows.jsonl",
                expires_at=self.clock.now() + timedelta(hours=20),
                training=facts if purpose == "fine-tune" else None,
            ),
        )
        self.file_ids.append((owner[0], file_id))
        return file_id

    def _create(self, origin: Origin, kind: str, file_id: str) -> str:
        if kind == "batch":
            body = {
                "input_file_id": file_id,
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            }
            return str(self.run(create_batch, CreateBatch(origin, parse_batch_create(body))))
        create = parse_fine_tuning_create({"model": BASE, "training_file": file_id})
        return str(self.run(create_fine_tuning_job, CreateFineTuningJob(origin, create)))

    def _money(self, account_id: str, key_id: str) -> tuple[int, int, int]:
        account, key = self.load(Account, account_id), self.load(KeySpend, key_id)
        return account.available_nano_usd, account.held_nano_usd, key.total_nano_usd

    def _origin(
        self, owner: tuple[str, str], route: str, body: str, *, key: str | None = None
    ) -> Origin:
        return Origin(
            account_id=owner[0],
            key_id=owner[1],
            route=route,
            body_sha256=body,
            idempotency_key=key,
        )

    def _result(self, batch_id: str, name: str, lines: int) -> batches.ResultFile | None:
        if lines == 0:
            return None
        ref = StoredObject(key=f"files/{batch_id}-{name}", bytes=lines * 10, sha256="1" * 64)
        return batches.ResultFile(object=ref, lines=lines)

    def teardown(self) -> None:
        try:
            self.all_work_ends_by_itself()
        finally:
            self.writer.close()


def digest_of(file_id: str) -> str:
    """Another one for each file, so that a receipt with the wrong one shows."""
    return hashlib.sha256(file_id.encode()).hexdigest()


def _ends_of_training() -> st.SearchStrategy[Any]:
    """Below the minimum, at a fraction, past the quote; or a failure on either side."""
    return st.one_of(
        st.sampled_from([7, 1_000_001, 1_799_999, 9_000_001]).map(
            lambda tokens: _TRAINED.model_copy(update={"trained_tokens": tokens})
        ),
        st.integers(TOKENS_BOUND // 2, TOKENS_BOUND).map(
            lambda tokens: _TRAINED.model_copy(update={"trained_tokens": tokens})
        ),
        st.builds(
            AttemptFailed,
            code=st.sampled_from(["training_failed", "context_too_long", "adapter_too_large"]),
            message=st.just("It failed."),
            trained_tokens=st.sampled_from([0, 123_457]),
        ),
    )


def _chunk_bodies(models: list[str]) -> st.SearchStrategy[Any]:
    usage = st.builds(
        ModelUsage,
        model=st.sampled_from(models),
        input_tokens=st.integers(0, 400_000),
        output_tokens=st.integers(0, 400_000),
    )
    return st.one_of(
        st.just(Started()),
        st.builds(ChunkProgress, completed=st.integers(0, 3), failed=st.just(0)),
        st.integers(0, LINES_PER_CHUNK).flatmap(
            lambda done: st.builds(
                ChunkFinished,
                completed=st.just(done),
                failed=st.just(LINES_PER_CHUNK - done),
                usage=st.tuples(usage) if done else st.just(()),
            )
        ),
        st.integers(0, LINES_PER_CHUNK).flatmap(
            lambda done: st.builds(
                ChunkFinished,
                completed=st.just(done),
                failed=st.just(0),
                usage=st.tuples(usage) if done else st.just(()),
                cancelled=st.just(True),
            )
        ),
        # Of another chunk than it says: more lines than it has.
        st.just(ChunkFinished(completed=LINES_PER_CHUNK, failed=1)),
        st.just(AttemptFailed(code="engine_failed", message="The engine failed.")),
    )


def _placed(attempt: Attempt, body: Any) -> Any:
    """The same, with the objects that the attempt would have stored."""

    prefix = f"chunks/{attempt.work_id}/{attempt.chunk}/{attempt.attempt}/"
    if isinstance(body, TrainFinished):
        prefix = f"adapters/{attempt.work_id}/{attempt.attempt}/"

    def ref(name: str) -> ObjectRef:
        return ObjectRef(key=prefix + name, bytes=9, sha256="2" * 64)

    if isinstance(body, TrainFinished):
        files = {field: ref(name) for field, name in OWN_OBJECTS.items()}
        return body.model_copy(update=files)
    if isinstance(body, ChunkFinished):
        output = ref(CHUNK_OUTPUT) if body.completed else None
        errors = ref(CHUNK_ERRORS) if body.failed else None
        return body.model_copy(update={"output": output, "errors": errors})
    return body


_ADAPTER = ObjectRef(key="adapters/x", bytes=1, sha256="2" * 64)
_TRAINED = TrainFinished(
    trained_tokens=400_000,
    loss_tokens=1,
    steps=9,
    train_loss=0.5,
    eval_rows=2,
    rows_trained=38,
    rows_dropped=0,
    seconds=1.0,
    adapter_config=_ADAPTER,
    adapter_weights=_ADAPTER,
    step_metrics=_ADAPTER,
    base_revision="pinned",
)


def _train_bodies() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.just(Started()),
        st.builds(
            TrainProgress,
            step=st.integers(0, 9),
            steps=st.just(9),
            trained_tokens=st.integers(0, 900_000),
            train_loss=st.just(1.0),
        ),
        st.integers(1, 9_000_000).map(
            lambda tokens: _TRAINED.model_copy(update={"trained_tokens": tokens})
        ),
        st.builds(
            AttemptFailed,
            code=st.sampled_from(["training_failed", "context_too_long", "adapter_too_large"]),
            message=st.just("It failed."),
            trained_tokens=st.integers(0, 900_000),
        ),
    )


class MemoryMachine(LedgerMachine):
    """Over the in-memory store."""

    def open_log(self) -> MemoryWriter:
        self.read = 0
        return MemoryWriter(clock=self.clock, ids=CountingIds(1))

    def new_events(self) -> list[Aggregate.Event]:
        fresh = self.writer.events(after=self.read)
        self.read += len(fresh)
        return [event for _, event in fresh]

    def load(self, cls: type[Any], id: str) -> Any:
        return self.writer.load(cls, id)

    def due(self, what: str) -> Iterable[str]:
        match what:
            case "files":
                return [file_id for _, file_id in self.file_ids]
            case "start" | "past due":
                return self.work_ids
            case _:
                return [each for each in self.work_ids if each.startswith(BATCH)]


CASES = {
    "credit that suffices exactly",
    "a fraction that is rounded up",
    "a charge at its cap",
    "a charge at its minimum",
    "a charge at an older price list",
    "a failure on the customer's side",
    "a failure on the platform's side",
}


def test_any_history_leaves_the_invariants_true() -> None:
    seen: set[str] = set()

    class ObservedMachine(MemoryMachine):
        def teardown(self) -> None:
            super().teardown()
            seen.update(self.auditor.seen)

    run_state_machine_as_test(
        ObservedMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert seen >= CASES, "histories reach every case that decides a charge"


class PostgresMachine(LedgerMachine):
    """Over one database for all histories: each reads only what it wrote itself."""

    database: ClassVar[Database]

    def open_log(self) -> Writer:
        self.store = EventStore(self.database.application_url, projections=INLINE)
        self.connection = self.connect()
        self.position = self.store.last_position()
        ids = CountingIds(self.history * 1_000_000)
        return Writer(self.store, clock=self.clock, ids=ids)

    def connect(self) -> Connection:
        return connect(self.database.application_url, name="test")

    def new_events(self) -> list[Aggregate.Event]:
        rows = self.connection.execute(
            "SELECT * FROM gridline_events WHERE notification_id > %s ORDER BY notification_id",
            (self.position,),
        ).fetchall()
        self.position = rows[-1]["notification_id"] if rows else self.position
        return [_decoded(row) for row in rows]

    def load(self, cls: type[Any], id: str) -> Any:
        return self.store.load(cls, id)

    def due(self, what: str) -> Iterable[str]:
        return due_rows(self, self.connection, what)

    def teardown(self) -> None:
        super().teardown()
        self.rows_say_what_happened()
        self.connection.close()

    def rows_say_what_happened(self) -> None:
        """Nothing is left to do, and statements have every line; cut in two, the second opens with
        what the first closed with."""
        assert work_rows.assigned(self.connection) == ()
        assert work_rows.waiting(self.connection, each=9) == ()
        Follower(self.connect, decode, FOLLOWING).catch_up()
        for account_id in self.accounts:
            wanted = self.auditor.statements[account_id]
            whole = statements.read(self.connection, account_id=account_id, limit=10_000)
            assert [_stated(line) for line in whole.lines] == wanted
            half = statements.read(
                self.connection, account_id=account_id, limit=max(1, len(wanted) // 2)
            )
            rest = statements.read(
                self.connection, account_id=account_id, limit=10_000, after=half.through
            )
            assert half.lines + rest.lines == whole.lines
            assert rest.opening_available_nano_usd == half.closing_available_nano_usd
            assert rest.opening_held_nano_usd == half.closing_held_nano_usd


def test_any_history_leaves_the_invariants_true_on_postgresql(database: Database) -> None:
    run_state_machine_as_test(
        type("OnOneDatabase", (PostgresMachine,), {"database": database}),
        settings=settings(
            max_examples=8,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def _stated(line: statements.StatementLine) -> StatementLine:
    return StatementLine(
        kind=line.kind,
        work_id=line.work_id,
        grant_id=line.grant_id,
        at=line.at,
        available=line.available_nano_usd,
        held=line.held_nano_usd,
        charged=line.charged_nano_usd,
    )


def due_rows(machine: LedgerMachine, connection: Any, what: str) -> list[str]:
    """What the projections say is due of this machine's own."""
    known = {*machine.work_ids, *(file_id for _, file_id in machine.file_ids)}
    found = DUE_ROWS[what](connection, machine.clock.now())
    return [each for each in found if each in known]


DUE_ROWS: dict[str, Callable[[Any, datetime], Iterable[str]]] = {
    "validate": lambda read, _: [b.work_id for b in work_rows.batches_to_validate(read, limit=99)],
    "start": lambda read, _: [row.work_id for row in work_rows.startable(read)],
    "finalize": lambda read, _: [b.work_id for b in work_rows.batches_to_finalize(read, limit=99)],
    "past due": lambda read, now: work_rows.past_due(read, now=now, limit=99),
    "stops": lambda read, now: work_rows.batches_not_stopping(read, now=now, limit=99),
    "files": lambda read, now: file_rows.expired(read, now=now, limit=999),
}
"""What the work projection says is due, by what the machine asks for."""


def _decoded(row: dict[str, Any]) -> Aggregate.Event:
    return decode(
        topic=row["topic"],
        originator_id=row["originator_id"],
        originator_version=row["originator_version"],
        state=bytes(row["state"]),
    )
