"""The pipes between the runner and its child processes: messages of JSON, one a line.

Each child takes its pipes from here, and `parent/child.py` reads the other end. A line is short.
What can be long, the text of an answer, follows its message as so many bytes, which the parent
passes on piece by piece and never holds whole. It must never let anything but messages reach the
real standard output.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import struct
import sys
import threading
from typing import Any, BinaryIO

LINE_BYTES_MAX = 1 << 20
"""Of what a child writes as one message, line end not counted."""
PAYLOAD_BYTES_MAX = 64 << 20
"""Of what follows a message. The largest embeddings answer, 2,048 vectors of 1,024 numbers, takes
27 MiB; a chat answer's tokens and log-probabilities are bounded when it is validated."""


class MessageTooLong(Exception):
    """What a child has to say is more than its parent takes. Nothing was written."""


def take_standard_output() -> BinaryIO:
    """The real standard output for messages; whatever prints gets standard error instead."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out


def read_operations() -> queue.SimpleQueue[dict[str, Any]]:
    """Standard input as a queue; its end ends the process, whatever it is doing."""
    operations: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            operations.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return operations


def write_message(out: BinaryIO, message: dict[str, Any], payload: bytes = b"") -> None:
    """One message, and the payload of which it tells the size. Raises MessageTooLong."""
    if payload:
        message = {**message, "payload_bytes": len(payload)}
    line = json.dumps(message).encode()
    if len(line) > LINE_BYTES_MAX or len(payload) > PAYLOAD_BYTES_MAX:
        raise MessageTooLong
    out.write(line + b"\n")
    out.write(payload)
    out.flush()


def pack_vector(values: list[float]) -> str:
    """Little-endian float32 in base64, OpenAI's form and ours."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def unpack_vector(text: str) -> list[float]:
    """The numbers of `pack_vector`, with the nine digits that tell float32 values apart."""
    raw = base64.b64decode(text)
    return [float(f"{value:.9g}") for value in struct.unpack(f"<{len(raw) // 4}f", raw)]
