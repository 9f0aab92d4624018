"""The customer's whole loop through OpenAI's Node packages, each on the Node it is made for.

`make sdks` installs what is needed; without it these tests fail and say so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sdk.conftest import Product
from tests.sdk.customer_files import write_training_file

HERE = Path(__file__).parent
LOOP_SECONDS_MAX = 300
STEPS = ["files", "training", "models", "batch", "adapter", "cancel", "errors", "statement",
         "deletion"]  # fmt: skip

pytestmark = pytest.mark.node


def installed_node() -> Path:
    """The machine's own."""
    found = shutil.which("node")
    assert found, "Node.js is not installed; Node 20 or newer is needed, with npm."
    return Path(found)


def packaged_node() -> Path:
    """The one that comes as a package, since the machine's may be older."""
    return HERE / "node7" / "node_modules" / ".bin" / "node"


@dataclass(frozen=True, slots=True)
class Sdk:
    """A version of OpenAI's package in a folder of its own, and the Node that it runs on."""

    folder: str
    version: str
    node: Callable[[], Path]
    node_majors: range


SDKS = [
    Sdk(folder="node7", version="7.59.0", node=packaged_node, node_majors=range(22, 23)),
    Sdk(folder="node6", version="6.49.0", node=installed_node, node_majors=range(20, 100)),
]


@pytest.mark.parametrize("sdk", SDKS, ids=[sdk.folder for sdk in SDKS])
def test_the_whole_loop_passes_unchanged(sdk: Sdk, product: Product, tmp_path: Path) -> None:
    here = HERE / sdk.folder
    assert (here / "node_modules" / "openai").is_dir(), "Run `make sdks` first."
    node = sdk.node()
    assert node.exists(), "Run `make sdks` first: the package of Node itself is missing."
    command: list[str | Path] = [
        node,
        here / "main.mjs",
        write_training_file(tmp_path),
        write_training_file(tmp_path, name="slow.jsonl", step_ms=1_000),
        product.metrics_url,
    ]
    done = subprocess.run(
        command,
        env=os.environ | product.new_customer().environment(),
        timeout=LOOP_SECONDS_MAX,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert (facts["openai"], facts["passed"]) == (sdk.version, STEPS)
    assert int(facts["node"].removeprefix("v").partition(".")[0]) in sdk.node_majors
