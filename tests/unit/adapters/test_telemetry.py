"""What a process logs: a JSON line an entry, and no text that might quote what customers sent."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from adapters.process.settings import Unusable
from adapters.process.telemetry import configure_logging
from domain.errors import InvalidRequest


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_an_entry_is_one_json_line_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("worker", level="INFO")

    log = structlog.stdlib.get_logger("adapters.somewhere")
    log.info("two\nlines", job_id="ftjob-1", rows=3)
    log.debug("too quiet")

    [entry] = logged(capsys)
    assert entry.pop("at").startswith("20")
    assert entry == {
        "level": "info",
        "logger": "adapters.somewhere",
        "process": "worker",
        "message": "two\nlines",
        "job_id": "ftjob-1",
        "rows": 3,
    }


def test_what_a_library_logs_has_the_same_shape(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("api", level="INFO")

    logging.getLogger("some.library").warning("lost %s of %s", 1, 2)

    [entry] = logged(capsys)
    assert (entry["process"], entry["logger"]) == ("api", "some.library")
    assert (entry["level"], entry["message"]) == ("warning", "lost 1 of 2")


@pytest.mark.parametrize("error", [ValueError("MARKER-7391"), InvalidRequest("MARKER-7391")])
def test_the_text_of_an_exception_stays_out_but_its_place_is_told(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    configure_logging("api", level="INFO")
    own, library = structlog.stdlib.get_logger("ours"), logging.getLogger("theirs")

    try:
        raise error
    except Exception:
        own.exception("it broke")
        library.exception("it broke")
    own.error("it broke", exc_info=error)

    entries = logged(capsys)
    assert [entry["exception"] for entry in entries] == [type(error).__name__] * 3
    assert all(__name__.rpartition(".")[2] in entry["trace"][0] for entry in entries)
    assert "MARKER" not in json.dumps(entries)


def test_what_an_operator_must_read_is_told_in_its_words_within_a_group_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("worker", level="INFO")
    unusable = Unusable("GRIDLINE_KAFKA_PARTITIONS says 4, the topic has 3")

    group = ExceptionGroup("MARKER-7391", [unusable, ValueError("MARKER-7391")])
    structlog.stdlib.get_logger("ours").error("loop broke", exc_info=group)

    [entry] = logged(capsys)
    assert [each.get("reason") for each in entry["exceptions"]] == [str(unusable), None]
    assert "MARKER" not in json.dumps(entry)
