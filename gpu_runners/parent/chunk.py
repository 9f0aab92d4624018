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
from collections import Counter, deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import structlog

from domain.limits import MIB
from domain.messages import AdapterRef, AttemptFailed, BatchChunkTask, ChunkFinished, ObjectRef
from domain.ports import ObjectMissing
from gpu_runners.parent import measures
from gpu_runners.parent.adapter_cache import DigestMismatch
from gpu_runners.parent.attempts import RunningAttempt, with_store_retries
from gpu_runners.parent.child import Child, ChildGone
from gpu_runners.parent.chunk_files import ChunkFiles
from gpu_runners.parent.chunk_input import ChunkInput, InputDamaged, RequestLine, fetch, read_lines
from gpu_runners.parent.slots import EngineLoadFailed, EngineSlot
from gpu_runners.weights.store import WeightsUnavailable

RUNS_MAX = 3
DEATHS_MAX = 2
"""Engine deaths that a line may have been in flight at."""
IN_FLIGHT_MAX = 256
IN_FLIGHT_BYTES_MAX = 16 * MIB
"""Of the lines that the engine has not finished; a longer line runs alone."""
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
        path = directory / "input.jsonl"
        await with_store_retries(lambda: fetch(running.tools.objects, task, path))
        with path.open("rb") as file:
            lines = await asyncio.to_thread(read_lines, file, task)
            return await _run_lines(running, task, ChunkInput(file, lines), directory)
    except InputDamaged as damage:
        logger.exception("batch input changed", key=task.input_key, found=str(damage))
        return AttemptFailed(
            code="input_changed", message="The batch's input is not what was checked."
        )
    except ObjectMissing:
        return AttemptFailed(code="engine_failed", message="The batch's input is not in the store.")
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


async def _run_lines(
    running: RunningAttempt, task: BatchChunkTask, given: ChunkInput, directory: Path
) -> ChunkFinished | AttemptFailed:
    with ChunkFiles(running, directory) as files:
        try:
            async with _adapter_directories(running, task) as adapters:
                await _ChunkRun(running, task, adapters, given, files).run()
        except (ChildGone, EngineLoadFailed, WeightsUnavailable) as error:
            logger.warning("engine failed", error=type(error).__name__)
            return AttemptFailed(
                code="engine_failed", message="The engine failed while it ran these lines."
            )
    return await _finished(running, task, files)


class _ChunkRun:
    """The lines still to finish, and the engine child that works on them."""

    def __init__(
        self,
        running: RunningAttempt,
        task: BatchChunkTask,
        adapters: dict[str, Path | None],
        given: ChunkInput,
        files: ChunkFiles,
    ) -> None:
        self._running = running
        self._task = task
        self._adapters = adapters
        self._input = given
        self._pending = {line.number: line for line in given.lines}
        self._files = files
        self._deaths: Counter[int] = Counter()
        self._refused_adapters: dict[str, dict[str, Any]] = {}
        self._in_flight: set[int] = set()
        self._in_flight_bytes = 0

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
                    measures.ENGINE_DEATHS.labels(base=self._task.base).inc()
                    await slot.stop()
                    await self._count_deaths()
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
        queue = deque(self._pending.values())
        while True:
            while self._has_room(queue, in_flight_max):
                await self._feed(child, token, queue.popleft())
            if not self._in_flight:
                return
            message = await child.receive(silence_seconds_max=SILENCE_SECONDS_MAX)
            if message["type"] == "aborted" and message["token"] == token:
                self._land_all()
                return
            await self._collect(child, message, token)

    def _has_room(self, queue: deque[RequestLine], in_flight_max: int) -> bool:
        if not queue or self._running.cancelled.is_set() or len(self._in_flight) >= in_flight_max:
            return False
        most = IN_FLIGHT_BYTES_MAX - queue[0].body_bytes
        return not self._in_flight or self._in_flight_bytes <= most

    async def _feed(self, child: Child, token: str, line: RequestLine) -> None:
        adapter = None if line.model == self._task.base else line.model
        if refusal := self._refusal_of(adapter):
            self._finish(line.number)
            await self._files.error(line, refusal)
            return
        self._in_flight.add(line.number)
        self._in_flight_bytes += line.body_bytes
        message = {
            "op": "line",
            "id": f"{token}:{line.number}",
            "endpoint": self._task.endpoint,
            "adapter": adapter,
        }
        await child.send(message, body=await self._input.body(line))

    def _refusal_of(self, adapter: str | None) -> dict[str, Any] | None:
        if adapter is None:
            return None
        if self._adapters.get(adapter) is None:
            return _refusal("adapter_unusable", "The fine-tuned model's files are not there.")
        return self._refused_adapters.get(adapter)

    async def _collect(self, child: Child, message: dict[str, Any], token: str) -> None:
        run, _, number = message.get("id", "").partition(":")
        if run != token:
            return
        line = self._pending[int(number)]
        if message["type"] == "refused":
            await self._files.error(line, message)
        else:
            payload = child.payload(silence_seconds_max=SILENCE_SECONDS_MAX)
            await self._files.answer(line, message, payload)
        self._finish(line.number)

    def _finish(self, number: int) -> None:
        line = self._pending.pop(number)
        if number in self._in_flight:
            self._in_flight.remove(number)
            self._in_flight_bytes -= line.body_bytes

    def _land_all(self) -> None:
        self._in_flight.clear()
        self._in_flight_bytes = 0

    async def _count_deaths(self) -> None:
        for number in sorted(self._in_flight):
            self._deaths[number] += 1
            if self._deaths[number] >= DEATHS_MAX:
                line = self._pending[number]
                self._finish(number)
                await self._files.error(
                    line, _refusal("engine_failed", "The engine failed twice on this line.")
                )
        self._land_all()


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
