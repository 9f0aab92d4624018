"""The engine child: one loaded base, driven by its parent over two pipes in JSON lines.

`parent/slots.py` starts it with the interpreter that has the engine. It imports nothing but the
engine's libraries, pydantic and the standard library. It must never outlive its parent, and nothing
but the protocol may reach the real standard output.

In: {"op": "load", …Base}, {"op": "adapter", name, directory}, {"op": "line", id, endpoint, adapter,
body}, {"op": "abort", token}. Out: loaded | load_failed; adapter_ready | adapter_failed; generated
or embedded, with its text behind it, or refused, once for each line; aborted; tick every few
seconds while it works.
"""

from __future__ import annotations

import argparse
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from domain.catalog import EMBEDDINGS_ENDPOINT
from domain.errors import GridlineError
from domain.inputs.requests.chat_body import read_chat_body
from domain.inputs.requests.embeddings_body import EncodingFormat, read_embeddings_body
from domain.inputs.requests.faults import refusal
from gpu_runners.child_pipes import (
    MessageTooLong,
    read_operations,
    take_standard_output,
    write_message,
)
from gpu_runners.inference.answers import choices_text, data_text
from gpu_runners.inference.engine import (
    Base,
    ChatRequest,
    Embedded,
    EmbeddingRequest,
    Engine,
    EngineFailed,
    EngineRefusal,
    Generated,
    Refused,
    Result,
)
from gpu_runners.lifeline import die_with_parent

TICK_SECONDS = 5.0


def _vllm() -> Engine:
    from gpu_runners.inference.engine_vllm import VllmEngine

    return VllmEngine()


def _transformers() -> Engine:
    from gpu_runners.inference.engine_transformers import TransformersEngine

    return TransformersEngine()


def _echo() -> Engine:
    from gpu_runners.inference.engine_echo import EchoEngine

    return EchoEngine()


# Imported when chosen: each engine's libraries are in one environment only.
ENGINES: dict[str, Callable[[], Engine]] = {
    "vllm": _vllm,
    "transformers": _transformers,
    "echo": _echo,
}


class EngineLoop:
    """Takes operations as they come and steps the engine while it has work."""

    def __init__(
        self, engine: Engine, operations: queue.SimpleQueue[dict[str, Any]], out: BinaryIO
    ) -> None:
        self._engine = engine
        self._operations = operations
        self._out = out
        self._encoding_formats: dict[str, EncodingFormat] = {}
        self._told_at = time.monotonic()

    def run(self) -> None:
        """Never returns; the end of standard input ends the process."""
        while True:
            self._take_operations()
            if self._engine.busy:
                for result in self._engine.step():
                    self._tell_result(result)
                if time.monotonic() - self._told_at > TICK_SECONDS:
                    self._tell({"type": "tick"})

    def _take_operations(self) -> None:
        """What has come; an idle engine waits for something, and then for what follows at once."""
        idle = not self._engine.busy
        wait_seconds = None if idle else 0.0
        while True:
            try:
                operation = self._operations.get(timeout=wait_seconds)
            except queue.Empty:
                return
            self._do(operation)
            wait_seconds = self._engine.gather_seconds if idle else 0.0

    def _do(self, operation: dict[str, Any]) -> None:
        match operation.pop("op"):
            case "load":
                self._load(operation)
            case "adapter":
                self._add_adapter(operation["name"], Path(operation["directory"]))
            case "line":
                self._submit(operation)
            case "abort":
                self._engine.abort()
                self._encoding_formats.clear()
                self._tell({"type": "aborted", "token": operation["token"]})
            case other:
                raise AssertionError(f"unknown operation {other!r}")

    def _load(self, operation: dict[str, Any]) -> None:
        directory = Path(operation.pop("directory"))
        try:
            self._engine.load(Base(directory=directory, **operation))
        except Exception as error:  # noqa: BLE001 - whatever it is, this base cannot be served
            self._tell({"type": "load_failed", "error": f"{type(error).__name__}: {error}"[:500]})
        else:
            self._tell({"type": "loaded"})

    def _add_adapter(self, name: str, directory: Path) -> None:
        try:
            self._engine.add_adapter(name, directory)
        except GridlineError as error:
            self._tell({"type": "adapter_failed", "name": name, **_refusal(error)})
        else:
            self._tell({"type": "adapter_ready", "name": name})

    def _submit(self, operation: dict[str, Any]) -> None:
        try:
            request = _request(operation)
            if isinstance(request, EmbeddingRequest):
                self._encoding_formats[request.id] = request.encoding_format
            self._engine.submit(request)
        except GridlineError as error:
            self._tell_result(Refused(id=operation["id"], error=error))
        except Exception:  # noqa: BLE001 - one request never ends another
            failed = EngineFailed("The engine could not take this request.")
            self._tell_result(Refused(id=operation["id"], error=failed))

    def _tell(self, message: dict[str, Any], payload: bytes = b"") -> None:
        write_message(self._out, message, payload)
        self._told_at = time.monotonic()

    def _tell_result(self, result: Result) -> None:
        encoding_format = self._encoding_formats.pop(result.id, "float")
        try:
            self._tell(*_wire(result, encoding_format))
        except MessageTooLong:
            error = EngineRefusal("The answer is larger than a line may be. Ask for fewer tokens.")
            self._tell(*_wire(Refused(id=result.id, error=error), encoding_format))
        except ValueError:
            failed = EngineFailed("The engine's answer cannot be written as JSON.")
            self._tell(*_wire(Refused(id=result.id, error=failed), encoding_format))


def _request(operation: dict[str, Any]) -> ChatRequest | EmbeddingRequest:
    """Read as validation read it. Raises InvalidRequest for what that would have refused."""
    if operation["endpoint"] == EMBEDDINGS_ENDPOINT:
        embeddings = read_embeddings_body(operation["body"])
        if isinstance(embeddings, list):
            raise refusal(embeddings[0])
        return EmbeddingRequest(
            id=operation["id"],
            inputs=embeddings.inputs,
            encoding_format=embeddings.encoding_format,
        )
    chat = read_chat_body(operation["body"])
    if isinstance(chat, list):
        raise refusal(chat[0])
    return ChatRequest(id=operation["id"], adapter=operation["adapter"], body=chat)


def _wire(result: Result, encoding_format: EncodingFormat) -> tuple[dict[str, Any], bytes]:
    """The message, and the text that follows it."""
    match result:
        case Generated():
            tokens = {"input_tokens": result.input_tokens, "output_tokens": result.output_tokens}
            return {"type": "generated", "id": result.id, **tokens}, choices_text(result.choices)
        case Embedded():
            tokens = {"input_tokens": result.input_tokens}
            payload = data_text(result.vectors, encoding_format)
            return {"type": "embedded", "id": result.id, **tokens}, payload
        case Refused():
            return {"type": "refused", "id": result.id, **_refusal(result.error)}, b""


def _refusal(error: GridlineError) -> dict[str, Any]:
    return {
        "status": error.status,
        "error_type": error.error_type,
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(description="Serve one base to the parent process.")
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    options = parser.parse_args()
    out = take_standard_output()
    EngineLoop(ENGINES[options.engine](), read_operations(), out).run()


if __name__ == "__main__":
    main()
