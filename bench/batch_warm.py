"""`batch_warm_over_run_batch`: a 200-line chat batch on a running product with a warm engine, from
create to completed, over the time that `vllm run-batch` generates for the same file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from openai import OpenAI

from adapters.process.settings import process_environment
from bench.report import Figure, machine
from gpu_runners.weights.store import Weights

BASE = "smollm2-135m-instruct"
PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
LINES = 200
WARM_LINES = 64
TOKENS_MAX = 64
ROUNDS = 3
READY_SECONDS_MAX = 180
STOP_SECONDS_MAX = 60
POLL_SECONDS = 0.2

TASKS = (
    "Explain in two sentences why {} matters.",
    "Write a short note to a friend about {}.",
    "Give three facts about {}.",
    "What would a child ask about {}, and what would you answer?",
    "Summarise what people usually get wrong about {}.",
)
SUBJECTS = (
    "the sea", "bread", "night trains", "chess", "rain", "old maps", "bees", "winter", "tea",
    "bicycles", "the moon", "paper", "rivers", "music", "salt", "clocks", "gardens", "glass",
    "snow", "cats", "libraries", "bridges", "wool", "sleep", "markets", "volcanoes", "soap",
    "islands", "coffee", "owls", "lighthouses", "honey", "deserts", "ink", "windmills", "ferns",
    "harbours", "thunder", "pencils", "apples",
)  # fmt: skip

PEER_SETTINGS = (
    "--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", "256", "--enforce-eager",
    "--generation-config", "vllm", "--seed", "0", "--served-model-name", BASE,
)  # fmt: skip
"""Ours but for LoRA, which this file does not need."""


@dataclass(frozen=True, slots=True)
class Run:
    """How long one took, and the tokens that it generated."""

    seconds: float
    tokens: int


def measure() -> list[Figure]:
    """Interleaved rounds, with nothing of the other running; the median of their ratios."""
    with tempfile.TemporaryDirectory(prefix="gridline-bench-") as name:
        directory = Path(name)
        requests = directory / "requests.jsonl"
        requests.write_bytes(_request_lines(LINES))
        conditions = machine()
        rounds: list[tuple[Run, Run]] = []
        for _ in range(ROUNDS):
            with _running_product(directory / "data") as client:
                ours = _batch(client, requests)
            rounds.append((ours, _run_batch(requests, weights=directory / "data" / "weights")))
    ours, peers = [mine for mine, _ in rounds], [theirs for _, theirs in rounds]
    seconds = [median(run.seconds for run in side) for side in (ours, peers)]
    return [
        Figure(
            name="batch_warm_over_run_batch",
            value=round(median(mine.seconds / theirs.seconds for mine, theirs in rounds), 3),
            unit="times",
            goal="<= 1.15",
            peer="vllm run-batch on all cores, its progress bar from 0 % to 100 %",
            conditions=(
                f"{LINES} lines, {ours[0].tokens} and {peers[0].tokens} tokens; "
                f"medians {seconds[0]:.2f} and {seconds[1]:.2f} s; {conditions}"
            ),
        )
    ]


@contextmanager
def _running_product(data: Path) -> Iterator[OpenAI]:
    """`gridlined up` with vLLM, warm; a client for it."""
    ready = data.with_name("ready.json")
    command = [sys.executable, "-m", "adapters.operators.cli", "up", "--data", str(data),
               "--port", "0", "--ready-file", str(ready)]  # fmt: skip
    environment = process_environment() | {"GRIDLINE_ENGINE": "vllm"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            facts = _until_ready(process, ready)
            with OpenAI(base_url=facts["base_url"], api_key=facts["api_key"]) as client:
                warm = data.with_name("warm.jsonl")
                # Other questions: what the engine remembers of them must not help.
                warm.write_bytes(_request_lines(WARM_LINES, "Dear reader, here is a question. "))
                _batch(client, warm)
                yield client
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=STOP_SECONDS_MAX)


def _until_ready(process: subprocess.Popen[bytes], ready: Path) -> dict[str, Any]:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while not ready.exists():
        assert process.poll() is None, "the product did not start"
        assert time.monotonic() < deadline, "the product is not ready"
        time.sleep(POLL_SECONDS)
    facts: dict[str, Any] = json.loads(ready.read_text())
    return facts


def _batch(client: OpenAI, requests: Path) -> Run:
    """From create to completed."""
    with requests.open("rb") as lines:
        file = client.files.create(file=lines, purpose="batch")
    start = time.perf_counter()
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(POLL_SECONDS)
        batch = client.batches.retrieve(batch.id)
    seconds = time.perf_counter() - start
    assert batch.status == "completed", batch.errors
    assert batch.output_file_id is not None
    tokens = _output_tokens(client.files.content(batch.output_file_id).text)
    return Run(seconds=seconds, tokens=tokens)


def _run_batch(requests: Path, *, weights: Path) -> Run:
    """The peer generates. Its bar appears when the engine is
    ready and the file is read, and is complete before anything is written."""
    output = requests.with_name("peer-output.jsonl")
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.run_batch", "-i", str(requests),
               "-o", str(output), "--model", str(Weights(weights).path(BASE)),
               *PEER_SETTINGS]  # fmt: skip
    environment = process_environment() | {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    began = ended = 0.0
    said = []
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.startswith("Running batch:") and not began:
                began = time.perf_counter()
            if line.startswith("Running batch: 100%"):
                ended = time.perf_counter()
    assert process.returncode == 0, "".join(said[-30:])
    assert 0 < began < ended
    return Run(seconds=ended - began, tokens=_output_tokens(output.read_text()))


def _output_tokens(results: str) -> int:
    lines = [json.loads(line) for line in results.splitlines()]
    usages = [line["response"]["body"]["usage"] for line in lines]
    return sum(usage["completion_tokens"] for usage in usages)


def _request_lines(count: int, opening: str = "") -> bytes:
    """Chats that differ, greedy."""
    questions = [opening + task.format(subject) for task in TASKS for subject in SUBJECTS]
    return b"".join(
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": BASE,
                    "messages": [{"role": "user", "content": question}],
                    "max_completion_tokens": TOKENS_MAX,
                    "temperature": 0,
                },
            }
        ).encode()
        + b"\n"
        for number, question in enumerate(questions[:count])
    )
