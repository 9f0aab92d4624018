"""What the routes need of the control plane, and one request with its caller.

`app.py` alone knows the composition root; routes and the modules beside them see only this. A route
reads through `Call.read` and changes things through `Call.execute`, never otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import structlog
from starlette.requests import Request

from api.file_checks import FileChecks, Turns
from domain.errors import StoreAway
from domain.limits import UPLOAD_BYTES_MAX
from domain.log.unit_of_work import C, CommandContext, CommandWriter, Handler, R
from domain.ports import Clock, IdSource, Objects
from projections.read_model import Connection

log = structlog.stdlib.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class ControlPlane(Protocol):
    """What `adapters.bootstrap` builds, as far as the API uses it."""

    @property
    def writer(self) -> CommandWriter: ...

    @property
    def objects(self) -> Objects: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def ids(self) -> IdSource: ...

    async def read(
        self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs a read function of `projections` in a thread, on a connection of a pool."""
        ...


@dataclass(frozen=True, slots=True)
class Api:
    """What one running API has. `public_url` is what clients reach it by, where that is not what
    they name as the host. `creates_in_flight` are the creates of this process that are being
    decided, by (key, route, body hash); whoever serves it closes `file_checks`.
    Uploads are recorded in `upload_turns`, so that those of one account at once cannot pass a limit
    together."""

    control: ControlPlane
    lease_seconds: float
    public_url: str = ""
    upload_bytes_max: int = UPLOAD_BYTES_MAX
    creates_in_flight: dict[tuple[str, str, str], asyncio.Future[str]] = field(default_factory=dict)
    file_checks: FileChecks = field(default_factory=FileChecks)
    upload_turns: Turns = field(default_factory=Turns)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key the request carries."""

    account_id: str
    key_id: str


@dataclass(frozen=True, slots=True)
class Call:
    """One authenticated request. `route` is `METHOD template`, which names it in idempotency
    records and in the log."""

    request: Request
    caller: Caller
    api: Api
    route: str
    request_id: str

    @property
    def retry_count(self) -> int:
        """Which try of an official SDK this is, from 0; 0 for every other client."""
        text = self.request.headers.get("x-stainless-retry-count", "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0

    async def read(
        self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """See ControlPlane."""
        return await self.api.control.read(function, *args, **kwargs)

    async def delete_objects(self, *keys: str) -> None:
        """Of what is forgotten already: it is gone whatever the store answers. What the store keeps
        is out of reach, and the worker's sweep removes it."""
        for key in keys:
            try:
                await self.api.control.objects.delete(key)
            except StoreAway:
                log.warning("object not deleted", object_key=key)

    async def execute(self, handler: Handler[C, R], command: C) -> R:
        """Runs a command in the caller's name; what it raises is the answer."""
        return await self.api.control.writer.execute(
            handler,
            command,
            CommandContext(
                actor=self.caller.key_id,
                correlation_id=self.request_id,
                causation=self.route,
                command_id=self.request_id,
            ),
        )
