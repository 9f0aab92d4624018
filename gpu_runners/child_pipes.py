"""The pipes between the runner and its child processes: messages of JSON, in lines of bounded
length.

Each child takes its pipes from here, and `parent/child.py` reads the other end. A message longer
than a line goes in pieces: lines that begin with `+`, then an empty line, so that neither end ever
waits for, or keeps, a line without end. It must never let anything but messages reach the real
standard output.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import struct
import sys
import threading
from typing import Any, TextIO

PIECE = "+"
LINE_BYTES_MAX = 1 << 20
"""Of what a child writes, line end not counted."""
MESSAGE_BYTES_MAX = 64 << 20
"""Of all pieces of a message. The largest embeddings answer, 2,048 vectors of 1,024 numbers, takes
11 MiB; a chat answer's tokens and log-probabilities are bounded when it is validated."""


class MessageTooLong(Exception):
    """What a child has to say is more than its parent takes. Nothing was written."""


def take_standard_output() -> TextIO:
    """The real standard output for messages; whatever prints gets standard error instead."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
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


def write_message(out: TextIO, message: dict[str, Any]) -> None:
    """One message, in as many lines as it needs. Raises MessageTooLong."""
    text = json.dumps(message)  # ASCII: as many bytes as letters
    if len(text) > MESSAGE_BYTES_MAX:
        raise MessageTooLong
    if len(text) > LINE_BYTES_MAX:
        step = LINE_BYTES_MAX - len(PIECE)
        starts = range(0, len(text), step)
        out.writelines(f"{PIECE}{text[start : start + step]}\n" for start in starts)
        text = ""
    out.write(text + "\n")
    out.flush()


def pack_vector(values: list[float]) -> str:
    """Little-endian float32 in base64, OpenAI's form and ours."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def unpack_vector(text: str) -> list[float]:
    """The numbers of `pack_vector`, with the nine digits that tell float32 values apart."""
    raw = base64.b64decode(text)
    return [float(f"{value:.9g}") for value in struct.unpack(f"<{len(raw) // 4}f", raw)]
