"""The real API over HTTP: uvicorn in a thread, PostgreSQL, objects on disk.

One for the session; each test has an account of its own. Every answer that a test's client gets is
judged by `strict.py`. There is no worker: what it would do is done by the test, with the same
commands.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from openai import AsyncOpenAI, OpenAI

from adapters.bootstrap import ControlPlane, control_plane
from adapters.embedded.postgres import Postgres
from adapters.process.settings import Settings
from api.__main__ import server_config
from api.app import create_app
from api.control import Api
from domain.commands.accounts import AccountOpened, OpenAccount, open_account
from domain.commands.keys import KeySecret
from domain.commands.prices import PublishPrices, publish_prices
from domain.ledger.account import AccountLimits
from domain.ledger.money import nano_usd
from domain.ledger.prices import PriceList
from domain.log.unit_of_work import CommandContext
from tests.acceptance import strict
from tests.conftest import cloned_database

PRICES = Path(__file__).parents[2] / "domain" / "ledger" / "prices.json"
UPLOAD_BYTES_MAX = 3_000_000
SECONDS_MAX = 5
LIMITS = AccountLimits(open_fine_tunes=3, open_batches=10)


@dataclass(frozen=True, slots=True)
class Tenant:
    """An account and the text of its key."""

    account_id: str
    key_id: str
    key: str


@dataclass(frozen=True, slots=True)
class RunningApi:
    """`plane` is its control plane, for what a worker would do."""

    plane: ControlPlane
    root: str
    objects_directory: Path

    def run(self, handler: Any, command: Any) -> Any:
        """A command, as the worker or the operator would run it."""
        context = CommandContext(
            actor="system:test", correlation_id="test", causation="test", command_id="test"
        )
        return self.plane.writer.submit(handler, command, context).result(SECONDS_MAX)

    def new_tenant(self, *, credit_usd: int = 25, limits: AccountLimits = LIMITS) -> Tenant:
        """An account with a key."""
        name = uuid.uuid4().hex
        key = f"gl_{name}"
        opened: AccountOpened = self.run(
            open_account,
            OpenAccount(
                email=f"{name}@example.com",
                limits=limits,
                credit_nano_usd=nano_usd(credit_usd),
                secret=KeySecret(
                    sha256=hashlib.sha256(key.encode()).hexdigest(), prefix=key[:6], name=name
                ),
            ),
        )
        return Tenant(account_id=opened.account_id, key_id=opened.key_id, key=key)


@dataclass(frozen=True, slots=True)
class Served:
    """The running API for one test, with the test's account; its clients are closed with it."""

    api: RunningApi
    tenant: Tenant
    clients: ExitStack

    @property
    def plane(self) -> ControlPlane:
        return self.api.plane

    @property
    def root(self) -> str:
        return self.api.root

    @property
    def run(self) -> Callable[[Any, Any], Any]:
        return self.api.run

    @property
    def new_tenant(self) -> Callable[[], Tenant]:
        return self.api.new_tenant

    @property
    def base_url(self) -> str:
        return f"{self.root}/openai/v1"

    @property
    def address(self) -> tuple[str, int]:
        url = httpx2.URL(self.root)
        assert url.port is not None
        return url.host, url.port

    def http(self, key: str | None = None, **headers: str) -> httpx2.Client:
        """A plain client whose answers are all judged; without `key` the tenant's is sent."""
        authorization = {"authorization": f"Bearer {key or self.tenant.key}"}
        return httpx2.Client(
            base_url=self.root,
            headers=authorization | headers,
            timeout=SECONDS_MAX,
            event_hooks={"response": [_judge]},
        )

    def openai(self, key: str | None = None) -> OpenAI:
        """The official synchronous SDK."""
        return self.clients.enter_context(
            OpenAI(
                base_url=self.base_url,
                api_key=key or self.tenant.key,
                _strict_response_validation=True,
                http_client=httpx2.Client(timeout=SECONDS_MAX, event_hooks={"response": [_judge]}),
            )
        )

    def async_openai(self) -> AsyncOpenAI:
        """The official asynchronous SDK, to be closed by the test."""
        return AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.tenant.key,
            _strict_response_validation=True,
            http_client=httpx2.AsyncClient(
                timeout=SECONDS_MAX, event_hooks={"response": [_judge_async]}
            ),
        )

    def stored_objects(self) -> set[str]:
        """The keys of all objects, of other tests' too, and what is being written."""
        root = self.api.objects_directory
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def running_api(
    postgres: Postgres, template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningApi]:
    """The API on a port of its own, over an empty database with published prices."""
    directory = tmp_path_factory.mktemp("objects")
    with (
        cloned_database(postgres, template_database) as database,
        control_plane(
            Settings(database_url=database.application_url, object_store_url=directory.as_uri())
        ) as plane,
        serving(Api(control=plane, lease_seconds=30, upload_bytes_max=UPLOAD_BYTES_MAX)) as root,
    ):
        api = RunningApi(plane=plane, root=root, objects_directory=directory)
        api.run(publish_prices, PublishPrices(PriceList.from_json(PRICES.read_bytes())))
        yield api


@contextmanager
def serving(api: Api) -> Iterator[str]:
    """The URL at which it is served, by a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(server_config(create_app(api), stop_seconds=5.0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        host, port = listener.getsockname()
        yield f"http://{host}:{port}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def served(running_api: RunningApi) -> Iterator[Served]:
    """The API with an account of the test's own."""
    with ExitStack() as clients:
        yield Served(api=running_api, tenant=running_api.new_tenant(), clients=clients)


def _judge(response: httpx2.Response) -> None:
    response.read()
    _check(response)


async def _judge_async(response: httpx2.Response) -> None:
    await response.aread()
    _check(response)


def _check(response: httpx2.Response) -> None:
    strict.check(
        method=response.request.method,
        path=response.request.url.path,
        status=response.status_code,
        headers={name.lower(): value for name, value in response.headers.items()},
        body=response.content,
    )
