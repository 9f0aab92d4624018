"""How one field of a request body is read, and which values of fields that are not offered ask for
nothing.

The readers of chat and embeddings bodies share it. An explicit null is absence. A field that is not
offered is refused by name, whatever its value, but for the values that ask for exactly what happens
anyway: many clients send those with every line, and to honour them ignores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from domain.inputs.requests.faults import Fault, invalid, unsupported
from domain.limits import BATCH_ERRORS_MAX

Reader = Callable[[Any], Any]
"""Makes of a field's value what the request holds. Raises Wrong."""

NOTHING_ASKED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "stream": (False,),
    "stream_options": (),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "prediction": (),
    "audio": (),
    "modalities": (["text"],),
    "metadata": ({},),
    "reasoning_effort": (),
    "web_search_options": (),
    "suffix": (),
    "best_of": (1,),
    "dimensions": (),
}
"""The migration page's nineteen refused fields, the same on both endpoints, each with the values
that change nothing. An embedding model's own `dimensions` is the twentieth such value."""


class Wrong(Exception):
    """A value that cannot be read; its text follows the field's path in the message."""


def read_fields(
    body: Mapping[str, Any], readers: Mapping[str, Reader], faults: list[Fault]
) -> dict[str, Any]:
    """The fields that are there and can be read. What cannot is added to `faults`, as many as
    anybody is told."""
    read: dict[str, Any] = {}
    for name, value in body.items():
        if len(faults) >= BATCH_ERRORS_MAX:
            break
        reader = readers.get(name)
        if reader is None:
            if not asks_nothing(name, value):
                faults.append(unsupported(name))
        elif value is not None:
            try:
                read[name] = reader(value)
            except Wrong as wrong:
                faults.append(invalid(name, str(wrong)))
    return read


def asks_nothing(name: str, value: object) -> bool:
    """Whether a field that is not offered is absent, or asks for what happens anyway."""
    return name in NOTHING_ASKED and (
        value is None or any(_is(value, each) for each in NOTHING_ASKED[name])
    )


def _is(value: object, wanted: object) -> bool:
    """Equal and of one type: 0 is not false, and 1.0 not 1."""
    return type(value) is type(wanted) and value == wanted


def integer(low: int, high: int | None = None) -> Reader:
    limits = f"of at least {low}" if high is None else f"from {low:,} to {high:,}"

    def read(value: Any) -> int:
        if type(value) is int and value >= low and (high is None or value <= high):
            return value
        raise Wrong(f"must be an integer {limits}")

    return read


def number(low: float, high: float) -> Reader:
    def read(value: Any) -> float:
        if type(value) in (int, float) and low <= value <= high:
            return float(value)
        raise Wrong(f"must be a number from {low:g} to {high:g}")

    return read


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Wrong("must be true or false")
    return value


def string(value: Any) -> str:
    if not isinstance(value, str):
        raise Wrong("must be a string")
    return value


def unread(value: Any) -> Any:
    """For a field that something else reads."""
    return value
