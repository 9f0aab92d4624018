"""Every event type has a golden file: what the log holds today reads back tomorrow, byte for byte.

A file is `events/<topic>.<version>.json`, its version one more than the topic's upcaster steps. To
add an event: write it, then `python -m tests.unit.domain.test_events --write`, which makes the
missing files and never touches one that is there. A change of an event's fields breaks its file:
add an upcaster step (`adapters/event_log/upcasters.py`) and write the next version beside it.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import types
import typing
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import domain
from adapters.event_log.event_store import decode, stored
from adapters.event_log.upcasters import UPCASTERS
from domain import messages
from domain.log.aggregate import Aggregate, Envelope

FOLDER = Path(__file__).parent / "events"
HEX = "0123456789abcdef0123456789abcdef"
AT = datetime(2027, 3, 4, 5, 6, 7, 890000, tzinfo=UTC)
TEXTS = {
    "account_id": f"acct_{HEX}",
    "job_id": f"ftjob-{HEX}",
    "work_id": f"batch_{HEX}",
    "result_id": f"batch_{HEX}",
    "key_id": f"key_{HEX}",
    "runner_id": f"runner_{HEX}",
    "base": "smollm2-135m-instruct",
    "model": "ft:smollm2-135m-instruct:o3f9a1c2d4e5:0123456789ab",
    "actor": f"key_{HEX}",
    "command_id": f"command_{HEX}",
    "correlation_id": f"req_{HEX}",
    "causation": "POST /batches",
    "waiting_for": "customer_credit",
    "code": "engine_failed",
}
ONE_OF_EACH_TYPE = {int: 7, Decimal: Decimal("0.25"), bool: True, datetime: AT, date: AT.date()}


def _subclasses(cls: type[Aggregate]) -> Iterator[type[Aggregate]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def event_classes() -> dict[str, type[Aggregate.Event]]:
    """The product's event types by topic."""
    for module in pkgutil.walk_packages(domain.__path__, "domain."):
        importlib.import_module(module.name)
    return {
        vars(member)["TOPIC"]: member
        for aggregate in _subclasses(Aggregate)
        if aggregate.__module__.startswith("domain.")
        for member in vars(aggregate).values()
        if isinstance(member, type) and issubclass(member, Aggregate.Event)
        if "TOPIC" in vars(member)
    }


def version_of(topic: str) -> int:
    """The version that the event store writes today."""
    return len(UPCASTERS.get(topic, ())) + 1


EVENTS = event_classes()
FILES = sorted(FOLDER.glob("*.json"))


def _example(name: str, annotation: Any) -> Any:
    """A value of a field's type, the same at every call."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in ONE_OF_EACH_TYPE:
        return ONE_OF_EACH_TYPE[annotation]
    if annotation is str:
        return HEX * 2 if name.endswith("sha256") else TEXTS.get(name, f"some {name}")
    if origin is typing.Literal:
        return arguments[0]
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return _example(name, arguments[0])
    if origin in (tuple, list):
        return [_example(name, arguments[0])]
    if origin is dict:
        return {str(_example(name, arguments[0])): _example(name, arguments[1])}
    assert issubclass(annotation, BaseModel), f"no example for {name}: {annotation}"
    return annotation.model_validate(
        {field: _example(field, info.annotation) for field, info in annotation.model_fields.items()}
    )


def example_of(event_class: type[Aggregate.Event]) -> Aggregate.Event:
    """An event with every field filled."""
    fields = {
        name: _example(name, info.annotation)
        for name, info in event_class.model_fields.items()
        if name not in Aggregate.Event.model_fields
    }
    if issubclass(event_class, Aggregate.Created):
        fields["originator_topic"] = vars(event_class)["TOPIC"].rpartition(".")[0]
    return event_class.model_validate(
        {
            **fields,
            "originator_id": f"stream_{HEX}",
            "originator_version": 1,
            "timestamp": AT,
            "envelope": _example("envelope", Envelope),
        }
    )


def _text(event: Aggregate.Event) -> str:
    return json.dumps(json.loads(stored(event).state), indent=1, ensure_ascii=False) + "\n"


def _decoded(file: Path) -> Aggregate.Event:
    return decode(
        topic=file.stem.rpartition(".")[0],
        originator_id=f"stream_{HEX}",
        originator_version=1,
        state=file.read_bytes(),
    )


def test_every_event_type_has_a_file_of_each_version_and_every_file_an_event_type() -> None:
    expected = {
        f"{topic}.{version}.json" for topic in EVENTS for version in range(1, version_of(topic) + 1)
    }

    assert {file.name for file in FILES} == expected


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_stored_event_of_any_version_reads_back(file: Path) -> None:
    topic, _, version = file.stem.rpartition(".")

    event = _decoded(file)

    assert type(event) is EVENTS[topic]
    if int(version) == version_of(topic):
        assert _text(event) == file.read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_stored_event_with_a_field_that_its_type_lacks_is_refused(file: Path) -> None:
    state = {**json.loads(file.read_text()), "unheard_of": 1}

    with pytest.raises(ValidationError):
        decode(
            topic=file.stem.rpartition(".")[0],
            originator_id="stream",
            originator_version=1,
            state=json.dumps(state).encode(),
        )


def _types(annotation: Any) -> Iterator[Any]:
    """Every type that an annotation holds, those of nested models too."""
    yield annotation
    if typing.get_origin(annotation) is not typing.Literal:
        for argument in typing.get_args(annotation):
            yield from _types(argument)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for info in annotation.model_fields.values():
            yield from _types(info.annotation)


TYPES = {topic: list(_types(event_class)) for topic, event_class in EVENTS.items()}


@pytest.mark.parametrize("topic", EVENTS)
def test_an_event_holds_no_shape_of_a_message(topic: str) -> None:
    """What may travel over Kafka can change with any release; what was stored cannot."""
    foreign = [
        each for each in TYPES[topic] if getattr(each, "__module__", "") == messages.__name__
    ]

    assert foreign == []


@pytest.mark.parametrize("topic", EVENTS)
def test_an_event_holds_no_binary_fraction_and_nothing_untyped(topic: str) -> None:
    assert [each for each in TYPES[topic] if each in (float, Any, object, dict, list)] == []


@pytest.mark.parametrize("topic", EVENTS)
def test_every_value_inside_an_event_refuses_what_it_does_not_know(topic: str) -> None:
    models = [
        each for each in TYPES[topic] if isinstance(each, type) and issubclass(each, BaseModel)
    ]

    loose = [
        each
        for each in models
        if (each.model_config.get("extra"), each.model_config.get("frozen")) != ("forbid", True)
    ]

    assert models
    assert loose == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_log_holds_no_number_that_a_reader_could_round(file: Path) -> None:
    json.loads(file.read_text(), parse_float=lambda text: pytest.fail(f"a fraction: {text}"))


def _write_missing() -> None:
    for topic, event_class in sorted(EVENTS.items()):
        file = FOLDER / f"{topic}.{version_of(topic)}.json"
        if not file.exists():
            file.write_text(_text(example_of(event_class)))
            sys.stdout.write(f"{file.name}\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.unit.domain.test_events --write")
    _write_missing()
