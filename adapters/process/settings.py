"""All configuration, read once from the environment into one frozen, checked value.

Every process reads it at its start; nothing else in the product looks at the environment.
`docs/settings.md` lists every setting, and a test compares the two. A value that cannot be meant is
refused here, by its variable's name; whether what it names exists is found out by who opens it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from domain.catalog import CPU, GPU_CLASSES


class Unusable(Exception):
    """What the settings name cannot be used as it is. The message is one line that an operator
    reads, in the log too: it names the setting and what to change, and quotes no secret."""


def _plain_number(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", value):
        raise ValueError("must be a number in decimal digits")
    return value


def _database_url(value: str) -> str:
    parts = urlsplit(value)
    if value and (parts.scheme not in ("postgresql", "postgres") or not parts.path.strip("/")):
        raise ValueError("must be of the form postgresql://role:password@host/database")
    return value


def _bootstrap(value: str) -> str:
    for address in value.split(",") if value else ():
        host, _, port = address.strip().rpartition(":")
        if not host or not port.isdecimal() or not port.isascii() or not 0 < int(port) <= 65_535:
            raise ValueError(f"must be host:port, or several with commas; {address!r} is none")
    return value


def _object_store_url(value: str) -> str:
    parts = urlsplit(value)
    local = parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path
    if value and not local and not (parts.scheme in ("s3", "gs", "az") and parts.netloc):
        raise ValueError("must be file:///directory, s3://bucket/prefix, gs://… or az://…")
    return value


def _public_url(value: str) -> str:
    parts = urlsplit(value)
    if value and (
        parts.scheme not in ("http", "https") or not parts.netloc or value.endswith("/")
        or parts.query or parts.fragment
    ):  # fmt: skip
        raise ValueError("must be http://host or https://host, with no slash at its end")
    return value


def _topic_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", value):
        raise ValueError("must be 1 to 100 letters, digits, dots, underscores and hyphens")
    return value


def is_operator_name(value: str) -> bool:
    """Whether it may stand in the log for a person: a handle, no address and no sentence."""
    return re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,31}", value) is not None


def _operator(value: str) -> str:
    if value and not is_operator_name(value):
        raise ValueError("must be 1 to 32 small letters, digits, dots, underscores and hyphens")
    return value


def _gpu_class(value: str) -> str:
    if value not in GPU_CLASSES:
        raise ValueError(f"must be one of {', '.join(GPU_CLASSES)}")
    return value


def _flag(value: object) -> object:
    if isinstance(value, str):
        if value.lower() not in ("1", "true", "0", "false"):
            raise ValueError("must be 1 or 0, true or false")
        return value.lower() in ("1", "true")
    return value


def _capitals(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


Number = BeforeValidator(_plain_number)
Port = Annotated[int, Number, Field(ge=0, le=65_535)]
Count = Annotated[int, Number, Field(ge=1, le=50_000)]
Slots = Annotated[int, Number, Field(ge=0, le=1_000)]
Seconds = Annotated[float, Number, Field(gt=0, le=86_400)]
Flag = Annotated[bool, BeforeValidator(_flag)]
TopicName = Annotated[str, AfterValidator(_topic_name)]
"""What Kafka allows in a topic's name; it is part of one."""


@dataclass(
    frozen=True,
    slots=True,
    kw_only=True,
    config=ConfigDict(use_attribute_docstrings=True, hide_input_in_errors=True),
)
class Settings:
    """The environment variable of a field is `GRIDLINE_` + its name in capitals. Making one, by
    `dataclasses.replace` too, checks it: raises pydantic.ValidationError."""

    database_url: Annotated[str, AfterValidator(_database_url)] = ""
    """PostgreSQL 17 or newer, as the application's role: postgresql://role:password@host/database."""
    kafka_bootstrap: Annotated[str, AfterValidator(_bootstrap)] = ""
    """host:port of a broker, or several with commas."""
    kafka_idempotent: Flag = False
    """Idempotent producers: for Apache Kafka; the embedded broker has none."""
    kafka_groups: Flag = True
    """Workers share partitions as a consumer group. Off: the one worker reads all of them itself;
    the embedded broker takes ten seconds and more to give a group to the next member."""
    kafka_cluster_id: str = ""
    """Names the broker's life in tracking rows; the supervisor draws a new one for each embedded
    broker. Empty: the broker is asked."""
    kafka_partitions: Count = 4
    """Partitions of each of our topics; they are checked at start."""
    kafka_replication: Count = 1
    """Copies of each topic that is created; at least 3 in production."""
    topic_prefix: TopicName = "gridline."
    """Put before every topic name."""
    object_store_url: Annotated[str, AfterValidator(_object_store_url)] = ""
    """file:///directory, s3://bucket/prefix, gs://… or az://…"""
    weights_dir: str = ""
    """Where model weights are: unpacked packages, and directories named by the catalog's ids
    (README)."""
    engines_python: str = ""
    """The interpreter of the environment that has vLLM; empty: the transformers engine serves."""
    engine: Literal["", "vllm", "transformers", "echo"] = ""
    """Forces one engine: vllm, transformers or echo. Empty: vLLM where there is one. Echo answers
    without a model: for tests and load trials."""
    allow_echo: Flag = False
    """A runner refuses the echo engine, which bills as a model does, without this: for tests."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Where the API listens."""
    port: Port = 8080
    """Where the API listens; 0 picks a free one."""
    listen_fd: Annotated[int, Number, Field(ge=0)] = 0
    """The number of a listening socket that the API inherits from who starts it, so that none is
    refused while it is started again; 0: it opens one itself."""
    public_url: Annotated[str, AfterValidator(_public_url)] = ""
    """What clients reach the API by, if not http://host:port."""
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Where a process answers `/metrics`, `/healthz` and `/readyz` to operators alone."""
    metrics_port: Port = 0
    """The port of it; 0: it does not. `gridlined up` gives this one to the first of its processes
    that has such a port and the next ones to the others."""
    stop_seconds: Seconds = 25.0
    """How long requests may take to end once the API is told to stop; then they are ended."""
    gpu_class: Annotated[str, AfterValidator(_gpu_class)] = CPU
    """The runner's class: cpu, gpu-24gb, gpu-48gb, gpu-80gb or gpu-141gb. Work that needs more
    memory is not given to it; a card between two classes is of the smaller one."""
    runner_slots_batch: Slots = 1
    """Batch chunks a runner takes at a time."""
    runner_slots_train: Slots = 1
    """Trainings a runner takes at a time."""
    runner_slots_max: Slots = 64
    """The worker gives no runner more of one kind at a time, whatever it says of itself."""
    heartbeat_seconds: Seconds = 3.0
    """How often a runner says what it does."""
    lease_seconds: Seconds = 30.0
    """A runner unheard of for this long has lost its work."""
    drain_seconds: Seconds = 600.0
    """How long a runner that was asked to stop goes on with what it runs; then it hands it over."""
    scheduler_tick_seconds: Seconds = 0.5
    """How often the worker looks for work to start, send, send again or give up."""
    progress_seconds: Seconds = 5.0
    """At most one progress report an attempt in this time."""
    progress_event_seconds: Seconds = 15.0
    """At most one progress event a job in this time."""
    batch_chunk_requests: Count = 200
    """Request lines in a chunk."""
    clock_file: str = ""
    """A file whose text (ISO 8601) stands in for the clock, in tests of several processes."""
    prices_file: str = ""
    """Prices to publish at start; empty: the ones that ship with the product."""
    operator: Annotated[str, AfterValidator(_operator)] = ""
    """Who uses `gridlined`: a handle that stays in the log with what they ordered; empty: their
    login name."""
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_capitals)
    ] = "INFO"
    """Level of the JSON log on stderr."""

    @model_validator(mode="after")
    def _a_lease_outlives_heartbeats(self) -> Self:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"{variable('lease_seconds')}={self.lease_seconds:g} must be at least twice "
                f"{variable('heartbeat_seconds')}={self.heartbeat_seconds:g}"
            )
        return self

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Raises Unusable, naming every variable that cannot be used. Empty ones count as unset."""
        given = {
            field.name: environment[variable(field.name)]
            for field in fields(cls)
            if environment.get(variable(field.name))
        }
        try:
            return TypeAdapter(cls).validate_python(given)
        except ValidationError as invalid:
            raise Unusable(_told(invalid, given)) from None

    def require(self, *names: str) -> None:
        """Raises Unusable for the first of these that was left empty."""
        for name in names:
            if not getattr(self, name):
                raise Unusable(f"{variable(name)} is not set; docs/settings.md says what it is")

    def to_environment(self) -> dict[str, str]:
        """The variables that give a child process these settings."""
        return {variable(f.name): _text(getattr(self, f.name)) for f in fields(self)}


def variable(name: str) -> str:
    """The environment variable of a setting, for messages that name it."""
    return f"GRIDLINE_{name.upper()}"


def process_environment() -> dict[str, str]:
    """What this process was started with, to be handed to its children or to `Settings`."""
    return dict(os.environ)


def _told(invalid: ValidationError, given: Mapping[str, str]) -> str:
    told = []
    for error in invalid.errors(include_url=False, include_input=False):
        reason = error["msg"].removeprefix("Value error, ").replace("Input should", "must")
        if not error["loc"]:
            told.append(reason)
            continue
        name = str(error["loc"][0])
        # A database's URL holds a password.
        value = "" if name == "database_url" else f"={given[name]!r}"
        told.append(f"{variable(name)}{value} {reason}")
    return "; ".join(told)


def _text(value: object) -> str:
    return ("1" if value else "0") if isinstance(value, bool) else str(value)
