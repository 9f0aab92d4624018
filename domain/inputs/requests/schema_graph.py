"""What is true of a schema as a whole: that every part of it has an end, and that the branches of a
oneOf exclude each other.

`json_schema` calls it with the schema as written for the decoder: references to definitions by
name, and known keywords only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from domain.inputs.requests.schema_values import KEYWORDS, Schema, Unfollowable

DEFINITION = "#/$defs/"
_NUMBERS = frozenset(("integer", "number"))
_ALL_TYPES = frozenset(KEYWORDS)


@dataclass(frozen=True, slots=True)
class Located:
    """A schema as written, and the place of what it was written from."""

    schema: Schema
    place: str


def check_graph(nodes: list[Located], definitions: Mapping[str, Schema]) -> None:
    """Raises Unfollowable for a part that no finite value fits, or that is nothing but itself."""
    _check_steps(nodes, definitions)
    ending: set[int] = set()
    grown = True
    while grown:
        before = len(ending)
        # What stands further in was written later.
        for node in reversed(nodes):
            if id(node.schema) not in ending and _ends(node.schema, definitions, ending):
                ending.add(id(node.schema))
        grown = len(ending) > before
    for node in nodes:
        if id(node.schema) not in ending:
            raise Unfollowable(node.place, "refers to itself without an end, so no value fits")


def _ends(schema: Schema, definitions: Mapping[str, Schema], ending: set[int]) -> bool:
    """Whether some value is finite, given the schemas that are known to have one."""
    if "$ref" in schema:
        return id(definitions[schema["$ref"].removeprefix(DEFINITION)]) in ending
    if "anyOf" in schema:
        return any(id(branch) in ending for branch in schema["anyOf"])
    types = schema.get("type", ["null"])
    if "enum" in schema or not {"array", "object"}.issuperset(types):
        return True
    needed = {"array": _needed_items, "object": _needed_properties}
    return any(all(id(part) in ending for part in needed[name](schema)) for name in types)


def _needed_items(schema: Schema) -> list[Schema]:
    least = schema.get("minItems", 0)
    prefix: list[Schema] = schema.get("prefixItems", [])
    rest = schema.get("items")
    return prefix[:least] + ([rest] if least > len(prefix) and isinstance(rest, dict) else [])


def _needed_properties(schema: Schema) -> list[Schema]:
    if schema.get("minProperties", 0) and "properties" not in schema:
        rest = schema.get("additionalProperties")
        return [rest] if isinstance(rest, dict) else []
    return [schema["properties"][name] for name in schema.get("required", ())]


def _check_steps(nodes: list[Located], definitions: Mapping[str, Schema]) -> None:
    """Refuses a schema that leads to itself through references and branches alone: nothing of a
    value would stand between."""
    place = {id(node.schema): node.place for node in nodes}
    done: set[int] = set()
    for node in nodes:
        path: list[tuple[Schema, Iterator[Schema]]] = [
            (node.schema, _steps(node.schema, definitions))
        ]
        on_path = {id(node.schema)}
        while path and id(node.schema) not in done:
            schema, steps = path[-1]
            following = next(steps, None)
            if following is None:
                path.pop()
                on_path.discard(id(schema))
                done.add(id(schema))
            elif id(following) in on_path:
                raise Unfollowable(
                    place[id(following)], "refers to itself with nothing of a value between"
                )
            elif id(following) not in done:
                path.append((following, _steps(following, definitions)))
                on_path.add(id(following))


def _steps(schema: Schema, definitions: Mapping[str, Schema]) -> Iterator[Schema]:
    if "$ref" in schema:
        yield definitions[schema["$ref"].removeprefix(DEFINITION)]
    yield from schema.get("anyOf", ())


@dataclass(frozen=True, slots=True)
class Branches:
    """Branches of oneOfs. `inferred` are the schemas whose type was not said, so that as they were
    sent they hold values of any other type, too."""

    definitions: Mapping[str, Schema]
    inferred: Set[int]

    def check(self, branches: list[Schema], place: str) -> None:
        """Raises Unfollowable for branches of which a value could fit two."""
        for one, other in combinations(map(self._resolved, branches), 2):
            if not (self._differ(one, other) or self._differ_in_a_property(one, other)):
                raise Unfollowable(
                    place,
                    "has a oneOf whose branches do not exclude each other by their types, or by "
                    "listed values of a property that both require: write anyOf",
                )

    def _resolved(self, schema: Schema) -> Schema:
        """What a chain of references leads to; `check_graph` saw that it has an end."""
        while "$ref" in schema:
            schema = self.definitions[schema["$ref"].removeprefix(DEFINITION)]
        return schema

    def _differ(self, one: Schema, other: Schema) -> bool:
        if "anyOf" in one or "anyOf" in other:
            return False
        if "enum" in one and "enum" in other:
            return _texts(one).isdisjoint(_texts(other))
        return self._types(one).isdisjoint(self._types(other))

    def _differ_in_a_property(self, one: Schema, other: Schema) -> bool:
        if self._types(one) | self._types(other) != {"object"}:
            return False
        return any(
            self._differ(*(self._resolved(each["properties"][name]) for each in (one, other)))
            for name in set(one.get("required", ())) & set(other.get("required", ()))
        )

    def _types(self, schema: Schema) -> frozenset[str]:
        if "enum" in schema:
            return frozenset(_type_of(value) for value in schema["enum"])
        if "type" not in schema or id(schema) in self.inferred:
            return _ALL_TYPES
        types = frozenset(schema["type"])
        return types | _NUMBERS if types & _NUMBERS else types


def _texts(schema: Schema) -> set[str]:
    """Listed values, so that equal ones are equal: 1 and 1.0 are, 1 and true are not."""
    return {json.dumps(_plain(value), sort_keys=True) for value in schema["enum"]}


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value == int(value) else value


def _type_of(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "integer", str: "string"}
    return names.get(type(value), "array" if isinstance(value, list) else "object")
