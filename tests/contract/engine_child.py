"""An engine child as the runner starts it, driven step by step by a test."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adapters.process.settings import Settings
from gpu_runners.child_pipes import pack_vector, unpack_vector
from gpu_runners.parent.slots import EngineSlot, engine_command
from gpu_runners.weights.store import Weights

CASES = Path(__file__).parents[1] / "unit" / "cases" / "engine_lines"
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


class EngineChild:
    """Sends lines and collects their results."""

    def __init__(self, engine: str, process: subprocess.Popen[bytes]) -> None:
        self.engine = engine
        self._process = process
        self._lines = 0

    def send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The next message but ticks."""
        while (message := self._message())["type"] == "tick":
            pass
        return message

    @property
    def pid(self) -> int:
        return self._process.pid

    def _message(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        message = dict(json.loads(self._process.stdout.readline()))
        if payload_bytes := message.pop("payload_bytes", 0):
            listed = json.loads(self._process.stdout.read(payload_bytes))
            message |= (
                _as_choices(listed) if message["type"] == "generated" else _as_vectors(listed)
            )
        return message

    def add_adapter(self, name: str, directory: Path) -> dict[str, Any]:
        self.send({"op": "adapter", "name": name, "directory": str(directory)})
        return self.receive()

    def answer(self, *lines: tuple[str | None, dict[str, Any]]) -> list[dict[str, Any]]:
        """Runs (adapter, body) lines together; results in the order of the lines."""
        ids = []
        for adapter, body in lines:
            self._lines += 1
            ids.append(str(self._lines))
            endpoint = "/v1/embeddings" if "input" in body else "/v1/chat/completions"
            line = {"op": "line", "id": ids[-1], "endpoint": endpoint, "adapter": adapter}
            self.send({**line, "body": {"model": "m", **body}})
        found = {message["id"]: message for message in (self.receive() for _ in ids)}
        return [found[each] for each in ids]

    def case(self, name: str) -> dict[str, dict[str, Any]]:
        """Runs the lines of a file together; results by custom_id."""
        lines = [json.loads(line) for line in (CASES / f"{name}.jsonl").read_text().splitlines()]
        results = self.answer(*((None, line["body"]) for line in lines))
        return {line["custom_id"]: each for line, each in zip(lines, results, strict=True)}

    def chat(self, text: str, adapter: str | None = None, **fields: Any) -> dict[str, Any]:
        return self.answer((adapter, chat(text, **fields)))[0]


def _as_choices(listed: list[dict[str, Any]]) -> dict[str, Any]:
    """Text, finish_reason and token entries of each choice."""
    choices = [
        {
            "text": choice["message"]["content"],
            "finish_reason": choice["finish_reason"],
            "logprobs": choice["logprobs"] and choice["logprobs"]["content"],
        }
        for choice in listed
    ]
    return {"choices": choices}


def _as_vectors(listed: list[dict[str, Any]]) -> dict[str, Any]:
    """Packed vectors, as base64 was asked for or not."""
    given = [entry["embedding"] for entry in listed]
    return {"vectors": [each if isinstance(each, str) else pack_vector(each) for each in given]}


@contextmanager
def engine_child(
    engine: str, base: str, weights_root: Path, work_dir: Path, **facts: Any
) -> Iterator[EngineChild]:
    """`facts` are loaded in place of the catalog's."""
    settings = Settings(engine=engine, engines_python=str(VLLM_PYTHON))
    slot = EngineSlot(settings, Weights(weights_root), work_dir)
    process = subprocess.Popen(
        engine_command(settings, work_dir),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        child = EngineChild(engine, process)
        child.send({**slot._load_operation(base), **facts})
        assert child.receive() == {"type": "loaded"}
        yield child
    finally:
        process.kill()
        process.communicate()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def length(vector: str) -> float:
    return math.sqrt(sum(value * value for value in unpack_vector(vector)))


def write_random_adapter(directory: Path, base: Path, *, seed: int, rank: int = 8) -> Path:
    """A LoRA on every linear layer, strong enough to change answers."""
    config = json.loads((base / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    narrow = head * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (width_in, width_out) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            a = torch.randn(rank, width_in, generator=generator) * 0.05
            b = torch.randn(width_out, rank, generator=generator) * 0.03
            tensors[f"{name}.lora_A.weight"] = a.bfloat16()
            tensors[f"{name}.lora_B.weight"] = b.bfloat16()
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.partition(".")[2] for name in shapes],
    }
    (directory / "adapter_config.json").write_text(json.dumps(adapter))
    return directory
