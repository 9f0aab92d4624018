"""Commands given, when and then, on a log in memory."""

from __future__ import annotations

import pytest

from tests.integration.product_rig import MemoryStory


@pytest.fixture
def story() -> MemoryStory:
    return MemoryStory()
