"""Retrieval without HTTP: runs searches, swaps towers and corpus together, and changes and compacts the corpus meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from app.budgets import CHANGES, EXCLUDED_IDS, SCAN_REQUESTS, Budget
from app.engine.admission import Admission
from app.engine.job import SearchJob
from app.engine.loading import LoadedRetrieval, RetrievalLoader
from app.engine.queue import Queue
from app.engine.runners import RETRIEVAL_THREAD, EngineThread, Runner, SearchForwards
from app.engine.versions import Versions
from app.engine.worker import RETRY_AFTER_SECONDS, Worker
from app.errors import ChangedByFeed, CorpusBehind, CorpusNotLoaded, EngineDown, Overloaded, ServiceError
from app.interface import Changed, FoundDone, ReloadInProgress, ServedRetrieval, Ticket
from app.loop_lag import Clock
from app.service.contexts import Contexts
from app.service.feed import MILESTONE, FeedReader
from app.settings import Batching, Settings
from app.telemetry.metrics import Metrics
from model.retrieval.inputs import Change, Mark, PostChange, Query

FOLLOW_SECONDS = 0.25  # between two checks for changes by other processes
MOST_FOLLOW_SECONDS = 60.0  # the longest pause, while their files cannot be read
COMPACT_ROWS = 50_000  # deleted, replaced or new: then the corpus is rewritten; a dozen more scans of 4 096 rows

log = structlog.get_logger("app.service.retrieval")


class RetrievalService:
    """Serves searches over one corpus. `load` is None if there is none to serve. Used by the event loop only."""

    def __init__(self, load: RetrievalLoader | None, settings: Settings, metrics: Metrics, clock: Clock) -> None:
        self.metrics = metrics
        most = max(1, settings.queue.max_requests // 4) + SCAN_REQUESTS
        batching = Batching(max_candidates=SCAN_REQUESTS)  # each search counts as one
        room = settings.queue.model_copy(
            update={"max_requests": most, "max_candidates": most, "key_candidates_per_second": 0.0}
        )
        self.versions: Versions[SearchJob] = Versions(
            batching, self, clock, settings.reload.timeout_seconds, self._runner, RETRIEVAL_THREAD
        )
        self.queue: Queue[SearchJob] = Queue(
            Admission(room, batching, clock, self.versions.running), metrics, metrics.record_waits
        )
        self.batch_done = self.queue.batch_done
        self.excluded = metrics.watch_budget("excluded_ids", Budget(EXCLUDED_IDS))
        self.contexts: Contexts  # for queries that name their context by a handle; set by the service
        self.room = metrics.watch_budget("changes", Budget(CHANGES))
        self._load = load
        self._loading = False
        self._swapping = asyncio.Lock()  # a swap waits for a compaction
        self._changing = asyncio.Lock()  # held by a swap, too: no change may fall between a load and its installation
        self._changes: set[asyncio.Task[Any]] = set()  # changes under way, and a compaction being installed
        self._compaction: asyncio.Task[Changed] | None = None
        self._since: list[Change] | None = None  # changes since the running compaction began
        self._compact_at: int  # changed rows at which a compaction begins; each corpus that is loaded sets it
        self.feed: FeedReader | None = None
        """The source of changes; while set, `change` is refused."""
        self.milestone: Mark | None = None  # the last one
        self._files_problem = ""
        self._followers: list[asyncio.Task[None]] = []
        self._behind: LoadedRetrieval | None = None  # its log has a change that its engine could not make
        # for long work that the end of the process does not wait for: see `RankingService.has_running_threads`
        self._slow = ThreadPoolExecutor(1, thread_name_prefix=f"{RETRIEVAL_THREAD}-slow")

    @property
    def served(self) -> ServedRetrieval:
        """The towers and corpus that serve new requests. Raises CorpusNotLoaded."""
        return self._loaded.served

    @property
    def _worker(self) -> Worker[SearchJob]:
        assert self.versions.current is not None
        return self.versions.current

    @property
    def _loaded(self) -> LoadedRetrieval:
        if self.versions.current is None:
            detail = None if self._load is None else "The corpus is being loaded."
            raise CorpusNotLoaded(detail, retry_after_seconds=None if self._load is None else 2.0)
        loaded: LoadedRetrieval = self.versions.current.model
        return loaded

    def state(self) -> Changed | None:
        """Return the present state of the corpus that serves, or None without one."""
        return None if self.versions.current is None else self._loaded.state()

    def mark(self) -> Mark:
        """As `feed.Follower.mark`."""
        return self._loaded.log.mark

    @property
    def problem(self) -> str:
        """A sentence saying why this process should get no requests although its corpus is intact, else empty."""
        return self._files_problem or ("" if self.feed is None else self.feed.problem)

    # life

    async def load(self) -> None:
        """Load the corpus, if there is one, and start following changes. Raises what the loader raises."""
        if self._load is not None:
            await self.swap(self._load)
        work = [self._follow(), *(() if self.feed is None else [self.feed.run(self)])]
        self._followers = [asyncio.get_running_loop().create_task(one) for one in work]

    async def swap(self, load: RetrievalLoader) -> ServedRetrieval:
        """Load another checkpoint and corpus beside those that serve, then serve new requests with both.

        Requests that began on the old ones end on them; then their memory is freed. Raises what `load` raises, and
        ReloadInProgress; the old ones then keep serving.
        """
        if self._loading:
            raise ReloadInProgress("another corpus is being loaded")
        self._loading = True
        try:
            async with self._swapping, self._changing:
                self._install(await self.versions.load(lambda steps: load()))
                if self.feed is not None:
                    self.feed.serves(self.mark())
                self._compact_at = COMPACT_ROWS
        finally:
            self._loading = False
        served, corpus = self.served, self.served.corpus
        version, hidden = served.manifest.version, served.hidden
        log.info("corpus_loaded", version=version, corpus=corpus.version, posts=corpus.posts, hidden=hidden)
        return served

    def _install(self, worker: Worker[SearchJob]) -> None:
        old = self.versions.current
        if old is not None:
            old.model.log.close()
        self.versions.install(worker)

    async def stop(self, timeout_seconds: float) -> bool:
        """Finish the admitted searches, then free the engines. Return False if time ran out."""
        for follower in self._followers:
            follower.cancel()
        if self._compaction is not None and self._compaction not in self._changes:
            self._compaction.cancel()  # its files are not in use
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self.queue.idle.wait()
                await asyncio.gather(*self._changes, return_exceptions=True)
        finished = self.queue.idle.is_set() and not self._changes
        self.abandon(lambda: EngineDown("The process stops.", retry_after_seconds=RETRY_AFTER_SECONDS))
        for worker in self.versions.held if not self._changes else ():  # a change may still write: its process ends
            worker.model.log.close()
        self.versions.drop()
        self._slow.shutdown(wait=False, cancel_futures=True)
        return finished

    # changes

    async def change(self, change: PostChange) -> Changed:
        """As `interface.Retrieval.change`. A change that has begun is finished even if the caller has gone."""
        if self.feed is not None:
            raise ChangedByFeed
        if not self.room.take(1):
            raise Overloaded("Too many changes of posts are under way.", retry_after_seconds=1.0)
        task = self._begin_change([change], "", "")
        task.add_done_callback(lambda _: self.room.give(1))
        return await asyncio.shield(task)

    async def follow(self, changes: Sequence[PostChange], after: str, position: str) -> Changed:
        """Make the changes of a feed from `after` up to `position`, as `change` does. Make none if the log is no longer at `after`."""
        return await asyncio.shield(self._begin_change(changes, after, position))

    def _begin_change(self, changes: Sequence[PostChange], after: str, position: str) -> asyncio.Task[Changed]:
        task = asyncio.get_running_loop().create_task(self._change(changes, after, position))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return task

    async def _change(self, changes: Sequence[PostChange], after: str, position: str) -> Changed:
        async with self._changing:
            loaded = self._loaded
            await self._hold(loaded)
            if self.feed is not None and loaded.log.mark.position != after:
                return loaded.state()
            recorded = await asyncio.to_thread(loaded.record, changes, position)
            if self._since is not None:
                self._since.append(recorded)
            changed = await self._apply(loaded, recorded)
        if loaded.engine.changed_rows >= self._compact_at:
            self._begin_compaction()
        return changed

    async def _hold(self, loaded: LoadedRetrieval) -> None:
        """Take the right to change the corpus and make all changes so far. Raises CheckpointError, and EngineDown if one cannot be made."""
        if loaded is self._behind:
            raise EngineDown("An earlier change is on the disk and not served yet.", retry_after_seconds=1.0)
        for missed in await asyncio.to_thread(loaded.log.hold):
            await self._apply(loaded, missed)

    async def _apply(self, loaded: LoadedRetrieval, recorded: Change) -> Changed:
        """Make a change that is on the disk. Raises EngineDown if that fails; `_follow` then reads the corpus again."""
        try:
            added = await asyncio.to_thread(loaded.engine.prepare, recorded)
            changed = await self._worker.between(lambda: loaded.state(loaded.engine.change(recorded, added)))
            self.milestone = self.milestone if recorded.mark.sequence % MILESTONE else recorded.mark
            return changed
        except Exception as error:
            self._behind, reason = loaded, str(error) or type(error).__name__
            log.error("change_not_made", reason=reason)
            raise EngineDown("The change is on the disk and not served yet.", retry_after_seconds=5.0) from error

    # changes by other processes

    async def _follow(self) -> None:
        """Make the changes that other processes make to the corpus, and load it again when following them is not enough."""
        seconds = FOLLOW_SECONDS
        while True:
            await asyncio.sleep(seconds)
            problem = ""
            try:
                if self.versions.current is not None and not await self._catch_up():
                    await self.swap(self._loaded.again)
                seconds = FOLLOW_SECONDS
            except (ReloadInProgress, CorpusNotLoaded):
                continue
            except Exception as error:
                problem = str(error) or type(error).__name__
                seconds = min(MOST_FOLLOW_SECONDS, 2 * seconds)
            if problem != self._files_problem:
                self._files_problem = problem
                log.error("corpus_files", reason=problem) if problem else log.info("corpus_files_restored")

    async def _catch_up(self) -> bool:
        """Make the changes of other processes. Return False if the corpus has to be read again. Raises CheckpointError and EngineDown."""
        async with self._changing:
            loaded = self._loaded
            if loaded is self._behind:
                return False
            changes = await asyncio.to_thread(loaded.log.follow)
            for change in changes or ():
                await self._apply(loaded, change)
        return changes is not None

    async def compact(self) -> Changed:
        """As `interface.Retrieval.compact`. A compaction that has begun is finished even if the caller has gone."""
        _ = self.served
        if self._swapping.locked():
            raise ReloadInProgress("the corpus is being replaced")
        return await asyncio.shield(self._begin_compaction())

    def _begin_compaction(self) -> asyncio.Task[Changed]:
        if self._compaction is None or self._compaction.done():
            self._compaction = asyncio.get_running_loop().create_task(self._compact())
            self._compaction.add_done_callback(lambda task: task.cancelled() or task.exception())  # already logged
        return self._compaction

    async def _compact(self) -> Changed:
        this = asyncio.current_task()
        assert this is not None
        async with self._swapping:
            loaded = self._loaded
            engine = loaded.engine
            if not engine.changes:
                return loaded.state()
            try:
                async with self._changing:
                    await self._hold(loaded)
                    parts, mark = await self._worker.between(lambda: (engine.parts(), engine.mark))
                    self._since = []
                writing = asyncio.get_running_loop().run_in_executor(self._slow, loaded.compact, parts, mark)
                compacted = await writing
                async with self._changing:
                    self._changes.add(this)
                    loaded = await asyncio.to_thread(compacted.commit, self._since)
                    try:
                        self._install(await self.versions.load(lambda steps: loaded))
                    except BaseException:
                        loaded.log.close()  # nobody else would; `_follow` reads the files in use again
                        raise
            except Exception as error:
                self._compact_at = engine.changed_rows + COMPACT_ROWS
                self.metrics.compactions.labels("failure").inc()
                log.error("compaction_failed", reason=str(error) or type(error).__name__)
                raise
            finally:
                self._since = None
                self._changes.discard(this)
        self._compact_at = COMPACT_ROWS
        self.metrics.compactions.labels("success").inc()
        state = self._loaded.state()
        log.info("corpus_compacted", corpus=state.corpus.version, posts=state.posts, changes=state.changes)
        return state

    # searches

    def retrieve(
        self, served: ServedRetrieval, query: Query, deadline: float, key: str | None, done: FoundDone
    ) -> Ticket:
        """As `interface.Retrieval.retrieve`."""
        worker = self.versions.find(served)
        if worker is None:
            raise CorpusNotLoaded("The corpus of this request was replaced.", retry_after_seconds=0.0)
        if query.at_least and not worker.model.engine.mark.reaches(query.at_least):
            raise CorpusBehind(retry_after_seconds=1.0)
        if query.handle:
            query = self.contexts.query(query, served.manifest, key)
        excluded = len(query.filters.exclude)
        job = SearchJob(
            candidates=1,
            context_tokens=0,
            deadline=deadline,
            key=key,
            worker=worker,
            on_release=self._leave if excluded else self.queue.leave,
            query=query,
        )
        if excluded and not self.excluded.take(excluded):
            job.reserved = False
            raise Overloaded("Waiting searches together exclude too many posts.", retry_after_seconds=1.0)
        if (refusal := self.queue.join(job)) is not None:
            self.excluded.give(excluded)
            raise self.queue.error(refusal)
        job.done = done
        worker.submit(job)
        return job

    def _leave(self, job: SearchJob) -> None:
        self.excluded.give(len(job.query.filters.exclude))
        self.queue.leave(job)

    def abandon(self, error: Callable[[], ServiceError]) -> None:
        """Answer every search that waits or is being computed with this error."""
        for job in self.versions.abandon():
            job.finish(error())

    # reported by its engine

    def _runner(self, thread: EngineThread, loop: asyncio.AbstractEventLoop, clock: Clock) -> Runner:
        return SearchForwards(thread, thread.ready.result().engine, loop, clock, self.metrics)

    def warming(self) -> None:
        """A corpus was read; nothing else changes."""

    def engine_lost(self, reason: str) -> None:
        """The engine broke, and its searches were answered. Refuse new ones until another corpus is loaded."""
        log.error("retrieval_lost", reason=reason)
        self.versions.drop()
