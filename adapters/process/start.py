"""How every process of the product begins: settings, log, work; and how it says that it cannot.

The entry points of the API, the worker and the runner call `run_process`, and open their object
store here. None of them may show a traceback for what an operator can mend: that is an `Unusable`,
one line on stderr, and status 2.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from adapters.objects import open_store
from adapters.process.settings import Settings, Unusable, process_environment
from adapters.process.telemetry import configure_logging
from domain.errors import StoreAway
from domain.ports import Objects

CANNOT_START = 2
STORE_SECONDS_MAX = 10.0
REASON_CHARACTERS_MAX = 300
"""Of what an object store says: some send whole pages."""


def run_process(name: str, serve: Callable[[Settings], None]) -> None:
    """Serves with the environment's settings until `serve` returns."""
    try:
        settings = Settings.from_environment(process_environment())
        configure_logging(name, level=settings.log_level)
        serve(settings)
    except* Unusable as unusable:
        for error in _leaves(unusable):
            sys.stderr.write(f"gridlined {name}: {error}\n")
        sys.stderr.flush()
        # At once: a thread of the store's client that still lets go of its answer can abort an
        # interpreter which is being taken down.
        os._exit(CANNOT_START)


async def usable_store(settings: Settings) -> Objects:
    """The object store that the settings name, once it has answered. Raises Unusable."""
    settings.require("object_store_url")
    try:
        store = open_store(settings.object_store_url)
        async with asyncio.timeout(STORE_SECONDS_MAX):
            await store.check()
    except TimeoutError:
        raise _unusable_store(settings, "it does not answer") from None
    except StoreAway as away:
        raise _unusable_store(settings, " ".join(f"{away.__cause__}".split())) from away
    except Exception as error:  # each store has errors of its own
        raise _unusable_store(settings, " ".join(f"{error}".split())) from error
    return store


def _unusable_store(settings: Settings, reason: str) -> Unusable:
    cut = reason[:REASON_CHARACTERS_MAX]
    return Unusable(f"GRIDLINE_OBJECT_STORE_URL={settings.object_store_url!r}: {cut}")


def _leaves(group: BaseExceptionGroup[Unusable]) -> list[Unusable]:
    found: list[Unusable] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
