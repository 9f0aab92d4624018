"""All configuration, read once from the environment into one frozen value.

Nothing else in the product looks at the environment. `docs/settings.md` lists every setting, and a
test compares the two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


class Unusable(Exception):
    """What the settings name cannot be used as it is. The message is one line that an operator
    reads, in the log too: it names the setting and what to change, and quotes no secret."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment variable of a field is `GRIDLINE_` + its name in capitals."""

    database_url: str = ""
    """PostgreSQL 17 or newer, as the application's role: postgresql://role:password@host/database."""
    kafka_bootstrap: str = ""
    """host:port of a broker, or several with commas."""
    kafka_idempotent: bool = False
    """Idempotent producers: for Apache Kafka; the embedded broker has none."""
    kafka_groups: bool = True
    """Workers share partitions as a consumer group. Off: the one worker reads all of them itself;
    the embedded broker takes ten seconds and more to give a group to the next member."""
    kafka_cluster_id: str = ""
    """Names the broker's life in tracking rows; the supervisor draws a new one for each embedded
    broker. Empty: the broker is asked."""
    kafka_partitions: int = 4
    """Partitions of each of our topics; they are checked at start."""
    kafka_replication: int = 1
    """Copies of each topic that is created; at least 3 in production."""
    topic_prefix: str = "gridline."
    """Put before every topic name."""
    object_store_url: str = ""
    """file:///directory, s3://bucket/prefix, gs://… or az://…"""
    weights_dir: str = ""
    """Where unpacked model weights are kept."""
    engines_python: str = ""
    """The interpreter of the environment that has vLLM; empty: the transformers engine serves."""
    engine: str = ""
    """Forces one engine: vllm, transformers or echo. Empty: vLLM where there is one. Echo answers
    without a model: for tests and load trials."""
    host: str = "127.0.0.1"
    """Where the API listens."""
    port: int = 8080
    """Where the API listens; 0 picks a free one."""
    public_url: str = ""
    """What clients reach the API by, if not http://host:port."""
    gpu_class: str = "cpu"
    """The runner's class, part of its work topic's name."""
    runner_slots_batch: int = 1
    """Batch chunks a runner takes at a time."""
    runner_slots_train: int = 1
    """Trainings a runner takes at a time."""
    heartbeat_seconds: float = 3.0
    """How often a runner says what it does."""
    lease_seconds: float = 30.0
    """A runner unheard of for this long has lost its work."""
    scheduler_tick_seconds: float = 0.5
    """How often the worker looks for work to start, send, send again or give up."""
    progress_seconds: float = 5.0
    """At most one progress report an attempt in this time."""
    progress_event_seconds: float = 15.0
    """At most one progress event a job in this time."""
    batch_chunk_requests: int = 200
    """Request lines in a chunk."""
    clock_file: str = ""
    """A file whose text (ISO 8601) stands in for the clock, in tests of several processes."""
    prices_file: str = ""
    """Prices to publish at start; empty: the ones that ship with the product."""
    log_level: str = "INFO"
    """Level of the JSON log on stderr."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Raises ValueError naming the variable that cannot be read."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = f"GRIDLINE_{field.name.upper()}"
            if name in environment and environment[name] != "":
                values[field.name] = _parse(name, str(field.type), environment[name])
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        """The variables that give a child process these settings."""
        return {f"GRIDLINE_{f.name.upper()}": _text(getattr(self, f.name)) for f in fields(self)}


def process_environment() -> dict[str, str]:
    """What this process was started with, to be handed to its children or to `Settings`."""
    return dict(os.environ)


def _parse(name: str, kind: str, text: str) -> Any:
    try:
        match kind:
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
            case _:
                return text
    except (ValueError, KeyError):
        raise ValueError(f"{name}={text!r} is no {kind}") from None


def _text(value: object) -> str:
    return ("1" if value else "0") if isinstance(value, bool) else str(value)
