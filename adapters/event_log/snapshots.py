"""An aggregate's state as stored bytes, so that a long stream need not be read from its beginning.

Used by the event store for classes that give a `snapshot_interval`: every class whose streams grow
without bound. What is kept is exactly the state annotated on the class; a snapshot is only ever a
shortcut, and one of another shape (another release wrote it) is ignored.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from functools import cache
from typing import Any, ClassVar, get_origin, get_type_hints

from pydantic import BaseModel, create_model

from domain.log.aggregate import Aggregate
from domain.log.unit_of_work import A

_BASE_STATE = {"_id", "_version", "_created_on", "_modified_on", "_pending_events"}


class _Snapshot(BaseModel):
    """Of any class: when it was made and changed last."""

    created_on: datetime
    modified_on: datetime


def interval(cls: type[Aggregate]) -> int | None:
    """Events between two snapshots of this class; None for classes that have none."""
    found: int | None = getattr(cls, "snapshot_interval", None)
    return found


def encode(aggregate: Aggregate) -> bytes:
    """The aggregate as JSON. Asserts that all its state is annotated on the class."""
    snapshot = _snapshot_of(type(aggregate))
    state = {name: value for name, value in vars(aggregate).items() if name not in _BASE_STATE}
    annotated = snapshot.model_fields.keys() - _Snapshot.model_fields.keys()
    assert state.keys() == annotated, (
        f"{type(aggregate).__name__}: state and annotations differ in "
        f"{sorted(state.keys() ^ annotated)}"
    )
    state |= {"created_on": aggregate.created_on, "modified_on": aggregate.modified_on}
    return snapshot.model_construct(None, **state).model_dump_json().encode()


def decode(cls: type[A], *, id: str, version: int, state: bytes) -> A:
    """The aggregate as it was at that version, without pending events."""
    fields = dict(_snapshot_of(cls).model_validate_json(state))
    aggregate = cls.__new__(cls)
    aggregate.__base_init__(
        originator_id=id, originator_version=version, timestamp=fields.pop("created_on")
    )
    aggregate.modified_on = fields.pop("modified_on")
    vars(aggregate).update(fields)
    return aggregate


@cache
def shape(cls: type[Aggregate]) -> str:
    """A digest of the class's annotated state: it changes when a field or its type does."""
    schema = json.dumps(_snapshot_of(cls).model_json_schema(), sort_keys=True)
    return hashlib.sha256(schema.encode()).hexdigest()


@cache
def _snapshot_of(cls: type[Aggregate]) -> type[_Snapshot]:
    """The model of the class's annotated state."""
    hints = get_type_hints(cls, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], ...)
        for name in cls.__annotations__
        if get_origin(hints[name]) is not ClassVar
    }
    return create_model(f"{cls.__name__}Snapshot", __base__=_Snapshot, **fields)
