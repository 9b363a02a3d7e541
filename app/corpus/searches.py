"""The `interface.ChangeableCorpus` of one process: runs searches, swaps towers and corpus together, and changes the corpus meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog

from app.corpus.feed import MILESTONE, FeedReader
from app.corpus.loading import CorpusLoader, LoadedCorpus
from app.corpus.stream import open_feed
from app.errors import ChangedByFeed, CorpusBehind, CorpusNotLoaded, EngineDown, NoCorpus, Overloaded, ServiceError
from app.interface import CorpusState, ReloadInProgress, SearchRequest, SearchResult, ServedCorpus
from app.queue.admission import Admission
from app.queue.forecast import Clock
from app.queue.handles import Handles
from app.queue.job import SearchJob
from app.queue.places import Places
from app.queue.runners import RETRIEVAL_THREAD, EngineThread, Runner, SearchForwards
from app.queue.scheduler import RETRY_AFTER_SECONDS, Scheduler
from app.queue.versions import Versions
from app.settings import Batching, Settings
from app.shares import Shares
from app.telemetry.metrics import Metrics
from model.engine import EngineError
from model.retrieval.inputs import Mark, PostChange
from weights.errors import NotStored

SCAN_REQUESTS = 32  # searches that share one scan of the corpus
MOST_CHANGES = 4  # that wait or are being made; one is made at a time
AGAIN_SECONDS, MOST_AGAIN_SECONDS = 1.0, 60.0
"""Pause before a corpus whose engine lacks a change is read again; doubled each time, up to the second."""
LOADING_SECONDS = 2.0  # after which it is worth asking again
BEHIND_SECONDS, MOST_BEHIND = 0.5, 32
"""How long a request waits for a change that the corpus has not had yet, and how many do so at once, since each keeps what it was sent;
the others are refused."""
BEHIND_RETRY_SECONDS = 1.0

log = structlog.get_logger("app.corpus.searches")


class Searches:
    """Serves searches over one corpus. Used by the event loop only; engines search in threads."""

    def __init__(
        self, load: CorpusLoader, settings: Settings, metrics: Metrics, clock: Clock, handles: Handles
    ) -> None:
        """`handles` look up the contexts that queries name by a handle."""
        batching = Batching(max_candidates=SCAN_REQUESTS)  # each search counts as one
        most = max(1, settings.queue.max_requests // 4) + SCAN_REQUESTS
        limits = {"max_requests": most, "max_candidates": most, "key_candidates_per_second": 0.0}
        admission = Admission(settings.queue.model_copy(update=limits), batching, clock)
        self.metrics = metrics
        self.places: Places[SearchJob] = Places(admission, metrics)
        self.versions: Versions[SearchJob] = Versions(
            batching,
            self.places.batch_done,
            clock,
            settings.reload.timeout_seconds,
            self._runner,
            RETRIEVAL_THREAD,
            discard=lambda loaded: loaded.changes.close(),  # lets go of the directory
        )
        self.feed: FeedReader | None = None
        """The source of changes; with one, `change` is refused."""
        if settings.retrieval.feed is not None:
            stream = open_feed(settings.retrieval.feed.get_secret_value())
            self.feed = FeedReader(stream, metrics, settings.retrieval.feed_lag_seconds)
        self.milestone: Mark | None = None
        """The mark after the last change whose number is a multiple of `MILESTONE`."""
        self._load = load
        self._paths = settings.retrieval.checkpoint, settings.retrieval.corpus
        self._clock = clock
        self._handles = handles
        self._is_loading = False
        self._changing = asyncio.Lock()  # held by a swap, too: no change may fall between a load and its installation
        self._changes: set[asyncio.Task[Any]] = set()  # under way
        self._news = asyncio.Event()  # set, and replaced, when a change was made or another corpus serves
        self._waiting = Shares(MOST_BEHIND, settings.queue.max_share_per_key)  # requests that wait for a change
        self._held: LoadedCorpus | None = None  # what served last: it has the directory, even if its engine is lost
        self._behind: LoadedCorpus | None = None  # its engine lacks a change that is on the disk
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def served(self) -> ServedCorpus:
        """See `interface.CorpusService.served`."""
        return self._loaded.served

    @property
    def mark(self) -> Mark:
        """The mark of the corpus that serves. Raises CorpusNotLoaded or NoCorpus."""
        return self._loaded.changes.mark

    @property
    def problem(self) -> str:
        """A sentence that says why this process should get no requests although it serves a corpus, else empty."""
        return "" if self.feed is None else self.feed.problem

    async def state(self) -> CorpusState | None:
        """See `interface.CorpusService.state`."""
        return self.present()

    def present(self) -> CorpusState | None:
        """Return the present state of the corpus, None where none is served."""
        return None if self.versions.current is None else self._loaded.state()

    def is_in(self, directory: Path) -> bool:
        """Whether the corpus that serves is what lies in this directory now. Raises CorpusNotLoaded or NoCorpus. For any thread."""
        return self._loaded.changes.is_in(directory)

    def changed_file(self) -> str:
        """A sentence if a file that is searched was written to since it was read, else empty. For any thread."""
        return "" if self.versions.current is None else self._loaded.changed_file()

    @property
    def _loaded(self) -> LoadedCorpus:
        if self.versions.current is None:
            if None in self._paths:
                raise NoCorpus
            raise CorpusNotLoaded(retry_after_seconds=LOADING_SECONDS)
        loaded: LoadedCorpus = self.versions.current.loaded
        return loaded

    # life

    async def load(self, checkpoint: Path | None, corpus: Path | None, again: tuple[Path | None, Path | None]) -> None:
        """Load this corpus, if there is one, and begin to follow the feed. `again`: the paths that are to be read again later. Raises what
        the loader raises."""
        self._paths = again
        if checkpoint is not None and corpus is not None:
            await self.swap(checkpoint, corpus)
            self._paths = again
        if self.feed is not None:
            self._begin(self.feed.run(self))

    async def swap(self, checkpoint: Path, corpus: Path) -> ServedCorpus:
        """Load a retrieval checkpoint and a corpus beside those that serve, then serve new searches with both.

        Searches that began on the old ones end on them; then their memory is freed. Raises what the loader raises, and ReloadInProgress;
        the old ones then keep serving.
        """
        if self._is_loading:
            raise ReloadInProgress("another corpus is being loaded")
        self._is_loading = True
        try:
            async with self._changing:
                before = self._held
                scheduler = await self.versions.load(lambda steps: self._load(checkpoint, corpus, before))
                self.versions.install(scheduler)
                self._held, self._paths = scheduler.loaded, (checkpoint, corpus)
                if before is not None:
                    before.changes.close()
                self._tell()
                if self.feed is not None:
                    self.feed.serves(self.mark)
        finally:
            self._is_loading = False
        served = self.served
        versions = {
            "version": served.manifest.version,
            "corpus": served.corpus.version,
            "changes": self._loaded.engine.changes,
        }
        log.info("corpus_loaded", **versions, posts=self._loaded.engine.posts, hidden=served.hidden)
        return served

    async def stop(self, timeout_seconds: float) -> bool:
        """Finish the admitted searches and changes, then free the engines. Return False if time ran out."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self.places.idle.wait()
                while under_way := self._changes | self._tasks:
                    await asyncio.wait(under_way)
        finished = self.places.idle.is_set() and not self._changes
        self.fail_all(lambda: EngineDown("The process stops.", retry_after_seconds=RETRY_AFTER_SECONDS))
        if self._held is not None and not self._changes:
            self._held.changes.close()  # while a change may still be written, only the end of the process closes its file
        self.versions.drop()
        return finished

    def fail_all(self, error: Callable[[], ServiceError]) -> None:
        """Fail every search that waits or is being computed, each with an error of its own."""
        self.versions.fail_all(error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # changes

    async def change(self, change: PostChange) -> CorpusState:
        """See `interface.ChangeableCorpus.change`. A change that has begun is finished even if the caller has gone."""
        if self.feed is not None:
            raise ChangedByFeed
        if len(self._changes) >= MOST_CHANGES:
            raise Overloaded("Too many changes of posts are under way.", retry_after_seconds=1.0)
        return await self._begun([change], "", "")

    async def follow(self, changes: Sequence[PostChange], after: str, position: str) -> CorpusState:
        """Make the changes of a feed from `after` up to `position`, as `change` does; none if the corpus is no longer at `after`."""
        return await self._begun(changes, after, position)

    async def _begun(self, changes: Sequence[PostChange], after: str, position: str) -> CorpusState:
        task = asyncio.get_running_loop().create_task(self._change(changes, after, position))
        self._changes.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio logs it where the caller has gone

    async def _change(self, changes: Sequence[PostChange], after: str, position: str) -> CorpusState:
        async with self._changing:
            loaded = self._loaded
            if loaded is self._behind:
                raise EngineDown("An earlier change is on disk but not served yet.", retry_after_seconds=1.0)
            if self.feed is not None and loaded.changes.mark.position != after:
                return loaded.state()
            scheduler: Scheduler[SearchJob] | None = self.versions.current
            assert scheduler is not None
            corpus = self._paths[1]
            if corpus is None or not await asyncio.to_thread(loaded.changes.is_in, corpus):
                raise NotStored("The corpus was replaced on the disk; read it again.")
            try:
                change, added = await asyncio.to_thread(loaded.record, changes, position)
            except EngineError as error:
                raise EngineDown(
                    "The new posts cannot be indexed now. Nothing has changed.", retry_after_seconds=5.0
                ) from error
            try:
                state = await scheduler.between(lambda: loaded.state(loaded.engine.change(change, added)))
            except Exception as error:
                self._behind = loaded
                log.error("change_not_made", exc_info=error)
                self._begin(self._read_again(loaded))
                raise EngineDown("The change is on disk but not served yet.", retry_after_seconds=5.0) from error
        self._tell()
        if not change.mark.sequence % MILESTONE:
            self.milestone = change.mark
        return state

    def _tell(self) -> None:
        """Wake the requests that wait for a change."""
        self._news.set()
        self._news = asyncio.Event()

    async def _read_again(self, behind: LoadedCorpus) -> None:
        """Load a corpus again whose engine lacks a change that is on the disk."""
        pause, (checkpoint, corpus) = AGAIN_SECONDS, self._paths
        assert checkpoint is not None
        assert corpus is not None
        while self.versions.current is not None and self.versions.current.loaded is behind:
            try:
                await self.swap(checkpoint, corpus)
            except Exception as error:
                log.error("corpus_not_read_again", reason=type(error).__name__)
                await asyncio.sleep(pause)
                pause = min(MOST_AGAIN_SECONDS, 2 * pause)

    # searches

    async def reach(self, at_least: str, key: str | None, deadline: float) -> None:
        """See `interface.CorpusService.reach`."""
        if self._has_reached(at_least):
            return
        if not self._waiting.has_room(key, 1):
            raise CorpusBehind(retry_after_seconds=BEHIND_RETRY_SECONDS)
        self._waiting.take(key, 1)
        try:
            async with asyncio.timeout(min(BEHIND_SECONDS, deadline - self._clock())):
                while not self._has_reached(at_least):
                    await self._news.wait()
        except TimeoutError:
            raise CorpusBehind(retry_after_seconds=BEHIND_RETRY_SECONDS) from None
        finally:
            self._waiting.take(key, -1)

    def _has_reached(self, at_least: str) -> bool:
        scheduler = self.versions.current
        return scheduler is not None and scheduler.loaded.engine.mark.reaches(at_least)

    async def search(self, served: ServedCorpus, request: SearchRequest) -> SearchResult:
        """See `interface.CorpusService.search`."""
        query, scheduler = request.query, self.versions.schedulers.get(served)
        if scheduler is None:
            raise CorpusNotLoaded("The corpus of this request was replaced.", retry_after_seconds=0.0)
        if query.at_least and not scheduler.loaded.engine.mark.reaches(query.at_least):
            raise CorpusBehind(retry_after_seconds=BEHIND_RETRY_SECONDS)
        if query.handle:
            query = self._handles.query(query, served.manifest, request.key, is_counted=not request.has_place)
        future: asyncio.Future[SearchResult] = asyncio.get_running_loop().create_future()
        job = SearchJob(
            candidates=1,
            context_tokens=0,
            deadline=request.deadline,
            key=request.key,
            leaves_at=request.leaves_at,
            future=future,
            query=query,
        )
        with self.places.take(job, scheduler):
            result: SearchResult = await self.places.compute(job)
            return result

    def _runner(self, thread: EngineThread, loop: asyncio.AbstractEventLoop, clock: Clock) -> Runner:
        return SearchForwards(thread, thread.ready.result().engine, loop, clock, self.metrics)
