"""Retrieval without HTTP: a queue of searches, batches that share one scan, a thread of its own, swaps of towers and corpus as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from app.engine.loading import LoadedRetrieval, RetrievalLoader
from app.errors import CorpusNotLoaded, DeadlineExceeded, EngineDown, Overloaded, ServiceError
from app.interface import Changed, Found, PostChange, ReloadInProgress, ServedRetrieval
from app.scheduling.job import Clock
from app.settings import Settings
from app.telemetry.metrics import Metrics
from model.retrieval.inputs import Answers, Query

RETRIEVAL_THREAD = "retrieval"
SMOOTHING = 0.2  # share of the newest batch in the mean of their times

log = structlog.get_logger("app.service.retrieval")


@dataclass(slots=True, eq=False)
class _Version:
    """What one swap brought. `unfinished`: searches that hold a place on it."""

    loaded: LoadedRetrieval
    unfinished: int = 0
    retired: bool = False


@dataclass(slots=True, eq=False)
class _Search:
    """One request. `alone`: it shares its scan with no other, since a batch that it was in failed."""

    query: Query
    version: _Version
    arrived: float
    future: asyncio.Future[Found]
    alone: bool = False


class RetrievalService:
    """`load` is None where nothing is to be served. All methods belong to the event loop."""

    def __init__(self, load: RetrievalLoader | None, settings: Settings, metrics: Metrics, clock: Clock) -> None:
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self._load = load
        self._current: _Version | None = None
        self._versions: list[_Version] = []
        self._waiting: deque[_Search] = deque()
        self._running: list[_Search] = []
        self._batch_seconds = 0.0
        self._loading = False
        self._changing = asyncio.Lock()  # held by a swap, too: no change may fall between a load and its installation
        self._changes: set[asyncio.Task[Changed]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=RETRIEVAL_THREAD)

    @property
    def served(self) -> ServedRetrieval:
        """What serves new requests. Raises CorpusNotLoaded."""
        if self._current is None:
            detail = None if self._load is None else "The corpus is being loaded."
            raise CorpusNotLoaded(detail, retry_after_seconds=None if self._load is None else 2.0)
        return self._current.loaded.served

    # life

    async def load(self) -> None:
        """Load what there is to load. Raises what the loader raises."""
        if self._load is not None:
            await self.swap(self._load)

    async def swap(self, load: RetrievalLoader) -> ServedRetrieval:
        """Load another checkpoint and corpus beside those that serve, then serve new requests with both.

        Requests that began on the old ones end on them; then their memory is freed. Raises what `load` raises, and
        ReloadInProgress; the old ones serve on.
        """
        if self._loading:
            raise ReloadInProgress("another corpus is being loaded")
        self._loading = True
        try:
            async with self._changing:
                version = _Version(await asyncio.to_thread(load))
                old, self._current = self._current, version
                if old is not None:
                    old.loaded.log.close()
        finally:
            self._loading = False
        self._versions.append(version)
        if old is not None:
            old.retired = True
            self._free_if_done(old)
        served = version.loaded.served
        log.info(
            "corpus_loaded",
            version=served.manifest.version,
            corpus=served.corpus.version,
            posts=served.corpus.posts,
            hidden=served.hidden,
        )
        return served

    async def stop(self, timeout_seconds: float) -> bool:
        """Finish the searches that were admitted, then free the engines. False when the time was not enough."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
                await asyncio.gather(*self._changes, return_exceptions=True)
        finished = self._idle.is_set() and not self._changes
        for search in [*self._waiting, *self._running]:
            _settle(search, EngineDown("The process stops."))
        self._waiting.clear()
        self._current = None
        for version in self._versions:
            version.loaded.log.close()
            self._executor.submit(version.loaded.engine.close)
        self._versions.clear()
        self._executor.shutdown(wait=False)
        return finished

    async def change(self, change: PostChange) -> Changed:
        """As `interface.Retrieval.change`. What has been begun ends, whoever waits for it."""
        task = asyncio.get_running_loop().create_task(self._change(change))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _change(self, change: PostChange) -> Changed:
        async with self._changing:
            _ = self.served
            assert self._current is not None
            loaded = self._current.loaded
            recorded = await asyncio.to_thread(loaded.record, change)
            engine, loop = loaded.engine, asyncio.get_running_loop()

            def apply() -> Changed:
                deleted = engine.change(recorded)
                return Changed(loaded.served.corpus, engine.posts, engine.changes, deleted)

            return await loop.run_in_executor(self._executor, apply)

    # searches

    async def retrieve(self, served: ServedRetrieval, query: Query, deadline: float) -> Found:
        """As `interface.Retrieval.retrieve`."""
        version = next((version for version in self._versions if version.loaded.served is served), None)
        if version is None:
            raise CorpusNotLoaded("The corpus of this request was replaced.", retry_after_seconds=0.0)
        now, loop = self.clock(), asyncio.get_running_loop()
        self._admit(now, deadline)
        search = _Search(query, version, now, loop.create_future())
        timer = loop.call_later(max(0.0, deadline - now), _settle, search, DeadlineExceeded())
        version.unfinished += 1
        self._idle.clear()
        self._waiting.append(search)
        if not self._running:
            loop.call_soon(self._begin)  # what else arrives in this turn of the loop shares the scan
        try:
            return await search.future
        except asyncio.CancelledError:
            self.metrics.cancelled.labels("forward" if search in self._running else "queue").inc()
            raise
        finally:
            timer.cancel()
            with contextlib.suppress(ValueError):
                self._waiting.remove(search)
            version.unfinished -= 1
            self._free_if_done(version)
            self._rest()

    def _admit(self, now: float, deadline: float) -> None:
        """Raises Overloaded and DeadlineExceeded for what would wait too long."""
        limits = self.settings.retrieval
        batches = len(self._waiting) // limits.batch_requests + (1 if self._running else 0)
        wait_seconds, most = batches * self._batch_seconds, self.settings.queue.max_wait_seconds
        refusal: tuple[type[ServiceError], str, str] | None = None
        if len(self._waiting) >= limits.max_waiting:
            refusal = Overloaded, "queue_full", f"{limits.max_waiting} searches wait already"
        elif most and wait_seconds > most:
            refusal = (
                Overloaded,
                "queue_full",
                f"a search would wait {wait_seconds:.2f} s, at most {most:g} s are allowed",
            )
        elif now + wait_seconds >= deadline:
            refusal = DeadlineExceeded, "deadline", "the search would begin after the deadline"
        if refusal is not None:
            kind, reason, detail = refusal
            self.metrics.rejected.labels(reason).inc()
            raise kind(f"Refused on arrival: {detail}.", retry_after_seconds=round(max(wait_seconds, 0.1), 1))

    def _begin(self) -> None:
        """Search for the oldest, and for what may share its scan."""
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()
        if self._running or not self._waiting:
            return
        first = self._waiting.popleft()
        batch, left = [first], deque[_Search]()
        while self._waiting and not first.alone and len(batch) < self.settings.retrieval.batch_requests:
            search = self._waiting.popleft()
            shares = search.version is first.version and not search.alone
            if not search.future.done():
                (batch if shares else left).append(search)
        self._waiting.extendleft(reversed(left))
        self._running = batch
        started, engine = self.clock(), first.version.loaded.engine
        future = asyncio.get_running_loop().run_in_executor(
            self._executor, engine.retrieve, [search.query for search in batch]
        )
        future.add_done_callback(lambda done: self._end(batch, started, done))

    def _end(self, batch: Sequence[_Search], started: float, done: asyncio.Future[Answers]) -> None:
        """Answer, and begin the next batch. A batch that raises is split, so that only the one to blame fails."""
        self._running = []
        error = done.exception()
        if error is not None:
            log.error("a search failed", requests=len(batch), exc_info=error)
            if len(batch) == 1:
                _settle(batch[0], EngineDown("The search failed on this request.", retry_after_seconds=1.0))
            else:
                for search in batch:
                    search.alone = True
                self._waiting.extendleft(search for search in reversed(batch) if not search.future.done())
        else:
            self._answer(batch, started, done.result())
        for version in list(self._versions):
            self._free_if_done(version)
        self._begin()
        self._rest()

    def _answer(self, batch: Sequence[_Search], started: float, answers: Answers) -> None:
        seconds, metrics = self.clock() - started, self.metrics
        self._batch_seconds += SMOOTHING * (seconds - self._batch_seconds) if self._batch_seconds else seconds
        metrics.searches.observe(len(batch))
        metrics.stage["encode"].observe(answers.encode_seconds)
        metrics.stage["search"].observe(answers.search_seconds)
        for search, posts in zip(batch, answers.retrieved, strict=True):
            metrics.stage["queue"].observe(started - search.arrived)
            metrics.visible_rows.observe(posts.visible)
            metrics.scored_rows.observe(posts.scored)
            metrics.user_vectors.labels("cache" if posts.cached else "tower").inc()
            if not search.future.done():
                waited = started - search.arrived
                search.future.set_result(Found(posts, waited, answers.encode_seconds, answers.search_seconds))

    def _free_if_done(self, version: _Version) -> None:
        running = any(search.version is version for search in self._running)
        if version.retired and not version.unfinished and not running and version in self._versions:
            self._versions.remove(version)
            self._executor.submit(version.loaded.engine.close)

    def _rest(self) -> None:
        if not self._waiting and not self._running:
            self._idle.set()


def _settle(search: _Search, error: ServiceError) -> None:
    if not search.future.done():
        search.future.set_exception(error)
