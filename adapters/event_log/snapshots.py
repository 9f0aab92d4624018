"""An aggregate's state as stored bytes, so that a long stream need not be read from its beginning.

Used by the event store for classes that give a `snapshot_interval`. What is kept is exactly the
state annotated on the class; a snapshot is only ever a shortcut, and one of another shape (another
release wrote it) is ignored.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from functools import cache
from typing import Any, ClassVar, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter
from typing_extensions import TypedDict

from domain.aggregate import Aggregate
from domain.unit_of_work import A

_BASE_STATE = {"_id", "_version", "_created_on", "_modified_on", "_pending_events"}


class _Times(BaseModel):
    created_on: datetime
    modified_on: datetime


class _Snapshot(BaseModel):
    times: _Times
    state: dict[str, Any]


def interval(cls: type[Aggregate]) -> int | None:
    """Events between two snapshots of this class; None for classes that have none."""
    found: int | None = getattr(cls, "snapshot_interval", None)
    return found


def shape(cls: type[Aggregate]) -> str:
    """A digest of the class's annotated state: it changes when a field or its type does."""
    return _codec(cls)[1]


def encode(aggregate: Aggregate) -> bytes:
    """The aggregate as JSON. Asserts that all its state is annotated on the class."""
    adapter, _, names = _codec(type(aggregate))
    state = {name: value for name, value in vars(aggregate).items() if name not in _BASE_STATE}
    assert state.keys() == names, (
        f"{type(aggregate).__name__}: state and annotations differ in "
        f"{sorted(state.keys() ^ names)}"
    )
    snapshot = _Snapshot(
        times=_Times(created_on=aggregate.created_on, modified_on=aggregate.modified_on),
        state=adapter.dump_python(state, mode="json"),
    )
    return snapshot.model_dump_json().encode()


def decode(cls: type[A], *, id: str, version: int, state: bytes) -> A:
    """The aggregate as it was at that version, without pending events."""
    adapter, _, _ = _codec(cls)
    snapshot = _Snapshot.model_validate_json(state)
    aggregate = cls.__new__(cls)
    aggregate.__base_init__(
        originator_id=id, originator_version=version, timestamp=snapshot.times.created_on
    )
    aggregate.modified_on = snapshot.times.modified_on
    vars(aggregate).update(adapter.validate_python(snapshot.state))
    return aggregate


@cache
def _codec(cls: type[Aggregate]) -> tuple[TypeAdapter[Any], str, frozenset[str]]:
    fields = {
        name: hint
        for name, hint in get_type_hints(cls, include_extras=True).items()
        if get_origin(hint) is not ClassVar
        and name not in Aggregate.__annotations__
        and name != "INITIAL_VERSION"
    }
    adapter: TypeAdapter[Any] = TypeAdapter(TypedDict(f"{cls.__name__}State", fields))  # type: ignore[operator]
    schema = json.dumps(adapter.json_schema(), sort_keys=True)
    return adapter, hashlib.sha256(schema.encode()).hexdigest(), frozenset(fields)
