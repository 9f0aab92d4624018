"""The keywords of a JSON schema that speak of one value: strings, numbers, listed values.

`json_schema` calls it for each schema of a walk. Each function returns the keywords as the decoder
gets them, and refuses what leaves no value or what no decoder follows exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from domain.inputs.requests.schema_pattern import BadPattern, cost, read_pattern, written
from domain.limits import SCHEMA_LENGTH_MAX

Schema = dict[str, Any]

FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    "uri",
)
WHOLE_MAX = 2**53
"""Whole numbers that every reader of JSON takes alike."""
BOUND_MAX = 10**12
BOUND_DECIMALS_MAX = 9

KEYWORDS: dict[str, tuple[str, ...]] = {
    "null": (),
    "boolean": (),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties"),
    ),
}
"""Of each type, what is said of its values."""


class Unfollowable(Exception):
    """A schema that no answer is held to. `place` is the path within the schema, and the cause
    follows it in a message."""

    def __init__(self, place: str, cause: str) -> None:
        super().__init__(cause)
        self.place = place
        self.cause = cause


def count(schema: Schema, keyword: str, place: str, *, most: int = SCHEMA_LENGTH_MAX) -> int | None:
    """A keyword that counts something; None where it is absent."""
    if keyword not in schema:
        return None
    value = schema[keyword]
    if type(value) is not int or not 0 <= value <= most:
        raise Unfollowable(place, f"has a {keyword} that is no integer from 0 to {most:,}")
    return value


def check_range(low: int | None, high: int | None, keyword: str, place: str) -> None:
    """`keyword` is the lower one's."""
    if low is not None and high is not None and low > high:
        raise Unfollowable(place, f"has a {keyword} that is past its upper end, so no value fits")


def string_keywords(schema: Schema, place: str) -> tuple[Schema, int]:
    """And what its pattern costs to follow."""
    low, high = count(schema, "minLength", place), count(schema, "maxLength", place)
    check_range(low, high, "minLength", place)
    given = [each for each in ("pattern", "format") if each in schema]
    if len(given) + (low is not None or high is not None) > 1:
        raise Unfollowable(
            place, "has more than one of pattern, format and a length: put it all into the pattern"
        )
    if "pattern" in given:
        return _pattern(schema["pattern"], place)
    if "format" in given:
        if schema["format"] not in FORMATS:
            raise Unfollowable(place, f"has a format that is none of {', '.join(FORMATS)}")
        return {"format": schema["format"]}, 0
    lengths = {"minLength": low, "maxLength": high}
    return {name: value for name, value in lengths.items() if value is not None}, 0


def _pattern(pattern: object, place: str) -> tuple[Schema, int]:
    text, price = followed_pattern(pattern, place)
    return {"pattern": text}, price


def followed_pattern(pattern: object, place: str) -> tuple[str, int]:
    """A pattern as the decoder gets it, and what it costs to follow."""
    if not isinstance(pattern, str):
        raise Unfollowable(place, "has a pattern that is no string")
    try:
        node = read_pattern(pattern)
    except BadPattern as bad:
        raise Unfollowable(place, f"has a pattern that {bad}") from None
    return written(node), cost(node)


def number_keywords(schema: Schema, place: str, *, whole: bool) -> Schema:
    """The bounds of a number, or of an integer."""
    bounds = {
        keyword: _bound(schema[keyword], keyword, place)
        for keyword in KEYWORDS["number"]
        if keyword in schema
    }
    step = bounds.pop("multipleOf", None)
    if step is not None and (step <= 0 or (whole and step % 1)):
        kind = "positive integer" if whole else "positive number"
        raise Unfollowable(place, f"has a multipleOf that is no {kind}")
    if whole:
        bounds = _whole(bounds)
        step = None if step == 1 else step
    if step is not None:
        # The decoder writes no multiples below zero.
        bounds["minimum"] = max(bounds.get("minimum", Decimal(0)), Decimal(0))
        bounds["multipleOf"] = step
    if not _leaves_a_number(bounds, step):
        kind = "multiple from zero on" if step else "number"
        raise Unfollowable(place, f"has bounds that no {kind} fits")
    return {keyword: _number(value) for keyword, value in bounds.items()}


def steps(written: Schema) -> int:
    """How far a decoder counts for its multipleOf: the digits, without the point."""
    step = Decimal(str(written.get("multipleOf", 0)))
    while step % 1:
        step *= 10
    return int(step)


def _bound(value: object, keyword: str, place: str) -> Decimal:
    if type(value) not in (int, float):
        raise Unfollowable(place, f"has a {keyword} that is no number")
    bound = Decimal(repr(value))
    exponent = bound.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    if abs(bound) > BOUND_MAX or -exponent > BOUND_DECIMALS_MAX:
        raise Unfollowable(
            place,
            f"has a {keyword} beyond {BOUND_MAX:,} or of more than {BOUND_DECIMALS_MAX} decimals",
        )
    return bound


def _whole(bounds: dict[str, Decimal]) -> dict[str, Decimal]:
    """The same integers by inclusive bounds."""
    found: dict[str, Decimal] = {}
    lows = [Decimal(math.ceil(bounds["minimum"]))] if "minimum" in bounds else []
    lows += [Decimal(math.floor(bounds[k]) + 1) for k in ("exclusiveMinimum",) if k in bounds]
    highs = [Decimal(math.floor(bounds["maximum"]))] if "maximum" in bounds else []
    highs += [Decimal(math.ceil(bounds[k]) - 1) for k in ("exclusiveMaximum",) if k in bounds]
    if lows:
        found["minimum"] = max(lows)
    if highs:
        found["maximum"] = min(highs)
    return found


def _leaves_a_number(bounds: dict[str, Decimal], step: Decimal | None) -> bool:
    """Whether some number, or some multiple of the step, lies within."""
    lows = [bounds[k] for k in ("minimum", "exclusiveMinimum") if k in bounds]
    highs = [bounds[k] for k in ("maximum", "exclusiveMaximum") if k in bounds]
    if not lows or not highs:
        return True
    low, high = max(lows), min(highs)
    if step is None:
        return low < high or (low == high and _within(low, bounds))
    first = (low / step).to_integral_value(rounding="ROUND_CEILING") * step
    return any(_within(first + n * step, bounds) for n in (0, 1))


def _within(value: Decimal, bounds: dict[str, Decimal]) -> bool:
    return (
        value >= bounds.get("minimum", value)
        and value <= bounds.get("maximum", value)
        and not value <= bounds.get("exclusiveMinimum", value - 1)
        and not value >= bounds.get("exclusiveMaximum", value + 1)
    )


def _number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def listed_values(schema: Schema, place: str) -> list[Any]:
    """The values of enum or const, each of which the schema's type allows."""
    if "const" in schema:
        values = [schema["const"]]
    else:
        values = schema["enum"]
        if not isinstance(values, list) or not values:
            raise Unfollowable(place, "has an enum that is no list of at least one value")
    for number in _numbers(values):
        if not _is_exact(number):
            raise Unfollowable(place, "lists a number that not every reader of JSON takes alike")
    return values


def _numbers(value: Any) -> Iterator[int | float]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            waiting += each.values() if isinstance(each, dict) else each
        elif type(each) in (int, float):
            yield each


def _is_exact(number: float) -> bool:
    if isinstance(number, int):
        return abs(number) <= WHOLE_MAX
    return number == 0 or 1e-6 <= abs(number) <= BOUND_MAX


def is_of_type(value: Any, name: str) -> bool:
    """Whether a JSON value is of a schema's type."""
    match value:
        case None:
            return name == "null"
        case bool():
            return name == "boolean"
        case int() | float():
            return name == "number" or (name == "integer" and value == int(value))
        case str():
            return name == "string"
        case list():
            return name == "array"
    return name == "object"
