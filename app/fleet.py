"""The engines of this process: the one that serves, those that still finish, the one that loads. Not for who may be admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from app.admission import Clock
from app.batching import BatchPolicy
from app.forecast import Load
from app.metrics import add_stats
from app.worker import EngineWorker, Events, RankJob
from model.engine import CacheStats, Engine
from weights.checkpoint import Checkpoint

STAGE_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One version that can serve. `engine` is used by its own thread only, `engine.cache_stats` by any."""

    checkpoint: Checkpoint
    engine: Engine

    def labels(self) -> dict[str, str]:
        """The labels of `model_info`."""
        manifest, info = self.checkpoint.manifest, self.engine.info
        return {
            "name": manifest.name,
            "version": manifest.version,
            "checkpoint": manifest.digest,
            "dtype": info.dtype,
            "device": info.device,
        }

    def device_memory_bytes(self) -> int | None:
        """Held by tensors on the CUDA device; None on a CPU."""
        return torch.cuda.memory_allocated() if self.engine.info.device.startswith("cuda") else None


Say = Callable[[str], None]
Loader = Callable[[Say], LoadedModel]


class SwapInProgress(RuntimeError):
    """One swap at a time."""


@dataclass(slots=True, eq=False)
class Serving:
    """A worker with the model it serves; `unfinished` counts the tickets admitted on it."""

    worker: EngineWorker
    model: LoadedModel
    unfinished: int = 0
    retired: bool = False


class Fleet:
    """Used by the event loop only."""

    def __init__(self, policy: BatchPolicy, events: Events, clock: Clock) -> None:
        self.policy = policy
        self.events = events
        self.clock = clock
        self.current: Serving | None = None
        self._all: list[Serving] = []
        self._loading = False
        self._gone = CacheStats()

    def __iter__(self) -> Iterator[Serving]:
        return iter(tuple(self._all))

    async def load(self, load: Loader, say: Say = lambda stage: None) -> Serving:
        """Load and warm a model in a thread of its own. Raises what `load` raises, or SwapInProgress."""
        if self._loading:
            raise SwapInProgress("another checkpoint is being loaded")
        worker = EngineWorker(load, self.policy, self.events, self.clock, asyncio.get_running_loop())
        self._loading = True
        try:
            worker.start()
            while not worker.ready.done():
                await asyncio.wait([worker.ready], timeout=STAGE_POLL_SECONDS)
                say(worker.stage)
            return Serving(worker, worker.ready.result())
        except asyncio.CancelledError:
            worker.close()
            raise
        finally:
            self._loading = False

    def install(self, serving: Serving) -> None:
        """Serve new requests with it; the one before is freed when its last request is answered."""
        old, self.current = self.current, serving
        self._all.append(serving)
        if old is not None:
            old.retired = True
            self.free_if_done(old)

    def find(self, model: LoadedModel) -> Serving | None:
        """Who serves this very model, None when it is gone."""
        return next((serving for serving in self._all if serving.model is model), None)

    def free_if_done(self, serving: Serving) -> None:
        """End a retired engine that nobody waits for."""
        if serving.retired and not serving.unfinished and serving in self._all:
            self._all.remove(serving)
            self._gone = add_stats(self._gone, serving.model.engine.cache_stats())
            serving.worker.close()

    def cache_stats(self) -> CacheStats:
        """Of all engines since start; bytes and entries of those that live."""
        stats = self._gone
        for serving in self._all:
            stats = add_stats(stats, serving.model.engine.cache_stats(), keep_gauges=True)
        return stats

    def silent_seconds(self) -> float:
        """The longest time that work has waited while no forward finished."""
        return max((serving.worker.silent_seconds() for serving in self._all), default=0.0)

    def running(self) -> Load:
        """What the current engine is computing."""
        return Load() if self.current is None else self.current.worker.running()

    def has_dead_thread(self) -> bool:
        """Whether an engine's thread ended without a word."""
        return any(not serving.worker.is_alive() and serving.worker.failure is None for serving in self._all)

    def abandon(self) -> list[RankJob]:
        """Take every queued job out; none of them will be computed."""
        return [job for serving in self._all for job in serving.worker.abandon()]

    async def close(self, timeout_seconds: float) -> None:
        """End all threads after their present forward; one that hangs is left behind."""
        workers = [serving.worker for serving in self._all]
        for worker in workers:
            worker.close()
        if workers:
            await asyncio.wait([worker.closed for worker in workers], timeout=timeout_seconds)
