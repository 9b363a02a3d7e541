"""Keeps the versions of one kind of engine: the one that serves, those finishing their requests, the one that loads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Generic

from app.errors import ServiceError
from app.interface import ReloadInProgress
from app.queue.forecast import Clock, Running
from app.queue.runners import ENGINE_THREAD, EngineThread, Loaded, Runner, Steps, rank_runner
from app.queue.scheduler import J, Scheduler
from app.settings import Batching
from app.telemetry.metrics import BatchReport
from model.engine import CacheStats, EngineError

MakeRunner = Callable[[EngineThread, asyncio.AbstractEventLoop, Clock], Runner]


class Versions(Generic[J]):
    """Holds one scheduler for each version. Used by the event loop only."""

    def __init__(
        self,
        batching: Batching,
        batch_done: Callable[[BatchReport], None],
        clock: Clock,
        load_seconds: float,
        make_runner: MakeRunner = rank_runner,
        thread_name: str = ENGINE_THREAD,
        discard: Callable[[Any], None] = lambda loaded: None,
    ) -> None:
        """`batch_done` is called with a report after each forward. A load that takes longer than `load_seconds` is given up; `discard` gets
        what it loaded all the same."""
        self.current: Scheduler[J] | None = None
        self._batching = batching
        self._batch_done = batch_done
        self._clock = clock
        self._load_seconds = load_seconds
        self._make_runner = make_runner
        self._thread_name = thread_name
        self._discard = discard
        self.schedulers: dict[Any, Scheduler[J]] = {}
        """By what they serve: the one that serves new requests, and those that finish theirs. The oldest comes first."""
        self._loading: EngineThread | None = None  # also one that was given up, while others wait for its end
        self._waited_for_until = float("inf")
        self._lost: asyncio.Queue[str] = asyncio.Queue()
        self._gone = CacheStats()

    async def load(self, load: Callable[[Steps], Loaded]) -> Scheduler[J]:
        """Load and warm a model in a thread of its own. Raises what `load` raises, ReloadInProgress, or EngineError when it takes too long.

        The thread of a load that was given up, or cancelled, ends at its next step. It may hang in native code, so another load is
        refused for at most `load_seconds` after that.
        """
        if self._loading is not None and not self._loading.closed.done() and self._clock() < self._waited_for_until:
            raise ReloadInProgress("another checkpoint is being loaded")
        loop = asyncio.get_running_loop()
        thread = EngineThread(load, loop, self._clock, self._thread_name)
        self._loading, self._waited_for_until = thread, float("inf")
        try:
            async with asyncio.timeout(self._load_seconds):
                await asyncio.wait([thread.ready])
        except (asyncio.CancelledError, TimeoutError) as end:
            thread.abandon(self._discard)
            thread.closed.add_done_callback(lambda _: self._ended(thread))
            self._waited_for_until = self._clock() + self._load_seconds
            if isinstance(end, TimeoutError):
                raise EngineError(f"the checkpoint was not loaded within {self._load_seconds:g} s") from None
            raise
        self._loading = None
        loaded = thread.ready.result()
        runner = self._make_runner(thread, loop, self._clock)
        return Scheduler(loaded, runner, self._batching, self._clock, self._batch_done, self._lost.put_nowait)

    def _ended(self, thread: EngineThread) -> None:
        if self._loading is thread:
            self._loading = None  # and with it what was loaded

    def install(self, scheduler: Scheduler[J]) -> None:
        """Serve new requests with this scheduler. The previous one is freed when its last request is answered."""
        old, self.current = self.current, scheduler
        self.schedulers[scheduler.loaded.served] = scheduler
        if old is not None:
            old.retire(self._free)

    async def lost(self) -> str:
        """Wait until an engine is lost for good, and return why. Its jobs have their errors then."""
        return await self._lost.get()

    @property
    def is_warming(self) -> bool:
        """Whether a checkpoint has been read and its engine warms up."""
        return self._loading is not None and self._loading.steps.is_warming

    @property
    def waiting(self) -> int:
        """Number of jobs that wait to be computed."""
        return sum(scheduler.waiting for scheduler in self.schedulers.values())

    def running(self) -> Running:
        """Return what the current engine is computing."""
        return Running() if self.current is None else self.current.running()

    def silent_seconds(self) -> float:
        """The longest time that work has waited while no forward finished."""
        return max((scheduler.silent_seconds() for scheduler in self.schedulers.values()), default=0.0)

    def cache_stats(self) -> CacheStats:
        """Cache counts of all engines since the start; bytes and entries only of those still held."""
        stats = self._gone
        for scheduler in self.schedulers.values():
            stats = _sum(stats, scheduler.loaded.engine.cache_stats())
        return stats

    def fail_all(self, error: Callable[[], ServiceError]) -> None:
        """Empty all queues, and fail every job that waits or is being computed, each with an error of its own."""
        for scheduler in self.schedulers.values():
            scheduler.fail_all(error)

    def drop(self) -> None:
        """Stop serving without waiting for an engine that may hang. Fail its jobs before."""
        self.current = None
        for scheduler in list(self.schedulers.values()):
            self._free(scheduler)

    def has_lost_engine(self) -> bool:
        """Whether an engine is lost for good, also where `lost` has not told it yet."""
        return any(scheduler.failure is not None for scheduler in self.schedulers.values())

    async def close(self, timeout_seconds: float) -> None:
        """Free each engine after its present forward; one that hangs is left behind."""
        schedulers = list(self.schedulers.values())
        for scheduler in schedulers:
            scheduler.close()
        if schedulers:
            await asyncio.wait([scheduler.closed for scheduler in schedulers], timeout=timeout_seconds)

    def _free(self, scheduler: Scheduler[J]) -> None:
        if self.schedulers.pop(scheduler.loaded.served, None) is not None:
            # Its counters stay in the sum, so that none runs backwards.
            counted = replace(scheduler.loaded.engine.cache_stats(), bytes=0, entries=0)
            self._gone = _sum(self._gone, counted)
            scheduler.close()


def _sum(left: CacheStats, right: CacheStats) -> CacheStats:
    return CacheStats(**{name: value + getattr(right, name) for name, value in asdict(left).items()})
