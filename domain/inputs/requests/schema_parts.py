"""What of a JSON schema is looked at without going into its subschemas: types, names, counts, and
where references lead.

`json_schema` calls it for each schema of a walk. What cannot be meant is refused with its place.
"""

from __future__ import annotations

import re
from typing import Any

from domain.inputs.requests.faults import is_safe_name
from domain.inputs.requests.schema_values import KEYWORDS, Schema, Unfollowable


def map_of(schema: Schema, keyword: str, place: str) -> Schema:
    """The subschemas of a keyword, by name."""
    found = schema.get(keyword, {})
    if not isinstance(found, dict):
        raise Unfollowable(place, f"has {keyword} that are no object of schemas")
    return found


def required_names(schema: Schema, named: Schema, place: str) -> list[str]:
    """In the order of the properties, which is that of the answer."""
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise Unfollowable(place, "has a required that is no list of names")
    for name in required:
        if name not in named:
            raise Unfollowable(place, f"requires {shown(name)}, which is not in its properties")
    wanted = set(required)
    return [name for name in named if name in wanted]


def check_counts(
    least: int | None, most: int | None, required: list[str], named: Schema, place: str
) -> None:
    """Of named properties, only what is so anyway."""
    if (least or 0) > len(required) or (most is not None and most < len(named)):
        raise Unfollowable(
            place, "has minProperties or maxProperties beside properties: say what is required"
        )


def given(**keywords: int | None) -> Schema:
    """Those that are there."""
    return {name: value for name, value in keywords.items() if value is not None}


def types_of(schema: Schema, place: str) -> list[str]:
    """Those that a schema names; an integer is a number."""
    wanted = schema["type"]
    types = [wanted] if isinstance(wanted, str) else wanted
    if (
        not isinstance(types, list)
        or not types
        or not all(isinstance(each, str) and each in KEYWORDS for each in types)
    ):
        raise Unfollowable(place, f"has a type that is none of {', '.join(KEYWORDS)}")
    if "number" in types:
        types = [each for each in types if each != "integer"]
    return list(dict.fromkeys(types))


def types_spoken_of(said: list[str]) -> list[str]:
    """Of a schema without a type: those that its keywords are about."""
    names = [name for name in KEYWORDS if name != "integer"]
    return [name for name in names if any(each in KEYWORDS[name] for each in said)]


def not_said(keyword: str, types: list[str]) -> str:
    """Why a keyword does not stand with these types."""
    if any(keyword in keywords for keywords in KEYWORDS.values()) and types:
        return f"has {keyword}, which says nothing of type {' or '.join(types)}"
    return f"has {shown(keyword)}, which is not offered"


def target_of(root: Schema, pointer: tuple[str, ...], place: str) -> Any:
    """What a reference from `place` leads to."""
    found: Any = root
    for part in pointer:
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif (
            isinstance(found, list) and re.fullmatch("[0-9]{1,5}", part) and int(part) < len(found)
        ):
            found = found[int(part)]
        else:
            raise Unfollowable(place, "refers to a place that the schema does not have")
    return found


def shown(name: str) -> str:
    """A name that could be somebody's text is not shown."""
    return name if is_safe_name(name) else "a name"


def step(name: str, index: int) -> str:
    """Of a place: into a property."""
    return f".{name}" if is_safe_name(name) else f"[{index}]"


def may_be_deep(written: Schema) -> bool:
    """Whether a written schema may hold an object or an array that is not listed whole."""
    return "enum" not in written and not {"array", "object"}.isdisjoint(
        written.get("type", ("object",))
    )
