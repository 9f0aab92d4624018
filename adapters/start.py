"""How every process of the product begins: settings, log, work; and how it says that it cannot.

The entry points of the API, the worker and the runner call `run_process`. It must never show a
traceback for what an operator can mend: that is an `Unusable`, one line on stderr, and status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from adapters.settings import Settings, Unusable, process_environment
from adapters.telemetry import configure_logging

CANNOT_START = 2


def run_process(name: str, serve: Callable[[Settings], None]) -> None:
    """Serves with the environment's settings until `serve` returns."""
    try:
        settings = Settings.from_environment(process_environment())
        configure_logging(name, level=settings.log_level)
        serve(settings)
    except* Unusable as unusable:
        for error in _leaves(unusable):
            sys.stderr.write(f"gridlined {name}: {error}\n")
        sys.exit(CANNOT_START)


def _leaves(group: BaseExceptionGroup[Unusable]) -> list[Unusable]:
    found: list[Unusable] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
