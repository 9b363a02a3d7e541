"""The model versions of this process: the one that serves, those that still finish, the one that loads. Not for who is admitted."""

from __future__ import annotations

import asyncio

from app.engine.loading import Loader
from app.engine.rank_job import RankJob
from app.engine.thread import EngineThread
from app.engine.worker import EngineWorker, Events
from app.interface import ReloadInProgress, ServedModel
from app.scheduling.forecast import Running
from app.scheduling.job import Clock
from app.settings import Batching
from app.telemetry.metrics import add_stats
from model.engine import CacheStats, EngineError


class Versions:
    """One worker a version. Used by the event loop only."""

    def __init__(self, batching: Batching, events: Events, clock: Clock, load_seconds: float) -> None:
        """A load that takes longer than `load_seconds` is given up."""
        self.batching = batching
        self.load_seconds = load_seconds
        self.events = events
        self.clock = clock
        self.current: EngineWorker | None = None
        self._all: list[EngineWorker] = []
        self._loading: EngineThread | None = None  # also one that was given up, as long as others wait for its end
        self._waited_for_until = float("inf")
        self._gone = CacheStats()

    async def load(self, load: Loader) -> EngineWorker:
        """Load and warm a model in a thread of its own. Raises what `load` raises, ReloadInProgress, or EngineError when it takes too long.

        The thread of a load that was given up, or cancelled, ends at its next step. It may hang in native code, so another load waits
        for that no longer than it had time itself.
        """
        if self._loading is not None and not self._loading.closed.done() and self.clock() < self._waited_for_until:
            raise ReloadInProgress("another checkpoint is being loaded")
        loop = asyncio.get_running_loop()
        thread = EngineThread(load, self.events.warming, loop, self.clock)
        self._loading, self._waited_for_until = thread, float("inf")
        try:
            async with asyncio.timeout(self.load_seconds):
                await asyncio.wait([thread.ready])
        except (asyncio.CancelledError, TimeoutError) as end:
            thread.abandon()
            self._waited_for_until = self.clock() + self.load_seconds
            if isinstance(end, TimeoutError):
                raise EngineError(f"the checkpoint was not loaded within {self.load_seconds:g} s") from None
            raise
        self._loading = None
        return EngineWorker(thread, self.batching, self.events, self.clock, loop)

    def install(self, worker: EngineWorker) -> None:
        """Serve new requests with it; the one before is freed when its last request is answered."""
        old, self.current = self.current, worker
        self._all.append(worker)
        if old is not None:
            old.retired = True
            self.free_if_done(old)

    def find(self, model: ServedModel) -> EngineWorker | None:
        """Who serves this very model, None when it is gone."""
        if self.current is not None and self.current.model.served is model:
            return self.current
        return next((worker for worker in self._all if worker.model.served is model), None)

    def holds(self, worker: EngineWorker) -> bool:
        """Whether it is one of these, and not gone."""
        return worker in self._all

    def free_if_done(self, worker: EngineWorker) -> None:
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

    def running(self) -> Running:
        """What the current engine is computing."""
        return Running() if self.current is None else self.current.running()

    def abandon(self) -> list[RankJob]:
        """Take every queued job out; none of them will be computed."""
        return [job for worker in self._all for job in worker.abandon()]

    def drop(self) -> list[RankJob]:
        """Serve nothing any more, without waiting for an engine that may hang; the jobs that it had."""
        jobs, workers = self.abandon(), self._all
        self.current, self._all = None, []
        for worker in workers:
            self._gone = add_stats(self._gone, worker.model.engine.cache_stats())
            worker.close()
        return jobs

    async def close(self, timeout_seconds: float) -> None:
        """Free all engines after their present forward; one that hangs is left behind."""
        workers = list(self._all)
        for worker in workers:
            worker.close()
        if workers:
            await asyncio.wait([worker.closed for worker in workers], timeout=timeout_seconds)
