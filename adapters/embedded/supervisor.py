"""`gridlined up`: everything in one tree of processes, with all state in one directory.

It starts PostgreSQL, the broker, the API, the worker and one runner, starts again what dies, and
takes all of them along when it ends, however it ends. It is synchronous and stays in the main
thread, because the kernel ties a child's life to the thread that started it. It must never decide
anything about work or money.
"""

from __future__ import annotations

import dataclasses
import fcntl
import http.client
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from adapters.embedded.broker import Broker
from adapters.embedded.postgres import Postgres
from adapters.embedded.private_file import write_private
from adapters.embedded.process import CannotStart, Child, ask_to_end, launch
from adapters.event_log.migrate import migrate
from adapters.process.settings import Settings
from adapters.process.start import CANNOT_START

PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "api": ("-m", "api"),
    "worker": ("-m", "adapters.worker"),
    "runner": ("-m", "gpu_runners"),
}
METRICS_PORTS = ("worker", "runner")
"""Who serves metrics on ports of their own, the first on the one that the settings name."""
BROKER_CLIENTS = frozenset({"worker", "runner"})

READY_SECONDS_MAX = 120.0
READY_POLL_SECONDS = 0.1
READY_ANSWER_SECONDS_MAX = 1.0
BACKLOG = 2048
"""Connections that wait while the API is started again."""
FRONT = frozenset({"api", "runner"})
"""Who is told first of a planned stop: what they finish, the others still take in."""
START_DEATHS_MAX = 4
"""A program that ends this often before anything is ready would only go on so."""
HURRIED_SECONDS = 2.0
"""Who presses Ctrl-C waits for short work, and no longer."""
BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""The waits before a program's next starts; the last one is repeated."""
STEADY_SECONDS = 60.0
"""A program that ran this long has its earlier deaths forgiven."""

Say = Callable[[str], None]
Prepare = Callable[[Settings], str]
"""Puts into the migrated database what every instance has, and returns the first account's key."""


class _Stop(BaseException):
    """Somebody asked us to end. Not an Exception, so that nothing on the way swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.is_hurried = number == signal.SIGINT


class Supervisor:
    """One running instance. `settings` are the operator's; embedded parts replace their own.
    `programs` are arguments for our interpreter."""

    def __init__(
        self,
        *,
        directory: Path,
        port: int,
        ready_file: Path | None,
        settings: Settings,
        say: Say,
        prepare: Prepare,
        programs: Mapping[str, Sequence[str]] = PROGRAMS,
    ) -> None:
        self._directory = directory.resolve()
        self._ready_file = ready_file
        self._say = say
        self._prepare = prepare
        self._commands = programs
        self._postgres = Postgres(self._directory)
        self._broker = Broker(self._directory)
        self._operator_settings = settings
        self._port = port
        self._listener: socket.socket | None = None
        self._is_ready = False
        self._programs: dict[str, Child] = {}
        self._deaths: dict[str, int] = {}
        self._started_at: dict[str, float] = {}
        self._due: dict[str, float] = {}

    def run(self, environment: Mapping[str, str]) -> None:
        """Returns after an orderly end; `environment` is what the programs get besides our
        settings. Raises CannotStart."""
        with ExitStack() as stack:
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                stack.callback(_lock(self._directory).close)
                if self._ready_file is not None:
                    write_private(self._ready_file, "")
                    self._ready_file.unlink()
            except OSError as error:
                place = error.filename or self._directory
                raise CannotStart(f"{place} cannot be written: {error.strerror}") from error
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, _raise_stop)
            patience = HURRIED_SECONDS
            try:
                self._supervise(environment, self._start(environment))
            except _Stop as stop:
                if not stop.is_hurried:
                    patience = self._operator_settings.stop_seconds
                self._say("Stopping …")
            finally:
                self._stop(patience_seconds=patience)

    @property
    def base_url(self) -> str:
        """What clients are pointed at."""
        return f"{self._root_url}/openai/v1"

    @property
    def _root_url(self) -> str:
        return self._operator_settings.public_url or f"http://{self._address}:{self._port}"

    @property
    def _address(self) -> str:
        host = self._operator_settings.host
        return "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104

    def _start(self, environment: Mapping[str, str]) -> str:
        self._listener = _listen(self._operator_settings.host, self._port)
        self._port = self._listener.getsockname()[1]
        began = time.monotonic()
        self._say(f"Data directory {self._directory}")
        self._say("Starting PostgreSQL …")
        self._postgres.start()
        self._say("Checking the database's schema …")
        migrate(self._postgres.owner_url)
        api_key = self._prepare(self._settings())
        self._say("Starting the broker …")
        self._broker.start()
        self._say("Starting API, worker and runner …")
        for name in self._commands:
            self._launch(name, environment)
        self._await_ready(environment)
        self._is_ready = True
        self._write_ready_file(api_key)
        self._say(f"Ready after {time.monotonic() - began:.1f} s.")
        self._say(_welcome(base_url=self.base_url, api_key=api_key, directory=self._directory))
        return api_key

    def _settings(self) -> Settings:
        mine = self._operator_settings
        beside = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
        return dataclasses.replace(
            mine,
            database_url=self._postgres.application_url,
            kafka_bootstrap=self._broker.bootstrap,
            kafka_cluster_id=self._broker.cluster_id,
            kafka_idempotent=False,
            kafka_groups=False,
            object_store_url=mine.object_store_url or (self._directory / "objects").as_uri(),
            weights_dir=mine.weights_dir or str(self._directory / "weights"),
            engines_python=mine.engines_python or (str(beside) if beside.exists() else ""),
            drain_seconds=min(mine.drain_seconds, mine.stop_seconds),
            port=self._port,
            public_url=self._root_url,
        )

    def _launch(self, name: str, environment: Mapping[str, str]) -> None:
        settings, inherited = self._settings(), list[int]()
        if settings.metrics_port and name in METRICS_PORTS:
            port = settings.metrics_port + METRICS_PORTS.index(name)
            settings = dataclasses.replace(settings, metrics_port=port)
        if name == "api" and self._listener is not None:
            inherited.append(self._listener.fileno())
            settings = dataclasses.replace(settings, listen_fd=self._listener.fileno())
        self._programs[name] = launch(
            name,
            [sys.executable, *self._commands[name]],
            log=self._directory / "logs" / f"{name}.log",
            environment={**environment, **settings.to_environment()},
            inherited=inherited,
        )
        self._started_at[name] = time.monotonic()
        self._due.pop(name, None)

    def _await_ready(self, environment: Mapping[str, str]) -> None:
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not _answers_ready(self._address, self._port):
            if time.monotonic() > deadline:
                raise CannotStart(
                    f"Not ready after {READY_SECONDS_MAX:.0f} s; see {self._directory / 'logs'}"
                )
            self._look_after_children(environment, wait_seconds=READY_POLL_SECONDS)
            for name, deaths in self._deaths.items():
                if deaths >= START_DEATHS_MAX:
                    raise CannotStart(f"{name} does not start:\n{self._programs[name].log_tail()}")

    def _supervise(self, environment: Mapping[str, str], api_key: str) -> NoReturn:
        while True:
            if self._look_after_children(environment, wait_seconds=None):
                self._write_ready_file(api_key)

    def _look_after_children(
        self, environment: Mapping[str, str], *, wait_seconds: float | None
    ) -> bool:
        """Waits for a death, a restart that is due or the end of the time, and does what is to be
        done then. True if a process was started."""
        if self._due:
            next_start = max(0.0, min(self._due.values()) - time.monotonic())
            wait_seconds = min(next_start, next_start if wait_seconds is None else wait_seconds)
        _wait_for_a_death(self._children(), seconds=wait_seconds)
        restarted = self._restart_embedded(environment)
        for name, child in list(self._programs.items()):
            if child.process.poll() is not None and name not in self._due:
                self._schedule_restart(name, child)
        for name in [name for name, due in self._due.items() if due <= time.monotonic()]:
            self._launch(name, environment)
            self._say(f"Started {name} again.")
            restarted = True
        return restarted

    def _restart_embedded(self, environment: Mapping[str, str]) -> bool:
        restarted = False
        if self._postgres.child.process.poll() is not None:
            self._say("PostgreSQL ended; starting it again …")
            self._postgres.child.kill_group()
            self._postgres.start()
            restarted = True
        if self._broker.child.process.poll() is not None:
            self._say("The broker ended; starting another one, and its clients again …")
            self._broker.child.kill_group()
            self._broker.start()
            for name in BROKER_CLIENTS & self._commands.keys():
                self._programs[name].kill_group()
                self._launch(name, environment)
            restarted = True
        return restarted

    def _schedule_restart(self, name: str, child: Child) -> None:
        """Raises CannotStart where another try at the first start would end in the same way."""
        child.kill_group()
        if child.process.returncode == CANNOT_START and not self._is_ready:
            raise CannotStart(f"{name} cannot start: {child.log_tail().splitlines()[-1]}")
        if time.monotonic() - self._started_at[name] > STEADY_SECONDS:
            self._deaths[name] = 0
        deaths = self._deaths.get(name, 0)
        self._deaths[name] = deaths + 1
        wait = BACKOFF_SECONDS[min(deaths, len(BACKOFF_SECONDS) - 1)]
        self._due[name] = time.monotonic() + wait
        self._say(
            f"{name} ended with status {child.process.returncode} (see {child.log}); "
            f"starting it again in {wait:.1f} s …"
        )

    def _children(self) -> list[Child]:
        waiting = [child for name, child in self._programs.items() if name not in self._due]
        return [self._postgres.child, self._broker.child, *waiting]

    def _write_ready_file(self, api_key: str) -> None:
        if self._ready_file is None:
            return
        pids = {child.name: child.pid for child in self._children()}
        ready = {
            "base_url": self.base_url,
            "api_key": api_key,
            "pid": os.getpid(),
            "data_dir": str(self._directory),
            "processes": pids,
        }
        write_private(self._ready_file, json.dumps(ready))

    def _stop(self, *, patience_seconds: float) -> None:
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)
        if self._listener is not None:
            self._listener.close()
        with suppress(_Stop):  # who asks again does not want to wait
            front = [child for name, child in self._programs.items() if name in FRONT]
            ask_to_end(front, patience_seconds=patience_seconds)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        ask_to_end(list(self._programs.values()), patience_seconds=HURRIED_SECONDS)
        for child in self._programs.values():
            child.kill_group()
        self._broker.stop()
        self._postgres.stop()
        self._say("Stopped.")


def _raise_stop(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise _Stop(number)


def _lock(directory: Path) -> TextIO:
    """Holds the directory for as long as the file is open; the kernel lets go of it with us."""
    held = (directory / "lock").open("a+", encoding="ascii")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.seek(0)
        pid = held.read().strip()
        held.close()
        raise CannotStart(f"Another `gridlined up` (pid {pid}) already uses {directory}") from None
    held.truncate(0)
    held.write(str(os.getpid()))
    held.flush()
    return held


def _listen(host: str, port: int) -> socket.socket:
    """Ours for as long as we run, so that connections wait while the API is started again."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise CannotStart(
            f"Port {port} of {host} cannot be had ({error.strerror}); choose another with --port, "
            "or 0 for any that is free"
        ) from error


def _wait_for_a_death(children: Sequence[Child], *, seconds: float | None) -> None:
    if any(child.process.poll() is not None for child in children):
        return
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for child in children:
            descriptor = os.pidfd_open(child.pid)
            stack.callback(os.close, descriptor)
            selector.register(descriptor, selectors.EVENT_READ)
        selector.select(seconds)


def _answers_ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=READY_ANSWER_SECONDS_MAX)
    try:
        connection.request("GET", "/readyz")
        answer = json.loads(connection.getresponse().read())
        return bool(answer["ready"] and answer["runners"])
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return False
    finally:
        connection.close()


def _welcome(*, base_url: str, api_key: str, directory: Path) -> str:
    return f"""
  Base URL  {base_url}
  API key   {api_key}  (kept in {directory / "api-key"})
  Logs      {directory / "logs"}

Try it:
  curl {base_url}/models -H "Authorization: Bearer {api_key}"
or, with OpenAI's own client:
  client = OpenAI(base_url="{base_url}", api_key="{api_key}")

Ctrl-C stops everything; the data stays.
"""
