"""What an environment may say, and how it is told that it cannot mean what it says."""

from __future__ import annotations

import dataclasses

import pytest
from pydantic import ValidationError

from adapters.process.settings import Settings, Unusable

WRONG = [
    ("DATABASE_URL", "mysql://gridline:SECRET@db/gridline", "postgresql://role:password@host"),
    ("DATABASE_URL", "gridline:SECRET", "postgresql://role:password@host"),
    ("DATABASE_URL", "postgresql://gridline:SECRET@db", "postgresql://role:password@host"),
    ("KAFKA_BOOTSTRAP", "kafka-1", "'kafka-1' is none"),
    ("KAFKA_BOOTSTRAP", "kafka-1:9092,kafka-2", "'kafka-2' is none"),
    ("KAFKA_BOOTSTRAP", "kafka-1:99999", "host:port"),
    ("KAFKA_BOOTSTRAP", ":9092", "host:port"),
    ("KAFKA_GROUPS", "maybe", "1 or 0"),
    ("KAFKA_PARTITIONS", "0", "greater than or equal to 1"),
    ("KAFKA_REPLICATION", "-1", "greater than or equal to 1"),
    ("TOPIC_PREFIX", "grid line", "letters, digits"),
    ("GPU_CLASS", "a/b", "one of cpu"),
    ("OBJECT_STORE_URL", "/var/lib/gridline", "file:///directory"),
    ("OBJECT_STORE_URL", "http://s3.example.org", "file:///directory"),
    ("OBJECT_STORE_URL", "file://host/directory", "file:///directory"),
    ("OBJECT_STORE_URL", "s3://", "s3://bucket/prefix"),
    ("ENGINE", "gpt", "'vllm', 'transformers' or 'echo'"),
    ("PORT", "99999", "less than or equal to 65535"),
    ("PORT", "-1", "greater than or equal to 0"),
    ("PORT", "1_0", "decimal digits"),
    ("PORT", "８０", "decimal digits"),
    ("PORT", "80.5", "integer"),
    ("METRICS_PORT", "http", "decimal digits"),
    ("PUBLIC_URL", "gridline.example.org", "http://host"),
    ("PUBLIC_URL", "https://gridline.example.org/", "no slash at its end"),
    ("HEARTBEAT_SECONDS", "-3", "greater than 0"),
    ("LEASE_SECONDS", "0", "greater than 0"),
    ("LEASE_SECONDS", "nan", "decimal digits"),
    ("LEASE_SECONDS", "1e3", "decimal digits"),
    ("LEASE_SECONDS", "5", "at least twice GRIDLINE_HEARTBEAT_SECONDS=3"),
    ("SCHEDULER_TICK_SECONDS", "0", "greater than 0"),
    ("PROGRESS_SECONDS", "-1", "greater than 0"),
    ("STOP_SECONDS", "100000", "less than or equal to 86400"),
    ("BATCH_CHUNK_REQUESTS", "50001", "less than or equal to 50000"),
    ("RUNNER_SLOTS_TRAIN", "-1", "greater than or equal to 0"),
    ("LOG_LEVEL", "loud", "'WARNING'"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_what_cannot_be_meant_is_refused_by_its_variables_name(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(Unusable) as refused:
        Settings.from_environment({f"GRIDLINE_{name}": value})
    message = str(refused.value)
    assert message.startswith(f"GRIDLINE_{name}")
    assert expected in message
    assert "\n" not in message
    assert "SECRET" not in message


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(Unusable, match=r"GRIDLINE_ENGINE='x' .*; GRIDLINE_PORT='y' "):
        Settings.from_environment({"GRIDLINE_PORT": "y", "GRIDLINE_ENGINE": "x"})


def test_settings_reach_a_child_through_its_environment_unchanged() -> None:
    settings = Settings.from_environment(
        {
            "GRIDLINE_DATABASE_URL": "postgresql://gridline:pw@/gridline?host=%2Frun",
            "GRIDLINE_KAFKA_BOOTSTRAP": "kafka-1:9092,[::1]:9093",
            "GRIDLINE_KAFKA_GROUPS": "False",
            "GRIDLINE_OBJECT_STORE_URL": "s3://bucket/prefix",
            "GRIDLINE_LEASE_SECONDS": "7.5",
            "GRIDLINE_LOG_LEVEL": "debug",
        }
    )
    assert (settings.kafka_groups, settings.lease_seconds) == (False, 7.5)
    assert settings.log_level == "DEBUG"
    assert Settings.from_environment(settings.to_environment()) == settings


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    assert Settings.from_environment({"GRIDLINE_PORT": "", "OTHER": "x"}) == Settings()


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(ValidationError):
        dataclasses.replace(Settings(), port=-1)
