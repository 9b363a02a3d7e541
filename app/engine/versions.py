"""The model versions of this process: the one that serves, those that still finish, the one that loads. Not for who is admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from app.engine.worker import EngineWorker, Events, RankJob
from app.interface import ReloadInProgress, ServedModel
from app.scheduling.batching import BatchPolicy
from app.scheduling.forecast import Load
from app.scheduling.job import Clock
from app.telemetry.metrics import add_stats
from model.engine import CacheStats, Engine
from weights.checkpoint import Checkpoint

STAGE_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint with its warm engine. `engine` is used by its own thread only, `engine.cache_stats` by any."""

    checkpoint: Checkpoint
    engine: Engine
    served: ServedModel = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "served", ServedModel(self.checkpoint.manifest, self.engine.info))

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
Worker = EngineWorker[LoadedModel]


class Versions:
    """One worker a version. Used by the event loop only."""

    def __init__(self, policy: BatchPolicy, events: Events, clock: Clock) -> None:
        self.policy = policy
        self.events = events
        self.clock = clock
        self.current: Worker | None = None
        self._all: list[Worker] = []
        self._loading = False
        self._gone = CacheStats()

    async def load(self, load: Loader, say: Say = lambda stage: None) -> Worker:
        """Load and warm a model in a thread of its own. Raises what `load` raises, or ReloadInProgress."""
        if self._loading:
            raise ReloadInProgress("another checkpoint is being loaded")
        worker = EngineWorker(load, self.policy, self.events, self.clock, asyncio.get_running_loop())
        self._loading = True
        try:
            worker.start()
            while not worker.ready.done():
                await asyncio.wait([worker.ready], timeout=STAGE_POLL_SECONDS)
                say(worker.stage)
            worker.ready.result()
            return worker
        except asyncio.CancelledError:
            worker.close()
            raise
        finally:
            self._loading = False

    def install(self, worker: Worker) -> None:
        """Serve new requests with it; the one before is freed when its last request is answered."""
        old, self.current = self.current, worker
        self._all.append(worker)
        if old is not None:
            old.retired = True
            self.free_if_done(old)

    def find(self, model: ServedModel) -> Worker | None:
        """Who serves this very model, None when it is gone."""
        return next((worker for worker in self._all if worker.model.served is model), None)

    def free_if_done(self, worker: Worker) -> None:
        """End a retired engine without unfinished requests."""
        if worker.retired and not worker.unfinished and worker in self._all:
            self._all.remove(worker)
            self._gone = add_stats(self._gone, worker.model.engine.cache_stats())
            worker.close()

    def cache_stats(self) -> CacheStats:
        """Of all engines since start; bytes and entries of those that live."""
        stats = self._gone
        for worker in self._all:
            stats = add_stats(stats, worker.model.engine.cache_stats(), keep_gauges=True)
        return stats

    def silent_seconds(self) -> float:
        """The longest time that work has waited while no forward finished."""
        return max((worker.silent_seconds() for worker in self._all), default=0.0)

    def running(self) -> Load:
        """What the current engine is computing."""
        return Load() if self.current is None else self.current.running()

    def has_dead_thread(self) -> bool:
        """Whether an engine's thread ended without a word."""
        return any(not worker.is_alive() and worker.failure is None for worker in self._all)

    def abandon(self) -> list[RankJob]:
        """Take every queued job out; none of them will be computed."""
        return [job for worker in self._all for job in worker.abandon()]

    async def close(self, timeout_seconds: float) -> None:
        """End all threads after their present forward; one that hangs is left behind."""
        workers = list(self._all)
        for worker in workers:
            worker.close()
        if workers:
            await asyncio.wait([worker.closed for worker in workers], timeout=timeout_seconds)
