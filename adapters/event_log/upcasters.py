"""How events of older releases become today's: one step for each change of an event's fields.

The event store applies the steps to the parsed JSON before the event is made; rows in the log are
never touched. A changed event gets a step at the end of its list and a golden file of its old form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Upcaster = Callable[[dict[str, Any]], None]
"""Changes the fields of one version into those of the next, in place."""

Upcasters = Mapping[str, Sequence[Upcaster]]
"""By topic. Version 1 is the event's first form; after n steps its version is n + 1."""

UPCASTERS: Upcasters = {}
