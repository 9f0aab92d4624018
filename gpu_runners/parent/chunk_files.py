"""The two result files of a chunk as they grow, and the counts and usage of what is in them.

`chunk.py` writes each finished line through it, once. An answer passes in pieces; one whose engine
dies in the middle of it leaves nothing. Writing never holds up the runner's loop for long.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

from domain.messages import ChunkProgress, ModelUsage
from gpu_runners.parent import measures
from gpu_runners.parent.attempts import RunningAttempt
from gpu_runners.parent.chunk_input import RequestLine
from gpu_runners.parent.results import Frame, chat_frame, embeddings_frame, error_line


class ChunkFiles:
    """Open while its block runs."""

    def __init__(self, running: RunningAttempt, directory: Path) -> None:
        self._running = running
        self.output_path = directory / "output.jsonl"
        self.errors_path = directory / "errors.jsonl"
        self.completed = 0
        self.failed = 0
        self._input_tokens: Counter[str] = Counter()
        self._output_tokens: Counter[str] = Counter()

    def __enter__(self) -> ChunkFiles:
        self._output: BinaryIO = self.output_path.open("wb", buffering=0)
        self._errors: BinaryIO = self.errors_path.open("wb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        self._errors.close()

    async def answer(
        self, line: RequestLine, message: dict[str, Any], payload: AsyncIterator[bytes]
    ) -> None:
        """Writes a generated or embedded message of the engine as a line. Passes on what `payload`
        raises, and has then written nothing."""
        frame = self._frame(line, message)
        start = self._output.tell()
        try:
            await _write(self._output, frame.head)
            async for piece in payload:
                await _write(self._output, piece)
            await _write(self._output, frame.tail)
        except BaseException:
            os.ftruncate(self._output.fileno(), start)
            self._output.seek(start)
            raise
        self.completed += 1
        self._input_tokens[line.model] += message["input_tokens"]
        self._output_tokens[line.model] += message.get("output_tokens", 0)
        measures.LINES.labels(end="answered").inc()
        measures.TOKENS.labels(kind="input").inc(message["input_tokens"])
        measures.TOKENS.labels(kind="output").inc(message.get("output_tokens", 0))
        self._tell()

    async def error(self, line: RequestLine, refusal: dict[str, Any]) -> None:
        """Writes a refusal as a line of the error file."""
        text = error_line(
            self._running.attempt,
            line,
            status=refusal["status"],
            error_type=refusal["error_type"],
            code=refusal["code"],
            message=refusal["message"],
            param=refusal["param"],
        )
        await _write(self._errors, text)
        self.failed += 1
        measures.LINES.labels(end="refused").inc()
        self._tell()

    def usage(self) -> tuple[ModelUsage, ...]:
        """Tokens of the answered lines by model name."""
        return tuple(
            ModelUsage(
                model=model,
                input_tokens=self._input_tokens[model],
                output_tokens=self._output_tokens[model],
            )
            for model in sorted(self._input_tokens)
        )

    def _frame(self, line: RequestLine, message: dict[str, Any]) -> Frame:
        attempt, input_tokens = self._running.attempt, message["input_tokens"]
        if message["type"] == "embedded":
            return embeddings_frame(attempt, line, input_tokens=input_tokens)
        return chat_frame(
            attempt,
            line,
            created=int(self._running.tools.clock.now().timestamp()),
            input_tokens=input_tokens,
            output_tokens=message["output_tokens"],
        )

    def _tell(self) -> None:
        self._running.progress(ChunkProgress(completed=self.completed, failed=self.failed))


async def _write(file: BinaryIO, content: bytes) -> None:
    await asyncio.to_thread(_write_whole, file, content)


def _write_whole(file: BinaryIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
