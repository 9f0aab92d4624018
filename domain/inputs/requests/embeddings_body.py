"""The body of an embeddings line, read once and for all.

As `chat_body`: batch validation and the engine child read it with the same function. Runs in the
engines' environment: nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from domain.inputs.requests.faults import Fault, missing, unsupported
from domain.inputs.requests.fields import Reader, Wrong, read_fields, string, unread
from domain.limits import EMBEDDING_INPUTS_MAX

EncodingFormat = Literal["float", "base64"]
Inputs = tuple[str, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class EmbeddingsBody:
    """What an embeddings line asks for: all texts or all token ids, in the line's order.
    `dimensions` is the model's own, which batch validation sees to, or None: not named."""

    inputs: Inputs
    encoding_format: EncodingFormat
    dimensions: int | None


def read_embeddings_body(body: Mapping[str, Any]) -> EmbeddingsBody | list[Fault]:
    """The request, or everything that is wrong with it. `model` is the caller's to look at."""
    faults: list[Fault] = []
    read = read_fields(body, READERS, faults)
    if body.get("input") is None:
        faults.append(missing("input"))
    dimensions = read.get("dimensions")
    if type(dimensions) not in (int, type(None)):
        faults.append(unsupported("dimensions"))
    if faults:
        return faults
    return EmbeddingsBody(
        inputs=read["input"],
        encoding_format=read.get("encoding_format", "float"),
        dimensions=dimensions,
    )


def _input(value: Any) -> Inputs:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise Wrong(_WANTED)
    if _is_token_ids(value):
        return (tuple(value),)
    if len(value) > EMBEDDING_INPUTS_MAX:
        raise Wrong(f"has more than {EMBEDDING_INPUTS_MAX:,} inputs")
    if all(isinstance(each, str) and each for each in value):
        return tuple(value)
    if all(isinstance(each, list) and each and _is_token_ids(each) for each in value):
        return tuple(tuple(each) for each in value)
    raise Wrong(_WANTED)


_WANTED = "must be a string, a list of strings, or lists of token ids, none of them empty"


def _is_token_ids(value: list[Any]) -> bool:
    return all(type(each) is int and each >= 0 for each in value)


def _encoding_format(value: Any) -> EncodingFormat:
    if value == "float":
        return "float"
    if value == "base64":
        return "base64"
    raise Wrong('must be "float" or "base64"')


READERS: dict[str, Reader] = {
    "model": unread,
    "input": _input,
    "encoding_format": _encoding_format,
    "dimensions": unread,
    # Accepted and ignored, as the migration page says.
    "user": string,
}
