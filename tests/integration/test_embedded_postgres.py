"""The embedded PostgreSQL starts, survives being killed, and never outlives its supervisor."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from adapters.embedded.postgres import APPLICATION, OWNER, Postgres, end_processes_of
from adapters.embedded.process import CannotStart

SECONDS_MAX = 5.0


@pytest.fixture
def server(quick_path: Path) -> Iterator[Postgres]:
    server = Postgres(quick_path)
    server.start()
    yield server
    server.stop()
    assert processes_below(quick_path) == []


def processes_below(directory: Path) -> list[int]:
    """PostgreSQL processes that work in this directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name().startswith("postgres") and process.cwd().startswith(str(directory)):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def remember(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE remembered AS SELECT 42 AS answer")


def remembered(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT answer FROM remembered").fetchone()
    assert row is not None
    return int(row[0])


def test_only_the_owner_may_create_tables(server: Postgres) -> None:
    remember(server.owner_url)
    with (
        psycopg.connect(server.application_url) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("CREATE TABLE mine ()")


def test_nobody_enters_without_a_password_or_over_the_network(server: Postgres) -> None:
    without = server.application_url.replace(server.application_url.split(":")[2].split("@")[0], "")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(without)
    assert psutil.Process(server.child.pid).net_connections("inet") == []


def test_secrets_and_sockets_are_private(server: Postgres, quick_path: Path) -> None:
    assert stat.S_IMODE((quick_path / "postgres-passwords.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((quick_path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((quick_path / "postgres").stat().st_mode) == 0o700


def test_a_clean_stop_keeps_the_data(server: Postgres) -> None:
    remember(server.owner_url)
    server.stop()
    server.start()
    assert remembered(server.owner_url) == 42


def test_a_killed_server_starts_again_with_its_data_while_backends_linger(server: Postgres) -> None:
    remember(server.owner_url)
    busy = psycopg.connect(server.owner_url, autocommit=True)
    busy.execute("SELECT 1")
    os.kill(server.child.pid, signal.SIGKILL)
    server.child.process.wait()
    server.start()
    busy.close()
    assert remembered(server.owner_url) == 42


def test_a_pid_file_that_names_a_stranger_is_no_obstacle(
    server: Postgres, quick_path: Path
) -> None:
    remember(server.owner_url)
    os.kill(server.child.pid, signal.SIGKILL)
    server.child.process.wait()
    end_processes_of(quick_path / "postgres")
    pid_file = quick_path / "postgres" / "postmaster.pid"
    pid_file.write_text("\n".join([str(os.getppid()), *pid_file.read_text().splitlines()[1:]]))
    server.start()
    assert remembered(server.owner_url) == 42


def test_a_server_dies_with_a_supervisor_that_is_killed(quick_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from adapters.embedded.postgres import Postgres\n"
        "p = Postgres(Path(sys.argv[1])); p.start(); print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(quick_path)], stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"up\n"
        assert processes_below(quick_path) != []
        supervisor.kill()
    wait_until(lambda: processes_below(quick_path) == [])
    again = Postgres(quick_path)
    again.start()
    again.stop()


def test_an_interrupted_first_start_begins_afresh(quick_path: Path) -> None:
    (quick_path / "postgres.new").mkdir()
    (quick_path / "postgres.new" / "PG_VERSION").write_text("18\n")
    server = Postgres(quick_path)
    server.start()
    with psycopg.connect(server.application_url) as connection:
        assert connection.info.user == APPLICATION
    server.stop()


def test_data_of_another_major_version_is_refused_and_untouched(quick_path: Path) -> None:
    data = quick_path / "postgres"
    data.mkdir()
    (data / "PG_VERSION").write_text("12\n")
    with pytest.raises(CannotStart, match="written by PostgreSQL 12"):
        Postgres(quick_path).start()
    assert [path.name for path in data.iterdir()] == ["PG_VERSION"]


def test_a_path_too_long_for_a_socket_still_works(quick_path: Path) -> None:
    directory = quick_path / ("d" * 120)
    directory.mkdir()
    server = Postgres(directory)
    server.start()
    with psycopg.connect(server.owner_url) as connection:
        assert connection.info.user == OWNER
        sockets = Path(connection.info.host)
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    server.stop()
    sockets.rmdir()
