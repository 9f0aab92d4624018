"""One instance for all tests that end parts of it; each finds it running."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.instance import Instance, instance_in
from tests.conftest import _memory_directory


@pytest.fixture(scope="session")
def shared_instance() -> Iterator[Instance]:
    """In memory where there is room: what is tested is processes, not the disk."""
    with (
        tempfile.TemporaryDirectory(dir=_memory_directory()) as directory,
        instance_in(Path(directory)) as instance,
    ):
        yield instance


@pytest.fixture(scope="module")
def instance(shared_instance: Instance) -> Instance:
    """Running, whatever the tests before did to it."""
    shared_instance.ensure_running()
    return shared_instance
