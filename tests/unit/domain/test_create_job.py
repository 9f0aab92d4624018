"""Creating a fine-tuning job, given what the account has: slots, names, and what is decided before
its files are read."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import domain
from adapters.event_log.memory_store import MemoryWriter
from domain.catalog import CATALOG
from domain.commands import accounts, files, prices
from domain.commands import keys as key_commands
from domain.commands.create_fine_tuning_job import (
    CreateFineTuningJob,
    admit_fine_tuning_job,
    create_fine_tuning_job,
)
from domain.commands.idempotency import Origin
from domain.errors import LimitExceeded, SlotsFull
from domain.inputs.job_create import parse_fine_tuning_create
from domain.inputs.training_file import TrainingFacts
from domain.ledger.account import Account, AccountLimits
from domain.ledger.prices import PriceList
from domain.limits import MODELS_PER_ACCOUNT_MAX
from domain.log.stored import StoredObject
from domain.log.unit_of_work import CommandContext, Handler
from domain.work.fine_tuning_job import FineTuningJob
from tests.fakes import FakeClock

BASE = "smollm2-135m-instruct"
PRICES = PriceList.from_json((Path(domain.__file__).parent / "ledger" / "prices.json").read_bytes())
FACTS = TrainingFacts(
    kind="chat",
    rows=12,
    messages=24,
    token_bounds=dict.fromkeys(CATALOG, 1_000),
    token_estimates=dict.fromkeys(CATALOG, 500),
    sample_estimates={},
    first_row_that_does_not_alternate=None,
)


class Ids:
    """Job ids come in pairs that begin alike: as often as chance would never have it."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def new(self, prefix: str) -> str:
        number = next(self._next)
        return f"{prefix}{number // 2:012x}{number:020x}"


class Customer:
    """An account with credit and one training file, on a log in memory."""

    def __init__(self, *, open_fine_tunes: int) -> None:
        self.clock = FakeClock()
        self.writer = MemoryWriter(clock=self.clock, ids=Ids())
        self.run(prices.publish_prices, prices.PublishPrices(PRICES))
        opened: accounts.AccountOpened = self.run(
            accounts.open_account,
            accounts.OpenAccount(
                email="someone@example.com",
                limits=AccountLimits(open_fine_tunes=open_fine_tunes, open_batches=1),
                credit_nano_usd=10**12,
                secret=key_commands.KeySecret(sha256="0" * 64, prefix="gl_abc", name="first"),
            ),
        )
        self.account_id, self.key_id = opened.account_id, opened.key_id
        self.run(files.store_file, self._file())

    def run(self, handler: Handler[Any, Any], command: Any) -> Any:
        context = CommandContext(
            actor="system:test", correlation_id="c", causation="test", command_id="one"
        )
        return self.writer.submit(handler, command, context).result()

    def wanted(self, *, key: str | None = None, **body: Any) -> CreateFineTuningJob:
        create = parse_fine_tuning_create({"model": BASE, "training_file": "file-1", **body})
        return CreateFineTuningJob(origin=self._origin("POST /jobs", key), create=create)

    def create(self, **body: Any) -> str:
        job_id: str = self.run(create_fine_tuning_job, self.wanted(**body))
        return job_id

    @property
    def account(self) -> Account:
        account = self.writer.load(Account, self.account_id)
        assert account is not None
        return account

    def _origin(self, route: str, key: str | None = None) -> Origin:
        return Origin(
            account_id=self.account_id,
            key_id=self.key_id,
            route=route,
            body_sha256="1",
            idempotency_key=key,
        )

    def _file(self) -> files.StoreFile:
        return files.StoreFile(
            origin=self._origin("POST /files"),
            file_id="file-1",
            purpose="fine-tune",
            object=StoredObject(key="files/file-1", bytes=1_000, sha256="0" * 64),
            filename="t.jsonl",
            expires_at=self.clock.now() + timedelta(days=30),
            training=FACTS,
        )


def test_the_first_twelve_digits_of_a_job_id_are_its_accounts_alone() -> None:
    customer = Customer(open_fine_tunes=20)
    made = [customer.create(model=model) for model in (BASE, "qwen2.5-0.5b-instruct") * 10]
    assert len({job_id[:18] for job_id in made}) == 20


def test_an_account_holds_a_hundred_models_with_those_that_open_jobs_will_make() -> None:
    customer = Customer(open_fine_tunes=MODELS_PER_ACCOUNT_MAX + 1)
    for _ in range(MODELS_PER_ACCOUNT_MAX):
        customer.create()
    with pytest.raises(LimitExceeded) as refused:
        customer.create()
    assert not isinstance(refused.value, SlotsFull)
    assert not refused.value.retryable
    assert refused.value.limit == {"name": "fine_tuned_models", "limit": 100, "in_use": 100}


def test_admission_names_the_files_to_read_and_changes_nothing() -> None:
    customer = Customer(open_fine_tunes=1)
    before = len(list(customer.writer.events()))
    admission = customer.run(admit_fine_tuning_job, customer.wanted(validation_file="file-1"))
    assert [(role, stored.key) for role, stored in admission.files] == [
        ("training file", "files/file-1"),
        ("validation file", "files/file-1"),
    ]
    assert len(list(customer.writer.events())) == before
    customer.create()
    with pytest.raises(SlotsFull):
        customer.run(admit_fine_tuning_job, customer.wanted())


def test_admission_knows_what_the_same_key_made_before_a_limit_would_refuse_it() -> None:
    customer = Customer(open_fine_tunes=1)
    job_id = customer.create(key="k")
    admission = customer.run(admit_fine_tuning_job, customer.wanted(key="k"))
    assert (admission.made, admission.files) == (job_id, ())
    assert customer.account.open_fine_tunes == [job_id]


def test_a_quote_pins_the_list_that_is_in_force_and_not_one_of_a_later_day() -> None:
    customer = Customer(open_fine_tunes=2)
    later = PRICES.model_copy(
        update={"version": 2, "effective_from": customer.clock.now() + timedelta(days=1)}
    )
    customer.run(prices.publish_prices, prices.PublishPrices(later))
    pinned = []
    for _ in range(2):
        job = customer.writer.load(FineTuningJob, customer.create())
        assert job is not None
        pinned.append(job.settings.quote.price_version)
        customer.clock.advance(timedelta(days=1))
    assert pinned == [1, 2]
