"""Runs one chunk of a batch: its lines through a warm engine child, each answer into a local file.

`runner.py` starts it for a `batch_chunk` task and publishes what it returns. A line ends in exactly
one of the two files. An engine that dies costs only the lines that it had not finished: they run
again, few at a time, and a line that was in flight at two deaths becomes an error line. Nothing
here quotes a line in a log or message.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from domain.inputs.jsonl import Line, LineSplitter
from domain.inputs.strict_json import parse_json
from domain.limits import BATCH_LINE_BYTES_MAX
from domain.messages import (
    AdapterRef,
    AttemptFailed,
    BatchChunkTask,
    ChunkFinished,
    ChunkProgress,
    ModelUsage,
    ObjectRef,
)
from domain.ports import ObjectMissing, Objects
from gpu_runners.parent.adapter_cache import DigestMismatch
from gpu_runners.parent.attempts import RunningAttempt, with_store_retries
from gpu_runners.parent.child import Child, ChildGone
from gpu_runners.parent.results import (
    RequestLine,
    answer_line,
    chat_completion,
    embedding_list,
    error_line,
)
from gpu_runners.parent.slots import EngineLoadFailed, EngineSlot
from gpu_runners.weights.store import WeightsUnavailable

RUNS_MAX = 3
DEATHS_MAX = 2
"""Engine deaths that a line may have been in flight at."""
IN_FLIGHT_MAX = 256
IN_FLIGHT_AFTER_DEATH_MAX = 8
"""Few, so that a line that kills engines takes few others with it."""
SILENCE_SECONDS_MAX = 600.0
"""A working engine says something every few seconds."""

logger = structlog.stdlib.get_logger(__name__)


async def run_chunk(running: RunningAttempt, task: BatchChunkTask) -> ChunkFinished | AttemptFailed:
    """The whole attempt. A cancel keeps what is finished."""
    running.started()
    directory = Path(tempfile.mkdtemp(dir=running.tools.work_dir, prefix="chunk-"))
    try:
        objects = running.tools.objects
        lines = await with_store_retries(lambda: read_lines(objects, task))
        with ChunkFiles(running, directory) as files:
            try:
                async with _adapter_directories(running, task) as adapters:
                    await _ChunkRun(running, task, adapters, lines, files).run()
            except (ChildGone, EngineLoadFailed, WeightsUnavailable) as error:
                logger.warning("engine failed", error=type(error).__name__)
                return AttemptFailed(
                    code="engine_failed", message="The engine failed while it ran these lines."
                )
        return await _finished(running, task, files)
    except ObjectMissing:
        return AttemptFailed(code="engine_failed", message="The batch's input is not in the store.")
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


async def read_lines(objects: Objects, task: BatchChunkTask) -> list[RequestLine]:
    """The chunk's request lines; blank ones count in the numbers. Raises ObjectMissing."""
    splitter = LineSplitter(
        line_bytes_max=BATCH_LINE_BYTES_MAX, first_line=task.first_line, start_byte=task.start_byte
    )
    found: list[Line] = []
    async for block in objects.get(
        task.input_key, start_byte=task.start_byte, end_byte=task.end_byte
    ):
        found += splitter.feed(block)
    lines = [_request_line(line) for line in (*found, *splitter.finish())]
    assert len(lines) == task.requests
    return lines


def _request_line(line: Line) -> RequestLine:
    assert line.content is not None
    record = parse_json(line.content)
    return RequestLine(line.number, record["custom_id"], record["body"])


class ChunkFiles:
    """The two result files as they grow, and the counts and usage of what is in them."""

    def __init__(self, running: RunningAttempt, directory: Path) -> None:
        self._running = running
        self.output_path = directory / "output.jsonl"
        self.errors_path = directory / "errors.jsonl"
        self.completed = 0
        self.failed = 0
        self._input_tokens: Counter[str] = Counter()
        self._output_tokens: Counter[str] = Counter()

    def __enter__(self) -> ChunkFiles:
        self._output: BinaryIO = self.output_path.open("wb")
        self._errors: BinaryIO = self.errors_path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        self._errors.close()

    def answer(self, line: RequestLine, message: dict[str, Any]) -> None:
        """Writes a generated or embedded message of the engine as a line."""
        output_tokens = message.get("output_tokens", 0)
        body = self._body(line, message)
        self._output.write(answer_line(self._running.attempt, line, body))
        self.completed += 1
        self._input_tokens[line.model] += message["input_tokens"]
        self._output_tokens[line.model] += output_tokens
        self._tell()

    def error(self, line: RequestLine, refusal: dict[str, Any]) -> None:
        """Writes a refusal as a line of the error file."""
        self._errors.write(
            error_line(
                self._running.attempt,
                line,
                status=refusal["status"],
                error_type=refusal["error_type"],
                code=refusal["code"],
                message=refusal["message"],
                param=refusal["param"],
            )
        )
        self.failed += 1
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

    def _body(self, line: RequestLine, message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "embedded":
            return embedding_list(
                line, vectors=message["vectors"], input_tokens=message["input_tokens"]
            )
        return chat_completion(
            self._running.attempt,
            line,
            created=int(self._running.tools.clock.now().timestamp()),
            choices=message["choices"],
            input_tokens=message["input_tokens"],
            output_tokens=message["output_tokens"],
        )

    def _tell(self) -> None:
        self._running.progress(ChunkProgress(completed=self.completed, failed=self.failed))


class _ChunkRun:
    """The lines still to finish, and the engine child that works on them."""

    def __init__(
        self,
        running: RunningAttempt,
        task: BatchChunkTask,
        adapters: dict[str, Path | None],
        lines: list[RequestLine],
        files: ChunkFiles,
    ) -> None:
        self._running = running
        self._task = task
        self._adapters = adapters
        self._pending = {line.number: line for line in lines}
        self._files = files
        self._deaths: Counter[int] = Counter()
        self._refused_adapters: dict[str, dict[str, Any]] = {}
        self._in_flight: set[int] = set()

    async def run(self) -> None:
        """Finishes the lines, or those that are finished when a cancel comes. Raises ChildGone when
        engines keep dying, EngineLoadFailed, WeightsUnavailable."""
        async with self._running.tools.engines.take(self._task.base) as slot:
            for run in range(RUNS_MAX):
                if not self._pending or self._running.cancelled.is_set():
                    return
                try:
                    window = IN_FLIGHT_AFTER_DEATH_MAX if run else IN_FLIGHT_MAX
                    await self._run_once(slot, in_flight_max=window)
                except ChildGone as gone:
                    logger.warning("engine child died", killed=gone.killed)
                    await slot.stop()
                    self._count_deaths()
                else:
                    return
            if self._pending:
                raise ChildGone(killed=False)

    async def _run_once(self, slot: EngineSlot, *, in_flight_max: int) -> None:
        child = await slot.child_for(self._task.base)
        token = slot.next_run()
        aborting = asyncio.create_task(self._abort_when_cancelled(child, token))
        try:
            await self._load_adapters(child)
            await self._feed_and_collect(child, token, in_flight_max)
        except asyncio.CancelledError:
            with contextlib.suppress(ChildGone):
                await child.send({"op": "abort", "token": token})
            raise
        finally:
            aborting.cancel()

    async def _abort_when_cancelled(self, child: Child, token: str) -> None:
        await self._running.cancelled.wait()
        with contextlib.suppress(ChildGone):
            await child.send({"op": "abort", "token": token})

    async def _load_adapters(self, child: Child) -> None:
        waiting = {name for name, path in self._adapters.items() if path is not None}
        for name in sorted(waiting):
            path = self._adapters[name]
            await child.send({"op": "adapter", "name": name, "directory": str(path)})
        while waiting:
            message = await child.receive(silence_seconds_max=SILENCE_SECONDS_MAX)
            if message["type"] in ("adapter_ready", "adapter_failed"):
                waiting.discard(message["name"])
            if message["type"] == "adapter_failed":
                self._refused_adapters[message["name"]] = message

    async def _feed_and_collect(self, child: Child, token: str, in_flight_max: int) -> None:
        queue = iter(list(self._pending.values()))
        more = True
        while more or self._in_flight:
            while more and len(self._in_flight) < in_flight_max:
                more = await self._feed_next(child, token, queue)
            if not self._in_flight:
                return
            message = await child.receive(silence_seconds_max=SILENCE_SECONDS_MAX)
            if message["type"] == "aborted" and message["token"] == token:
                self._in_flight.clear()
                return
            self._collect(message, token)

    async def _feed_next(self, child: Child, token: str, queue: Iterator[RequestLine]) -> bool:
        line = next(queue, None)
        if line is None or self._running.cancelled.is_set():
            return False
        adapter = None if line.model == self._task.base else line.model
        if refusal := self._refusal_of(adapter):
            self._finish(line.number)
            self._files.error(line, refusal)
            return True
        self._in_flight.add(line.number)
        await child.send(
            {
                "op": "line",
                "id": f"{token}:{line.number}",
                "endpoint": self._task.endpoint,
                "adapter": adapter,
                "body": line.body,
            }
        )
        return True

    def _refusal_of(self, adapter: str | None) -> dict[str, Any] | None:
        if adapter is None:
            return None
        if self._adapters.get(adapter) is None:
            return _refusal("adapter_unusable", "The fine-tuned model's files are not there.")
        return self._refused_adapters.get(adapter)

    def _collect(self, message: dict[str, Any], token: str) -> None:
        run, _, number = message.get("id", "").partition(":")
        if run != token:
            return
        line = self._finish(int(number))
        if message["type"] == "refused":
            self._files.error(line, message)
        else:
            self._files.answer(line, message)

    def _finish(self, number: int) -> RequestLine:
        self._in_flight.discard(number)
        return self._pending.pop(number)

    def _count_deaths(self) -> None:
        for number in sorted(self._in_flight):
            self._deaths[number] += 1
            if self._deaths[number] >= DEATHS_MAX:
                line = self._finish(number)
                self._files.error(
                    line, _refusal("engine_failed", "The engine failed twice on this line.")
                )
        self._in_flight.clear()


def _refusal(code: str, message: str) -> dict[str, Any]:
    return {
        "status": 500,
        "error_type": "server_error",
        "code": code,
        "message": message,
        "param": None,
    }


@contextlib.asynccontextmanager
async def _adapter_directories(
    running: RunningAttempt, task: BatchChunkTask
) -> AsyncIterator[dict[str, Path | None]]:
    """Adapter name to local directory; None where its files are gone or not what was recorded."""
    cache = running.tools.adapters
    directories: dict[str, Path | None] = {}
    held: list[AdapterRef] = []
    try:
        for adapter in task.adapters:
            try:
                directories[adapter.name] = await _acquire(running, adapter)
                held.append(adapter)
            except (ObjectMissing, DigestMismatch):
                directories[adapter.name] = None
        yield directories
    finally:
        for adapter in held:
            await cache.release(adapter)


async def _acquire(running: RunningAttempt, adapter: AdapterRef) -> Path:
    return await with_store_retries(lambda: running.tools.adapters.acquire(adapter))


async def _finished(
    running: RunningAttempt, task: BatchChunkTask, files: ChunkFiles
) -> ChunkFinished:
    output = await _put(running, f"{task.output_prefix}output.jsonl", files.output_path)
    errors = await _put(running, f"{task.output_prefix}errors.jsonl", files.errors_path)
    return ChunkFinished(
        completed=files.completed,
        failed=files.failed,
        usage=files.usage(),
        output=output,
        errors=errors,
        cancelled=files.completed + files.failed < task.requests,
    )


async def _put(running: RunningAttempt, key: str, path: Path) -> ObjectRef | None:
    if (await asyncio.to_thread(path.stat)).st_size == 0:
        return None
    return ObjectRef.of(await with_store_retries(lambda: running.tools.objects.put_file(key, path)))
