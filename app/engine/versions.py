"""Keeps the versions of one kind of engine: the one that serves, those finishing their requests, the one that loads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic

from app.engine.forecast import Running
from app.engine.loading import Steps
from app.engine.runners import ENGINE_THREAD, EngineThread, Runner, rank_runner
from app.engine.worker import Events, J, Worker
from app.interface import ReloadInProgress
from app.loop_lag import Clock
from app.settings import Batching
from app.telemetry.exposition import add_stats
from model.engine import CacheStats, EngineError

MakeRunner = Callable[[EngineThread, asyncio.AbstractEventLoop, Clock], Runner]


class Versions(Generic[J]):
    """Holds one worker for each version. Used by the event loop only."""

    def __init__(
        self,
        batching: Batching,
        events: Events,
        clock: Clock,
        load_seconds: float,
        make_runner: MakeRunner = rank_runner,
        thread_name: str = ENGINE_THREAD,
    ) -> None:
        """A load that takes longer than `load_seconds` is given up."""
        self.batching = batching
        self.load_seconds = load_seconds
        self.events = events
        self.clock = clock
        self.current: Worker[J] | None = None
        self._make_runner = make_runner
        self._thread_name = thread_name
        self._held: dict[Any, Worker[J]] = {}  # by the model they serve
        self._loading: EngineThread | None = None  # also one that was given up, while others wait for its end
        self._waited_for_until = float("inf")
        self._gone = CacheStats()

    async def load(self, load: Callable[[Steps], Any]) -> Worker[J]:
        """Load and warm a model in a thread of its own. Raises what `load` raises, ReloadInProgress, or EngineError when it takes too long.

        The thread of a load that was given up, or cancelled, ends at its next step. It may hang in native code, so another load is
        refused for at most `load_seconds` after that.
        """
        if self._loading is not None and not self._loading.closed.done() and self.clock() < self._waited_for_until:
            raise ReloadInProgress("another checkpoint is being loaded")
        loop = asyncio.get_running_loop()
        thread = EngineThread(load, self.events.warming, loop, self.clock, self._thread_name)
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
        model = thread.ready.result()
        return Worker(model, self._make_runner(thread, loop, self.clock), self.batching, self.events, self.clock)

    def install(self, worker: Worker[J]) -> None:
        """Serve new requests with this worker. The previous one is freed when its last request is answered."""
        old, self.current = self.current, worker
        self._held[worker.model.served] = worker
        if old is not None:
            old.retire(self._free)

    def find(self, served: Any) -> Worker[J] | None:
        """Return the worker that serves exactly this model, or None if it is gone."""
        return self._held.get(served)

    @property
    def held(self) -> list[Worker[J]]:
        """All workers not yet freed, the oldest first."""
        return list(self._held.values())

    def _free(self, worker: Worker[J]) -> None:
        if self._held.pop(worker.model.served, None) is not None:
            self._gone = add_stats(self._gone, worker.model.engine.cache_stats())
            worker.close()

    def cache_stats(self) -> CacheStats:
        """Cache counts of all engines since the start; bytes and entries only of those still held."""
        stats = self._gone
        for worker in self._held.values():
            stats = add_stats(stats, worker.model.engine.cache_stats(), keep_gauges=True)
        return stats

    @property
    def waiting(self) -> int:
        """Number of jobs that wait to be computed."""
        return sum(worker.waiting for worker in self._held.values())

    def silent_seconds(self) -> float:
        """The longest time that work has waited while no forward finished."""
        return max((worker.silent_seconds() for worker in self._held.values()), default=0.0)

    def running(self) -> Running:
        """Return what the current engine is computing."""
        return Running() if self.current is None else self.current.running()

    def abandon(self) -> list[J]:
        """Take every job out of the queues; none of them will be computed."""
        return [job for worker in self._held.values() for job in worker.abandon()]

    def drop(self) -> list[J]:
        """Stop serving without waiting for an engine that may hang; return the jobs of all engines."""
        jobs, workers = self.abandon(), self.held
        self.current = None
        for worker in workers:
            self._free(worker)
        return jobs

    async def close(self, timeout_seconds: float) -> None:
        """Free each engine after its present forward; one that hangs is left behind."""
        workers = self.held
        for worker in workers:
            worker.close()
        if workers:
            await asyncio.wait([worker.closed for worker in workers], timeout=timeout_seconds)
