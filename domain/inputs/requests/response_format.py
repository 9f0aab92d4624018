"""What form the answer of a chat line must have.

`chat_body` reads it; the engines hold the answer to it. A schema counts the same with `strict` and
without: the answer fits it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from domain.inputs.requests.fields import Wrong
from domain.inputs.requests.json_schema import followable
from domain.inputs.requests.schema_values import Unfollowable

_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """`schema` is there with json_schema only, and holds what `followable` writes."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None


TEXT = ResponseFormat()


def read_response_format(value: Any) -> ResponseFormat:
    """Raises Wrong."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("text", "json_object"):
        if value.keys() != {"type"}:
            raise Wrong(f"of type {kind} has no other fields")
        return ResponseFormat("text" if kind == "text" else "json_object")
    if kind != "json_schema":
        raise Wrong("must be an object of type text, json_object or json_schema")
    if value.keys() != {"type", "json_schema"} or not isinstance(value["json_schema"], dict):
        raise Wrong("of type json_schema needs a json_schema object, and has no other fields")
    return ResponseFormat("json_schema", _schema(value["json_schema"]))


def _schema(given: dict[str, Any]) -> dict[str, Any]:
    if not given.keys() <= {"name", "schema", "strict", "description"}:
        raise Wrong("json_schema may have name, schema, strict and description")
    name, schema = given.get("name"), given.get("schema")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise Wrong("json_schema.name must be 1 to 64 letters, digits, underscores or dashes")
    if not isinstance(schema, dict):
        raise Wrong("json_schema.schema must be an object")
    if not isinstance(given.get("strict"), bool | None):
        raise Wrong("json_schema.strict must be true or false")
    if not isinstance(given.get("description"), str | None):
        raise Wrong("json_schema.description must be a string")
    try:
        return followable(schema)
    except Unfollowable as error:
        raise Wrong(f"at json_schema.schema{error.place} {error.cause}") from None
