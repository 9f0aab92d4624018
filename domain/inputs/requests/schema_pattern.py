"""Patterns of a JSON schema: read by a parser of our own, and written anew for the decoder.

`json_schema` calls it. Where readers of patterns differ, as on digits and white space, the
narrowest reading is written, so that what is generated matches whoever looks. What a decoder would
not follow or could not hold in bounds is refused with its cause. Nothing here runs a regular
expression, and the time is that of reading the pattern once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from domain.inputs.requests.schema_characters import (
    CONTROLS,
    ESCAPES,
    LAST,
    LINE_ENDS,
    CharacterClass,
    Ranges,
    both,
    joined,
    one,
    single,
    without,
)
from domain.limits import PATTERN_CHARACTERS_MAX, PATTERN_DEPTH_MAX


class BadPattern(Exception):
    """Why a pattern cannot be followed; the text follows "the pattern"."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One of these characters."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; nothing, where it is empty."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of them."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part so many times; `most` None: without end."""

    part: Node
    least: int
    most: int | None


Node = Characters | Sequence | Choice | Repeat


def read_pattern(pattern: str) -> Node:
    """Its tree. Raises BadPattern."""
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise BadPattern(f"is longer than {PATTERN_CHARACTERS_MAX:,} characters")
    return _Parser(pattern).read()


def cost(node: Node) -> int:
    """What following it may take: the characters that its repeats spell out, tenfold where a repeat
    of no fixed length is repeated itself, which can be read in many ways."""
    match node:
        case Characters():
            return 1
        case Sequence(parts=parts) | Choice(options=parts):
            return sum(map(cost, parts))
        case Repeat(part=part, least=least, most=most):
            ways = 10 if _has_open_repeat(part) else 1
            return ways * cost(part) * max(1, least if most is None else most)


def _has_open_repeat(node: Node) -> bool:
    match node:
        case Repeat(part=part, least=least, most=most):
            return least != most or _has_open_repeat(part)
        case Sequence(parts=parts) | Choice(options=parts):
            return any(map(_has_open_repeat, parts))
    return False


def written(node: Node) -> str:
    """The tree as a pattern of the plainest kind, for the whole of a string."""
    return f"^(?:{_written(node)})$"


def _written(node: Node) -> str:
    match node:
        case Characters(ranges=ranges):
            return f"[{''.join(map(_written_range, ranges))}]"
        case Sequence(parts=parts):
            return "".join(map(_written, parts))
        case Choice(options=options):
            return f"(?:{'|'.join(map(_written, options))})"
        case Repeat(part=part, least=least, most=most):
            return f"(?:{_written(part)}){{{least},{'' if most is None else most}}}"


def _written_range(ends: tuple[int, int]) -> str:
    low, high = map(_written_character, ends)
    return low if low == high else f"{low}-{high}"


def _written_character(code: int) -> str:
    """As every reader of patterns takes it."""
    letter = chr(code)
    return letter if code >= 0x80 or letter.isalnum() else f"\\x{code:02x}"


class _Parser:
    """Reads from left to right; every step reads a character or ends."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> Node:
        node = self._choice(self._anchored)
        if self._at < len(self._text):
            raise BadPattern("closes a group that is not open")
        return node

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _next(self, within: str) -> str:
        if self._at >= len(self._text):
            raise BadPattern(f"ends within {within}")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self, option: Callable[[], Node]) -> Node:
        options = [option()]
        while self._take("|"):
            options.append(option())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")", "$"):
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _anchored(self) -> Node:
        """An option of the whole pattern: without an anchor, anything may stand there."""
        before = () if self._take("^") else (_ANYTHING,)
        part = self._sequence()
        after = () if self._take("$") else (_ANYTHING,)
        if self._peek() not in ("", "|", ")"):
            raise BadPattern("has $ before its end")
        return Sequence((*before, part, *after))

    def _repeated(self) -> Node:
        part = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return part
        self._take("?")  # lazy: the same strings
        if self._peek() in ("*", "+", "?", "{"):
            raise BadPattern("repeats a repeat")
        least, most = bounds
        if most == 0:
            return Sequence(())
        return Repeat(part, least, most) if cost(part) else part

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        if not self._take("{"):
            return None
        least = self._number()
        most: int | None = least
        if self._take(","):
            most = None if self._peek() == "}" else self._number()
        if not self._take("}"):
            raise BadPattern("has a brace that is no repeat: write it with a backslash")
        if most is not None and most < least:
            raise BadPattern("has a repeat whose end is before its start")
        return least, most

    def _number(self) -> int:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in "0123456789":
            self._at += 1
        digits = self._text[start : self._at]
        if not 1 <= len(digits) <= 6:
            raise BadPattern("has a brace that is no repeat: write it with a backslash")
        return int(digits)

    def _atom(self) -> Node:
        sign = self._next("itself")
        match sign:
            case "(":
                return self._group()
            case "[":
                return _characters(self._class())
            case ".":
                return _characters(without(LINE_ENDS))
            case "\\":
                return _characters(self._escape().narrow)
            case "^":
                raise BadPattern("has ^ within it; anchors stand at its two ends")
            case "*" | "+" | "?":
                raise BadPattern("repeats nothing")
            case "{" | "}":
                raise BadPattern("has a brace that is no repeat: write it with a backslash")
        return _characters(one(ord(sign)))

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > PATTERN_DEPTH_MAX:
            raise BadPattern(f"has groups more than {PATTERN_DEPTH_MAX} deep")
        if self._take("?") and not self._take(":"):
            self._group_name()
        node = self._choice(self._sequence)
        if self._peek() == "$":
            raise BadPattern("has $ within it; anchors stand at its two ends")
        if not self._take(")"):
            raise BadPattern("opens a group that is not closed")
        self._depth -= 1
        return node

    def _group_name(self) -> None:
        """Of a group that captures, which changes nothing."""
        self._take("P")
        if not self._take("<") or self._peek() in ("=", "!"):
            raise BadPattern("has lookahead, lookbehind or flags")
        while (letter := self._next("the name of a group")) != ">":
            if not (letter.isascii() and (letter.isalnum() or letter == "_")):
                raise BadPattern("has a group name that is none")

    def _class(self) -> Ranges:
        negated = self._take("^")
        items: list[CharacterClass] = []
        while not self._take("]"):
            items.append(self._class_item())
        if not items:
            raise BadPattern("has an empty class")
        narrow = joined(part for item in items for part in item.narrow)
        return without(joined(part for item in items for part in item.wide)) if negated else narrow

    def _class_item(self) -> CharacterClass:
        first = self._class_character()
        if not self._text.startswith("-", self._at) or self._text.startswith("-]", self._at):
            return first
        self._at += 1
        last = self._class_character()
        low, high = single(first), single(last)
        if low is None or high is None or high < low:
            raise BadPattern("has a range within a class whose ends are none")
        return CharacterClass(((low, high),), ((low, high),))

    def _class_character(self) -> CharacterClass:
        sign = self._next("a class")
        if sign == "\\":
            return self._escape(in_class=True)
        return CharacterClass(one(ord(sign)), one(ord(sign)))

    def _escape(self, *, in_class: bool = False) -> CharacterClass:
        sign = self._next("an escape")
        named = ESCAPES.get(sign.lower())
        if named is not None:
            return named if sign.islower() else named.negated()
        code = self._escaped_code(sign, in_class=in_class)
        return CharacterClass(one(code), one(code))

    def _escaped_code(self, sign: str, *, in_class: bool) -> int:
        if sign == "b" and in_class:
            return 0x08
        if sign in CONTROLS and not (sign == "0" and self._peek().isdigit()):
            return CONTROLS[sign]
        if sign == "x":
            return self._hexadecimal(2)
        if sign == "u":
            return self._in_braces() if self._take("{") else self._utf16()
        if sign.isascii() and not sign.isalnum():
            return ord(sign)
        raise BadPattern(
            "has an escape that is not offered, such as a word boundary, a reference "
            "to a group or a Unicode property"
        )

    def _utf16(self) -> int:
        """Four digits, or a pair of escapes where those are half a character."""
        code = self._hexadecimal(4)
        if 0xD800 <= code <= 0xDBFF and self._take("\\u"):
            low = self._hexadecimal(4)
            if 0xDC00 <= low <= 0xDFFF:
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            raise BadPattern(_HALF)
        return code

    def _hexadecimal(self, digits: int) -> int:
        text = self._text[self._at : self._at + digits]
        if len(text) < digits or not _HEXADECIMAL.issuperset(text):
            raise BadPattern("has an escape that is not hexadecimal")
        self._at += digits
        return int(text, 16)

    def _in_braces(self) -> int:
        text, brace, _ = self._text[self._at :].partition("}")
        if not brace or not 1 <= len(text) <= 6 or not _HEXADECIMAL.issuperset(text):
            raise BadPattern("has an escape that is not hexadecimal")
        self._at += len(text) + 1
        if int(text, 16) > LAST:
            raise BadPattern("has an escape beyond Unicode")
        return int(text, 16)


_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_ANYTHING = Repeat(Characters(((0x00, 0xD7FF), (0xE000, LAST))), 0, None)
_HALF = "asks for half of a surrogate pair"


def _characters(ranges: Ranges) -> Characters:
    """Without the halves of surrogate pairs, which are no characters of a text."""
    left = both(ranges, ((0x00, 0xD7FF), (0xE000, LAST)))
    if not left:
        raise BadPattern(_HALF if ranges else "has a class that leaves no character")
    return Characters(left)
