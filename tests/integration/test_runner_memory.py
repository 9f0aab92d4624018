"""What customers' files hold cannot make a runner's parent process grow, or its heartbeats late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from domain.limits import MIB
from tests.integration.hostile_runner import (
    ANSWER_BYTES,
    HEARTBEAT_SECONDS,
    HOSTILE_LINES,
    LONG_ANSWERS,
)

RESIDENT_BYTES_MAX = 256 * MIB
"""docs/architecture.md, "Runners"."""


def test_a_hostile_chunk_neither_swells_the_runners_parent_nor_delays_its_heartbeats(
    quick_path: Path,
) -> None:
    """180 MiB of lines whose schemas are millions of arrays, then answers of 48 MiB each."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.hostile_runner", str(quick_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["failed"], found["completed"]) == (HOSTILE_LINES, LONG_ANSWERS)
    assert found["output_bytes"] > LONG_ANSWERS * ANSWER_BYTES
    assert found["resident_bytes"] <= RESIDENT_BYTES_MAX
    assert found["beats"] > 10
    assert found["longest_gap_seconds"] < 3 * HEARTBEAT_SECONDS
