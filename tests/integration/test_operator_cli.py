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
from adapters.settings import Settings
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
        ["accounts", "create", "--email", "a@example.com", "--credit-usd", "0.0000000001"],
        ["accounts", "create", "--email", "a@example.com", "--credit-usd", "lots"],
        ["accounts", "create", "--email", "a@example.com", "--credit-usd=-5"],
        ["accounts", "create", "--email", "a@example.com", "--credit-usd", "1e12"],
        ["accounts", "create", "--email", "", "--credit-usd", "1"],
        ["accounts", "create", "--email", "a\n@example.com", "--credit-usd", "1"],
        ["keys", "limit", "key_" + "0" * 32, "--daily-usd", "lots"],
        ["rebuild", "nonsense"],
        ["keys", "list", "--account", "a", "--data", "/nonexistent"],
    ],
)
def test_a_refusal_is_one_line_and_exit_status_one(gridlined: Run, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, str)
    assert ended.value.code.startswith("gridlined: ")
    assert "\n" not in ended.value.code


@pytest.mark.parametrize("count", ["-1", "x", "1.5", "3000000000"])
def test_a_limit_that_is_no_count_is_wrong_usage(
    gridlined: Run, capsys: pytest.CaptureFixture[str], count: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["accounts", "create", "--email", "a@example.com", f"--open-batches={count}"])
    assert ended.value.code == 2
    assert "--open-batches: must be an integer from 0 to 999,999" in capsys.readouterr().err


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
