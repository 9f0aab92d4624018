"""Small training files."""

from __future__ import annotations

import json


def chat_file(rows: int = 12, *, text: str = "Where is my parcel?") -> bytes:
    """Chat rows that any base takes."""
    return b"".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"{text} {number}"},
                    {"role": "assistant", "content": "delivery"},
                ]
            }
        ).encode()
        + b"\n"
        for number in range(rows)
    )


def preference_file(rows: int = 12) -> bytes:
    """DPO rows that any base takes."""
    row = {
        "input": {"messages": [{"role": "user", "content": "Capital of France?"}]},
        "preferred_output": [{"role": "assistant", "content": "Paris."}],
        "non_preferred_output": [{"role": "assistant", "content": "Lyon."}],
    }
    return (json.dumps(row) + "\n").encode() * rows
