"""A place for one engine child at a time, kept warm for its base between chunks.

`chunk.py` takes a slot, asks for the base it needs and talks to the child. Another base means
another child: the old one is stopped first, since two bases seldom fit beside each other.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from adapters.process.settings import Settings
from domain.catalog import CATALOG
from gpu_runners.parent import measures
from gpu_runners.parent.child import Child
from gpu_runners.weights.store import Weights

LOAD_SECONDS_MAX = 900.0
THREADS_ENVIRONMENT = ("OMP_WAIT_POLICY=passive", "TOKENIZERS_PARALLELISM=false")
"""Threads that wait asleep: spinning ones cost five times the time beside other work (measured on
two busy cores: 76 against 397 tokens/s)."""
INTEL_OPENMP = "libiomp5.so"
INTEL_THREADS_ENVIRONMENT = (
    "KMP_BLOCKTIME=50us",
    "KMP_USE_YIELD=0",
    "TOKENIZERS_PARALLELISM=false",
)
"""This OpenMP can spin for a moment before it sleeps, which a step's many short loops reward: a
third faster on two idle cores than to sleep at once, and a third slower beside one busy process,
where spinning without end costs two to nine times the time. Yielding would give whole slices away.
"""
VLLM_ENVIRONMENT = (
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_LOGGING_LEVEL=CRITICAL",
    "VLLM_NO_USAGE_STATS=1",
    "LLGUIDANCE_LOG_LEVEL=0",
    "HF_HUB_OFFLINE=1",
)


class EngineLoadFailed(Exception):
    """The base cannot be served here; trying again would not help."""


class EngineSlot:
    """One engine child, or none yet."""

    def __init__(self, settings: Settings, weights: Weights, work_dir: Path) -> None:
        self._settings = settings
        self._weights = weights
        self._work_dir = work_dir
        self._child: Child | None = None
        self._runs = 0
        self.base: str | None = None
        self.busy = False

    @property
    def pid(self) -> int | None:
        """The engine child's process id, for tests that kill it."""
        return None if self._child is None else self._child.pid

    def next_run(self) -> str:
        """A token that tells this run's messages from those of any run before it."""
        self._runs += 1
        return str(self._runs)

    async def child_for(self, base: str) -> Child:
        """The child with this base loaded.

        Raises EngineLoadFailed, ChildGone, WeightsUnavailable.
        """
        if self._child is not None and self.base == base:
            return self._child
        await self.stop()
        load = await asyncio.to_thread(self._load_operation, base)
        began = time.monotonic()
        child = await Child.start(engine_command(self._settings, self._work_dir))
        self._child = child
        try:
            await child.send(load)
            answer = await child.receive(silence_seconds_max=LOAD_SECONDS_MAX)
        except BaseException:
            await self.stop()
            raise
        if answer["type"] != "loaded":
            await self.stop()
            raise EngineLoadFailed(answer["error"])
        measures.ENGINE_LOAD_SECONDS.labels(base=base).observe(time.monotonic() - began)
        self.base = base
        return child

    async def stop(self) -> None:
        """Ends the child, if there is one."""
        child, self._child, self.base = self._child, None, None
        if child is not None:
            await child.stop()

    def _load_operation(self, base: str) -> dict[str, Any]:
        record = CATALOG[base]
        tuning = record.fine_tuning
        echo = self._settings.engine == "echo"
        return {
            "op": "load",
            "directory": "" if echo else str(self._weights.path(base)),
            "kind": record.kind,
            "window_tokens": record.context_window_tokens,
            "rank_max": tuning.lora_rank_max if tuning and tuning.servable else 0,
            "template_kwargs": record.template_arguments,
            "pooling": record.pooling,
            "control_tokens": tuning.control_tokens if tuning else (),
        }


class EngineSlots:
    """The runner's slots; a chunk gets a free one that is warm for its base, if there is one."""

    def __init__(self, slots: list[EngineSlot]) -> None:
        self._slots = slots
        self._free = asyncio.Semaphore(len(slots))

    @asynccontextmanager
    async def take(self, base: str) -> AsyncIterator[EngineSlot]:
        """Waits for a free slot and holds it."""
        async with self._free:
            idle = [slot for slot in self._slots if not slot.busy]
            slot = min(idle, key=lambda each: (each.base != base, each.base is not None))
            slot.busy = True
            try:
                yield slot
            finally:
                slot.busy = False

    @property
    def warm_base(self) -> str | None:
        """A base that some child has loaded."""
        return next((slot.base for slot in self._slots if slot.base), None)

    @property
    def pids(self) -> list[int]:
        """The engine children, for tests that kill them."""
        return [slot.pid for slot in self._slots if slot.pid is not None]

    async def stop(self) -> None:
        """Ends every child."""
        await asyncio.gather(*(slot.stop() for slot in self._slots))


def engine_name(settings: Settings) -> str:
    """The engine that serves: the forced one, else vLLM where there is an environment for it."""
    return settings.engine or ("vllm" if settings.engines_python else "transformers")


def engine_command(settings: Settings, work_dir: Path) -> list[str]:
    """How to start the engine child. Its interpreter finds our two packages, and nothing else of
    ours, through links in the work directory: the environments must not mix."""
    name = engine_name(settings)
    module = ["-m", "gpu_runners.inference.child", "--engine", name]
    if name != "vllm":
        return ["env", *THREADS_ENVIRONMENT, sys.executable, *module]
    packages = work_dir / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    for package in ("domain", "gpu_runners"):
        link = packages / package
        if not link.is_symlink():
            link.symlink_to(Path(__file__).resolve().parents[2] / package)
    python = settings.engines_python or sys.executable
    threads = _vllm_threads_environment(Path(python))
    return ["env", *threads, *VLLM_ENVIRONMENT, f"PYTHONPATH={packages}", python, *module]


def _vllm_threads_environment(python: Path) -> Sequence[str]:
    """With the OpenMP that comes with vLLM's build for the CPU, where it lies beside it."""
    library = python.parents[1] / "lib" / INTEL_OPENMP
    if not library.exists():
        return THREADS_ENVIRONMENT
    return (f"LD_PRELOAD={library}", *INTEL_THREADS_ENVIRONMENT)
