"""What the customers of these tests send, and what must come back, whatever SDK they use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BASE = "smollm2-135m-instruct"
ROWS = 24
QUESTIONS = 6
WORK_SECONDS_MAX = 120.0


def write_training_file(directory: Path, *, name: str = "train.jsonl", step_ms: int = 0) -> Path:
    """A chat file. `step_ms` is the time that the echo engine's training takes for each step."""
    mark = f" echo-step-ms={step_ms}" if step_ms else ""
    path = directory / name
    path.write_text(
        "".join(_row(f"Où est mon colis n° {number} ? 📦{mark}") for number in range(ROWS)),
        encoding="utf-8",
    )
    return path


def _row(question: str) -> str:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "delivery"},
    ]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def request_lines(*models: str, delay_ms: int = 0, questions: int = QUESTIONS) -> bytes:
    """Each question to each model in turn; `delay_ms` is how long echo takes for an answer."""
    mark = f" echo-delay-ms={delay_ms}" if delay_ms else ""
    return b"".join(
        _request(
            f"q{number}", models[number % len(models)], f"Ticket {number // len(models)} é{mark}"
        )
        for number in range(questions)
    )


def _request(custom_id: str, model: str, text: str) -> bytes:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": 16,
        "temperature": 0,
    }
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def answers_by_id(text: str) -> dict[str, dict[str, Any]]:
    """The chat completions of an output file; each custom_id may come once."""
    lines = [json.loads(line) for line in text.splitlines()]
    answers = {line["custom_id"]: line["response"]["body"] for line in lines}
    assert len(answers) == len(lines)
    return answers


def nano_usd(text: str) -> int:
    """An amount as an integer, so that sums are exact."""
    whole, _, part = text.partition(".")
    return int(whole) * 10**9 + int(part.ljust(9, "0"))
