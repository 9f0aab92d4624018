"""JSON schemas that an answer can be held to.

`response_format` calls it, for validation and for the engine child alike. A schema is walked with a
list of the keywords that the decoder is known to honour, and written anew in those: so no keyword
is dropped on the way, and the decoder meets no other. Whatever else stands in a schema is refused
with its place and cause; so are schemas that no answer can fit, that never end, or that are too
large to follow. Objects that name their properties have no others.

It must never take longer than a few passes over a schema of SCHEMA_BYTES_MAX.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from domain.inputs.requests.schema_graph import DEFINITION, Branches, Located, check_graph
from domain.inputs.requests.schema_parts import (
    check_counts,
    given,
    map_of,
    may_be_deep,
    not_said,
    required_names,
    shown,
    step,
    target_of,
    types_of,
    types_spoken_of,
)
from domain.inputs.requests.schema_values import (
    KEYWORDS,
    Schema,
    Unfollowable,
    check_range,
    count,
    followed_pattern,
    is_of_type,
    listed_values,
    number_keywords,
    steps,
    string_keywords,
)
from domain.limits import (
    PATTERN_COST_MAX,
    SCHEMA_BRANCHES_MAX,
    SCHEMA_BYTES_MAX,
    SCHEMA_ITEMS_MAX,
    SCHEMA_KINDS_MAX,
    SCHEMA_MULTIPLES_MAX,
    SCHEMA_NODES_MAX,
    SCHEMA_ONE_OF_MAX,
    SCHEMA_OPTIONAL_ITEMS_MAX,
    SCHEMA_OPTIONAL_MAX,
    SCHEMA_VALUES_MAX,
)

_SAY_NOTHING = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$defs", "definitions"),
    )
)
"""Keywords that no value is held to."""
_SAY_NOTHING_AT_THE_ROOT = frozenset(("$schema", "$id"))
_COMBINING = ("$ref", "anyOf", "oneOf", "allOf")


def followable(schema: Schema) -> Schema:
    """The schema as the decoder gets it. Raises Unfollowable."""
    text = json.dumps(schema, ensure_ascii=False)
    if len(text.encode()) > SCHEMA_BYTES_MAX:
        raise Unfollowable("", f"is larger than {SCHEMA_BYTES_MAX // 1024} KiB")
    return _followable(text)


@lru_cache(maxsize=32)
def _followable(text: str) -> Schema:
    """Kept, since the lines of a file mostly have one schema. Nobody changes what is returned."""
    return _Walk(json.loads(text)).written()


@dataclass(slots=True)
class _Walk:
    """One schema's walk. A place that references name is walked once, as a definition."""

    _root: Schema
    _definitions: dict[tuple[str, ...], str] = field(default_factory=dict)
    _waiting: list[tuple[str, Any, str]] = field(default_factory=list)
    _nodes: list[Located] = field(default_factory=list)
    _one_ofs: list[tuple[list[Schema], str]] = field(default_factory=list)
    _inferred: set[int] = field(default_factory=set)
    _kinds: set[str] = field(default_factory=set)
    _spent: Counter[str] = field(default_factory=Counter)

    def written(self) -> Schema:
        root = self._schema(self._root, "", may_say=_SAY_NOTHING | _SAY_NOTHING_AT_THE_ROOT)
        definitions: dict[str, Schema] = {}
        while self._waiting:
            name, target, place = self._waiting.pop()
            definitions[name] = self._schema(target, place)
        check_graph(self._nodes, definitions)
        for branches, place in self._one_ofs:
            Branches(definitions, self._inferred).check(branches, place)
        return {**root, "$defs": definitions} if definitions else root

    def _schema(self, schema: Any, place: str, *, may_say: frozenset[str] = _SAY_NOTHING) -> Schema:
        self._spend("schemas", 1, SCHEMA_NODES_MAX, place)
        if schema is True:
            return self._located({}, place)
        if not isinstance(schema, dict):
            allows = "allows no value" if schema is False else "is no schema: an object, or true"
            raise Unfollowable(place, allows)
        said = [keyword for keyword in schema if keyword not in may_say]
        if schema.get("uniqueItems") is False:
            said.remove("uniqueItems")
        combining = [keyword for keyword in _COMBINING if keyword in said]
        if combining:
            return self._combined(schema, combining[0], said, place)
        if "enum" in said or "const" in said:
            return self._listed(schema, said, place)
        return self._typed(schema, said, place)

    def _located(self, written: Schema, place: str) -> Schema:
        self._nodes.append(Located(written, place))
        return written

    def _spend(self, what: str, amount: int, most: int, place: str) -> None:
        self._spent[what] += amount
        if self._spent[what] > most:
            raise Unfollowable(place, f"passes the bound of a schema: {most:,} {what}")

    # References and branches

    def _combined(self, schema: Schema, keyword: str, said: list[str], place: str) -> Schema:
        others = [each for each in said if each not in (keyword, "discriminator")]
        if others:
            raise Unfollowable(
                place, f"has {shown(others[0])} beside {keyword}, which is not offered"
            )
        if keyword == "$ref":
            return self._located({"$ref": self._reference(schema["$ref"], place)}, place)
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise Unfollowable(place, f"has {keyword} that is no list of at least one schema")
        if keyword == "allOf":
            if len(branches) > 1:
                raise Unfollowable(place, "has allOf with more than one schema: write them as one")
            return self._schema(branches[0], f"{place}.allOf[0]")
        written = self._located({"anyOf": []}, place)
        for index, branch in enumerate(branches):
            written["anyOf"].append(self._schema(branch, f"{place}.{keyword}[{index}]"))
        deep = sum(map(may_be_deep, written["anyOf"]))
        self._spend("branches of objects", max(0, deep - 2), SCHEMA_BRANCHES_MAX, place)
        if keyword == "oneOf":
            if len(branches) > SCHEMA_ONE_OF_MAX:
                raise Unfollowable(place, f"has oneOf with more than {SCHEMA_ONE_OF_MAX} schemas")
            self._one_ofs.append((written["anyOf"], place))
        return written

    def _reference(self, reference: object, place: str) -> str:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise Unfollowable(place, "refers to another document, which is not offered")
        if reference not in ("#", "#/") and not reference.startswith("#/"):
            raise Unfollowable(place, "refers to an anchor: write the path, such as #/$defs/name")
        pointer = tuple(
            unquote(part).replace("~1", "/").replace("~0", "~") for part in reference.split("/")[1:]
        )
        if pointer not in self._definitions:
            name = self._definitions[pointer] = str(len(self._definitions))
            target = target_of(self._root, pointer, place)
            found_at = "".join(f".{shown(part)}" for part in pointer)
            self._waiting.append((name, target, found_at))
        return DEFINITION + self._definitions[pointer]

    # Values

    def _listed(self, schema: Schema, said: list[str], place: str) -> Schema:
        others = [each for each in said if each not in ("enum", "const", "type")]
        if others or {"enum", "const"} <= schema.keys():
            beside = others[0] if others else "const"
            raise Unfollowable(place, f"has {shown(beside)} beside listed values")
        values = listed_values(schema, place)
        self._spend("listed values", len(values), SCHEMA_VALUES_MAX, place)
        types = types_of(schema, place) if "type" in schema else None
        for value in values if types is not None else ():
            if not any(is_of_type(value, name) for name in types or ()):
                raise Unfollowable(place, "lists a value that is not of its type")
        return self._located({"enum": values}, place)

    def _typed(self, schema: Schema, said: list[str], place: str) -> Schema:
        types = types_of(schema, place) if "type" in schema else types_spoken_of(said)
        for keyword in said:
            if keyword != "type" and not any(keyword in KEYWORDS[name] for name in types):
                raise Unfollowable(place, not_said(keyword, types))
        written: Schema = self._located({"type": types} if types else {}, place)
        if "type" not in schema:
            self._inferred.add(id(written))
        for name in types:
            written.update(self._keywords(name, schema, place))
        return written

    def _keywords(self, type_name: str, schema: Schema, place: str) -> Schema:
        match type_name:
            case "string":
                written, price = string_keywords(schema, place)
                self._spend("characters of patterns", price, PATTERN_COST_MAX, place)
                return self._one_of_few(written, "kinds of strings", place)
            case "integer" | "number":
                written = number_keywords(schema, place, whole=type_name == "integer")
                self._spend("steps of multipleOf", steps(written), SCHEMA_MULTIPLES_MAX, place)
                return self._one_of_few(written, "kinds of numbers", place)
            case "array":
                return self._array(schema, place)
            case "object":
                return self._object(schema, place)
        return {}

    def _one_of_few(self, written: Schema, what: str, place: str) -> Schema:
        """The decoder follows all that may stand in one place at once; equal ones are one."""
        kind = json.dumps(written)
        if written and kind not in self._kinds:
            self._kinds.add(kind)
            self._spend(what, 1, SCHEMA_KINDS_MAX, place)
        return written

    def _spend_optional_items(self, least: int | None, most: int | None, place: str) -> None:
        spread = 0 if most is None else most - (least or 0)
        self._spend("items that may be left out", spread, SCHEMA_OPTIONAL_ITEMS_MAX, place)

    def _array(self, schema: Schema, place: str) -> Schema:
        least, most = count(schema, "minItems", place), count(schema, "maxItems", place)
        check_range(least, most, "minItems", place)
        self._spend("items counted", max(least or 0, most or 0), SCHEMA_ITEMS_MAX, place)
        self._spend_optional_items(least, most, place)
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise Unfollowable(place, "has prefixItems that are no list of schemas")
        written: Schema = {}
        if prefix:
            written["prefixItems"] = [
                self._schema(each, f"{place}.prefixItems[{index}]")
                for index, each in enumerate(prefix)
            ]
        if schema.get("items", True) is False:
            check_range(least, len(prefix), "minItems", place)
            written["items"] = False
        else:
            written["items"] = self._schema(schema.get("items", True), f"{place}.items")
        return written | given(minItems=least, maxItems=most)

    def _object(self, schema: Schema, place: str) -> Schema:
        least, most = count(schema, "minProperties", place), count(schema, "maxProperties", place)
        check_range(least, most, "minProperties", place)
        named = map_of(schema, "properties", place)
        patterns = map_of(schema, "patternProperties", place)
        required = required_names(schema, named, place)
        if named and patterns:
            raise Unfollowable(place, "has patternProperties beside properties")
        if named:
            self._close(schema, place)
            check_counts(least, most, required, named, place)
            return self._named(named, required, place)
        if patterns:
            self._close(schema, place)
            written = self._patterned(patterns, place)
        else:
            written = self._map(schema, place)
        if least is not None and least > 1:
            # A name may come twice in a JSON text, and then counts once.
            raise Unfollowable(place, "has minProperties of more than 1 for unnamed properties")
        self._spend_optional_items(least, most, place)
        return written | given(minProperties=least, maxProperties=most)

    def _close(self, schema: Schema, place: str) -> None:
        """Named properties are all that an object has, so what allows others changes nothing; what
        holds others to a schema would."""
        others = schema.get("additionalProperties", True)
        if not (isinstance(others, bool) or others == {}):
            raise Unfollowable(
                place, "has a schema of additionalProperties beside named ones: make it false"
            )

    def _named(self, named: Schema, required: list[str], place: str) -> Schema:
        optional = len(named) - len(required)
        self._spend("properties that are not required", optional, SCHEMA_OPTIONAL_MAX, place)
        properties = {
            name: self._schema(each, f"{place}.properties{step(name, index)}")
            for index, (name, each) in enumerate(named.items())
        }
        return {"properties": properties, "required": required, "additionalProperties": False}

    def _patterned(self, patterns: Schema, place: str) -> Schema:
        if len(patterns) > 1:
            raise Unfollowable(place, "has more than one of patternProperties")
        [(pattern, each)] = patterns.items()
        text, price = followed_pattern(pattern, place)
        self._spend("characters of patterns", price, PATTERN_COST_MAX, place)
        schema = self._schema(each, f"{place}.patternProperties[0]")
        return {"patternProperties": {text: schema}, "additionalProperties": False}

    def _map(self, schema: Schema, place: str) -> Schema:
        others = schema.get("additionalProperties", True)
        if others is False:
            if schema.get("minProperties", 0):
                raise Unfollowable(place, "has minProperties, and allows no property")
            return {"additionalProperties": False}
        return {"additionalProperties": self._schema(others, f"{place}.additionalProperties")}
