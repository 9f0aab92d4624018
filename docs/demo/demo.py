"""The whole loop, as a customer runs it: upload, fine-tune, batch on base and result, receipts.

It uses the official `openai` package against an instance of its own in a temporary directory, which
is gone afterwards, or against the one that GRIDLINE_BASE_URL and GRIDLINE_API_KEY name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob

HERE = Path(__file__).parent
BASE = "smollm2-135m-instruct"
HYPERPARAMETERS = {"n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 5}
READY_SECONDS_MAX = 180


@dataclass(frozen=True)
class Instance:
    base_url: str
    api_key: str
    data_dir: str | None


@contextlib.contextmanager
def instance() -> Iterator[Instance]:
    """The named instance, or one that lives as long as the demo."""
    if os.environ.get("GRIDLINE_BASE_URL") and os.environ.get("GRIDLINE_API_KEY"):
        yield Instance(os.environ["GRIDLINE_BASE_URL"], os.environ["GRIDLINE_API_KEY"], None)
        return
    with tempfile.TemporaryDirectory(prefix="gridline-demo-") as directory:
        data, ready = Path(directory) / "data", Path(directory) / "ready.json"
        say("Starting an instance of our own in a temporary directory")
        command = [sys.executable, "-m", "adapters.operators.cli", "up", "--data", str(data),
                   "--port", "0", "--ready-file", str(ready)]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                facts = wait_until_ready(process, ready)
                yield Instance(facts["base_url"], facts["api_key"], str(data))
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(timeout=30)
        say("Stopped; nothing is left running")


def wait_until_ready(process: subprocess.Popen[bytes], ready: Path) -> dict[str, Any]:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("The instance did not start; its messages are above.")
        time.sleep(0.2)
    return json.loads(ready.read_text())  # type: ignore[no-any-return]


def say(text: str) -> None:
    print(text, flush=True)


def fine_tune(client: OpenAI) -> FineTuningJob:
    """Uploads, creates, follows the loss, returns the succeeded job."""
    with (HERE / "train.jsonl").open("rb") as rows:
        training = client.files.create(file=rows, purpose="fine-tune")
    say(f"Uploaded train.jsonl as {training.id} ({training.bytes} bytes)")
    job = client.fine_tuning.jobs.create(
        model=BASE,
        training_file=training.id,
        hyperparameters=HYPERPARAMETERS,  # type: ignore[arg-type]
    )
    quote = job.gridline["quote"]  # type: ignore[attr-defined]
    say(f"Created {job.id}; the quote, before anything runs:")
    say(f"  {json.dumps(quote['per_token'])}, about {quote['estimated_seconds']} s")
    seen: set[str] = set()
    while job.status not in ("succeeded", "failed", "cancelled"):
        time.sleep(2)
        for event in reversed(client.fine_tuning.jobs.list_events(job.id, limit=100).data):
            if event.id not in seen:
                seen.add(event.id)
                say(f"  {event.message}")
        job = client.fine_tuning.jobs.retrieve(job.id)
    if job.status != "succeeded":
        raise SystemExit(f"The job ended as {job.status}: {job.error}")
    result = job.gridline["result"]  # type: ignore[attr-defined]
    say(f"Succeeded: {job.fine_tuned_model}")
    say(
        f"  eval loss {result['eval_loss_before']:.3f} before, {result['eval_loss']:.3f} after, "
        f"on {result['eval_rows']} rows; {job.trained_tokens} tokens trained"
    )
    return job


def accuracy(client: OpenAI, model: str) -> float:
    """Runs the held-out tickets as one batch on a model; the share of right answers."""
    questions = [json.loads(line) for line in (HERE / "heldout.jsonl").open()]
    lines = [
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": model,
                    "messages": question["messages"],
                    "max_completion_tokens": 16,
                    "temperature": 0,
                },
            }
        )
        for number, question in enumerate(questions)
    ]
    requests = client.files.create(
        file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch"
    )
    batch = client.batches.create(
        input_file_id=requests.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
    if batch.status != "completed" or batch.output_file_id is None:
        raise SystemExit(f"The batch ended as {batch.status}: {batch.errors}")
    right = 0
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(line)
        text = answer["response"]["body"]["choices"][0]["message"]["content"]
        right += text.strip() == questions[int(answer["custom_id"])]["answer"]
    receipt = receipt_of(client, batch.id)
    say(
        f"  {model}: {right} of {len(questions)} right; charged {receipt['charge_usd']} USD "
        f"of {receipt['hold']['maximum_usd']} held"
    )
    return right / len(questions)


def receipt_of(client: OpenAI, work_id: str) -> dict[str, Any]:
    return client.get(f"/gridline/receipts/{work_id}", cast_to=object)  # type: ignore[return-value]


def show_statement(client: OpenAI) -> None:
    """Waits until the journal, which follows the log, has the last charge."""
    statement: Any = {"is_current": False}
    while not statement["is_current"]:
        statement = client.get("/gridline/statement", cast_to=object)
    say("The account's statement, in USD:")
    say(f"  {'':<10}{'':<40}{'available':>14}{'held':>14}{'charged':>14}")
    for line in statement["data"]:
        say(
            f"  {line['kind']:<10}{line['work_id'] or line['note']:<40}"
            f"{line['available_usd']:>14}{line['held_usd']:>14}{line['charged_usd']:>14}"
        )
    closing = statement["closing"]
    say(f"  {'closing':<50}{closing['available_usd']:>14}{closing['held_usd']:>14}")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped"))
    started = time.monotonic()
    with instance() as here:
        client = OpenAI(base_url=here.base_url, api_key=here.api_key)
        say(f"Talking to {here.base_url} with the official openai package")
        job = fine_tune(client)
        assert job.fine_tuned_model is not None
        receipt = receipt_of(client, job.id)
        say(
            f"  charged {receipt['charge_usd']} USD, quoted at most {receipt['max_charge_usd']} USD"
        )
        say("Batches of 50 tickets that it never saw:")
        before = accuracy(client, BASE)
        after = accuracy(client, job.fine_tuned_model)
        show_statement(client)
        if here.data_dir is not None:
            command = [sys.executable, "-m", "adapters.operators.cli", "audit", "verify", "--data",
                       here.data_dir]  # fmt: skip
            subprocess.run(command, check=True)
    say(f"Done in {time.monotonic() - started:.0f} s: {before:.0%} right before, {after:.0%} after")


if __name__ == "__main__":
    main()
