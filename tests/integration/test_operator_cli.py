"""`gridlined` as an operator types it, against a real database."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from adapters.event_log.postgres import connect
from adapters.operators.actions import open_operator
from adapters.operators.cli import main
from adapters.process.settings import Settings
from projections.money import keys
from tests.conftest import Database

Run = Callable[..., Any]


@pytest.fixture
def gridlined(
    database: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command line and returns the JSON that it printed."""
    monkeypatch.setenv("GRIDLINE_DATABASE_URL", database.application_url)

    def run(*arguments: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--json"])
        assert ended.value.code == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()][-1]

    return run


@pytest.fixture
def account(gridlined: Run) -> dict[str, str]:
    opened: dict[str, str] = gridlined(
        "accounts", "create", "--email", "a@example.com", "--credit-usd", "25",
        "--open-fine-tunes", "3", "--open-batches", "10",
    )  # fmt: skip
    return opened


def bearer(database: Database, key: str) -> keys.Bearer | None:
    with connect(database.application_url, name="test") as connection:
        return keys.authenticate(connection, hashlib.sha256(key.encode()).hexdigest())


def test_a_new_account_has_its_credit_limits_and_a_key_that_opens_it(
    gridlined: Run, account: dict[str, str], database: Database
) -> None:
    found = bearer(database, account["api_key"])
    assert found is not None
    assert found.account_id == account["account_id"]
    with psycopg.connect(database.application_url) as connection:
        row = connection.execute(
            "SELECT available_nano_usd, open_fine_tunes_max, open_batches_max FROM accounts"
        ).fetchone()
    assert row == (25_000_000_000, 3, 10)


def test_a_grant_adds_to_the_credit(
    gridlined: Run, account: dict[str, str], database: Database
) -> None:
    gridlined("accounts", "grant", "--account", account["account_id"], "--credit-usd", "0.5")
    with psycopg.connect(database.application_url) as connection:
        row = connection.execute("SELECT available_nano_usd FROM accounts").fetchone()
    assert row == (25_500_000_000,)


def test_a_grant_that_is_sent_again_with_its_key_grants_once(
    gridlined: Run,
    account: dict[str, str],
    database: Database,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grant = ["accounts", "grant", "--account", account["account_id"], "--note=Ada, by wire"]
    first = gridlined(*grant, "--credit-usd=5", "--idempotency-key=wire-17")
    assert gridlined(*grant, "--credit-usd=5.00", "--idempotency-key=wire-17") == {
        **first, "granted_usd": "5.00",
    }  # fmt: skip
    assert gridlined(*grant, "--credit-usd=1")["grant_id"] != first["grant_id"]
    for wrong in ("--credit-usd=6", "--credit-usd=5 --note=another"):
        with pytest.raises(SystemExit) as ended:
            main([*grant, "--idempotency-key=wire-17", *wrong.split()])
        assert ended.value.code == 1
        assert "was used with another request" in capsys.readouterr().err
    with psycopg.connect(database.application_url) as connection:
        row = connection.execute("SELECT available_nano_usd FROM accounts").fetchone()
        logged = connection.execute(
            "SELECT count(*) FROM gridline_events WHERE position('by wire'::bytea IN state) > 0"
        ).fetchone()
    assert (row, logged) == ((31_000_000_000,), (0,))


def test_a_note_that_is_no_line_is_refused(gridlined: Run, account: dict[str, str]) -> None:
    grant = ["accounts", "grant", "--account", account["account_id"], "--credit-usd=1"]
    with pytest.raises(SystemExit) as ended:
        main([*grant, f"--note={'x' * 501}"])
    assert ended.value.code == 1


def test_keys_are_made_listed_and_revoked_without_their_text_being_kept(
    gridlined: Run, account: dict[str, str], database: Database
) -> None:
    second = gridlined("keys", "create", "--account", account["account_id"], "--name", "ci")
    listed = gridlined("keys", "list", "--account", account["account_id"])
    assert [key["key_id"] for key in listed] == [account["key_id"], second["key_id"]]
    assert second["api_key"].startswith(listed[1]["prefix"])
    assert second["api_key"] not in json.dumps(listed)
    gridlined("keys", "revoke", second["key_id"])
    assert bearer(database, second["api_key"]) is None
    assert bearer(database, account["api_key"]) is not None


def test_a_price_list_is_published_once(gridlined: Run, database: Database) -> None:
    gridlined("prices", "publish")
    gridlined("prices", "publish")
    with psycopg.connect(database.application_url) as connection:
        row = connection.execute("SELECT count(*) FROM price_lists").fetchone()
    assert row == (1,)


def test_read_models_are_rebuilt_from_the_log(
    gridlined: Run, account: dict[str, str], database: Database
) -> None:
    gridlined("rebuild", "accounts")
    assert bearer(database, account["api_key"]) is not None
    with psycopg.connect(database.application_url) as connection:
        row = connection.execute("SELECT id, available_nano_usd FROM accounts").fetchone()
    assert row == (account["account_id"], 25_000_000_000)


@pytest.mark.parametrize(
    "arguments",
    [
        ["accounts", "grant", "--account", "acct_" + "0" * 32, "--credit-usd", "1"],
        ["accounts", "grant", "--account", "acct_" + "0" * 32, "--credit-usd", "0"],
        ["accounts", "create", "--email", "a@example.com", "--credit-usd", "999999999999"],
        ["accounts", "create", "--email", "", "--credit-usd", "1"],
        ["accounts", "create", "--email", "a\n@example.com", "--credit-usd", "1"],
        ["rebuild", "nonsense"],
    ],
)
def test_a_refusal_is_one_line_and_exit_status_one(
    gridlined: Run, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gridlined: ")


@pytest.mark.parametrize(
    "amount", ["lots", "-5", "1e12", "1_0", "１０", "٣", "+1", " 1", "1.", ".5", "0.0000000001", ""]
)
@pytest.mark.parametrize(
    "command",
    [
        ["accounts", "create", "--email=a@example.com", "--credit-usd"],
        ["accounts", "grant", "--account=acct_1", "--credit-usd"],
        ["keys", "limit", "key_1", "--daily-usd"],
        ["keys", "limit", "key_1", "--total-usd"],
    ],
)
def test_what_people_do_not_write_as_an_amount_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], command: list[str], amount: str
) -> None:
    *start, option = command
    with pytest.raises(SystemExit) as ended:
        main([*start, f"{option}={amount}"])
    assert ended.value.code == 2
    assert f"'{option}': must be an amount of USD" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["-1", "x", "1.5", "3000000000", "1_0", "８"])
def test_a_limit_that_is_no_count_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], count: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["accounts", "create", "--email", "a@example.com", f"--open-batches={count}"])
    assert ended.value.code == 2
    assert "'--open-batches': must be an integer from 0 to 999,999" in capsys.readouterr().err


COMMANDS = [
    "up", "accounts create", "accounts grant", "keys create", "keys list", "keys revoke",
    "keys limit", "audit verify", "prices publish", "rebuild", "migrate",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_ends_with_examples_of_it(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    examples = capsys.readouterr().out.partition("Examples:")[2].splitlines()[1:]
    assert examples
    assert all(line.strip().startswith(f"gridlined {command}") for line in examples)


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in {command.split()[0] for command in COMMANDS})
    assert "--install-completion" in told


def test_what_an_operator_orders_stays_in_the_log_with_their_name(
    gridlined: Run, account: dict[str, str], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRIDLINE_OPERATOR", "ada.l")
    gridlined("accounts", "grant", "--account", account["account_id"], "--credit-usd", "1")
    monkeypatch.setenv("GRIDLINE_OPERATOR", "Ada Lovelace <ada@example.org>")
    with pytest.raises(SystemExit) as ended:
        main(["keys", "list", "--account", account["account_id"]])
    assert ended.value.code == 2
    with psycopg.connect(database.application_url) as connection:
        rows = connection.execute(
            "SELECT state FROM gridline_events WHERE originator_id = %s", (account["account_id"],)
        ).fetchall()
    actors = [json.loads(bytes(row[0]))["envelope"]["actor"] for row in rows]
    assert actors[-1] == "system:operator:ada.l"


def test_stored_objects_are_read_where_the_audit_is_asked_to(
    gridlined: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRIDLINE_OBJECT_STORE_URL", tmp_path.as_uri())
    assert gridlined("audit", "verify", "--objects")["objects"] == 0
    assert gridlined("audit", "verify")["objects"] is None


def test_the_first_account_is_opened_once_whenever_the_start_was_killed(
    database: Database, tmp_path: Path
) -> None:
    key_file = tmp_path / "api-key"
    key_file.write_text("gl_written_before_the_kill")
    settings = Settings(database_url=database.application_url)
    with (
        open_operator(settings) as operator,
        connect(settings.database_url, name="test") as connection,
    ):
        key = operator.open_first_account(connection, key_file)
        assert operator.open_first_account(connection, key_file) == key
        row = connection.execute("SELECT count(*) AS accounts FROM accounts").fetchone()
    assert key == "gl_written_before_the_kill"
    assert row == {"accounts": 1}
    assert bearer(database, key) is not None
