"""What is wrong with a field of a request, as a value.

The readers of request bodies return these. Batch validation lists them with their line; the engine
child, which reads the body again, raises the first one. A fault never quotes a value, nor a name
that could be somebody's text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from domain.errors import InvalidRequest

_SAFE_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_.-]{0,39}")
UNNAMED = "?"
"""In a path, for a name that is not shown."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`path` is the field's, within the line or the body; the message is said about it."""

    code: str
    path: str
    after: str
    before: str = ""

    def message(self, at: str = "") -> str:
        """Without its full stop. `at` comes before every path, such as "body."."""
        shown = at + self.path
        if shown.endswith(UNNAMED):
            shown = shown.removesuffix(UNNAMED).rstrip(".") or "the line"
        return f"{self.before}{shown}{self.after}"


def missing(path: str) -> Fault:
    return Fault(code="missing_required_parameter", path=path, after=" is missing")


def invalid(path: str, what: str) -> Fault:
    return Fault(code="invalid_value", path=path, after=f" {what}")


def unsupported(name: str, *, within: str = "") -> Fault:
    """A field that is not offered; `within` is the path of what holds it."""
    start = f"{within}." if within else ""
    if is_safe_name(name):
        return Fault(
            code="unsupported_parameter",
            path=start + name,
            after="",
            before="Unsupported parameter: ",
        )
    return Fault(
        code="unsupported_parameter", path=start + UNNAMED, after=" holds an unknown field"
    )


def is_safe_name(name: str) -> bool:
    """Whether a message may show it: an identifier, not a sentence."""
    return _SAFE_NAME.fullmatch(name) is not None


def refusal(fault: Fault) -> InvalidRequest:
    """The fault as the error of one request."""
    return InvalidRequest(f"{fault.message()}.", param=fault.path, code=fault.code)
