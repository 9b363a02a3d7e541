"""The ranking service of one process, without HTTP: loads, admits requests, has them computed, reports its health."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from app.corpus.loading import CorpusLoader, corpus_loader
from app.corpus.searches import Searches
from app.errors import Draining, EngineDown, ModelNotFound, NotReady, ServiceError
from app.interface import Health, Job, PlaceRequest, Ranked, ServedModel
from app.queue.admission import CROWDED_SECONDS, Admission, Refusal
from app.queue.batching import chunk_count
from app.queue.forecast import Clock, LoopTime, LoopWork
from app.queue.handles import Handles
from app.queue.job import RankJob
from app.queue.loading import Loader, checkpoint_loader
from app.queue.places import Places
from app.queue.runners import ENGINE_THREAD, RETRIEVAL_THREAD
from app.queue.scheduler import Scheduler
from app.queue.versions import Versions
from app.service.attention import ATTENTION_THREAD, AttentionThread
from app.service.reload import Reloader
from app.service.watchdog import Watchdog
from app.settings import Settings
from app.telemetry.metrics import Metrics, Snapshot
from model.inputs import Candidates, Context

RETRY_AFTER_START_SECONDS, RETRY_AFTER_DOWN_SECONDS = 2.0, 5.0  # guesses: nobody knows how long it takes
TICK_SECONDS, TICKING_SECONDS = 0.02, 1.0  # between two looks while requests come, and how long after the last one


log = structlog.get_logger("app.service.local")


class LocalService:
    """An `interface.RankingService` that computes in this process. Used by the event loop only; engines compute elsewhere.

    `on_fatal(reason)` is called once, when only a new process can help and every waiting request has its error. `unreached()`
    is a sentence while no request can come here, else empty: `health` says it.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        *,
        load: Loader,
        load_corpus: CorpusLoader,
        clock: Clock = time.monotonic,
    ) -> None:
        """`load` loads and warms a checkpoint in the engine's thread; `load_corpus` does so for a retrieval checkpoint with its corpus."""
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self.on_fatal: Callable[[str], None] = lambda reason: None
        self.unreached: Callable[[], str] = lambda: ""
        self.admission = Admission(settings.queue, settings.batching, clock)
        self.places: Places[RankJob] = Places(self.admission, metrics, metrics.record_batch)
        self.versions: Versions[RankJob] = Versions(
            settings.batching, self.places.batch_done, clock, settings.reload.timeout_seconds
        )
        self.handles = Handles(self.versions, metrics)
        self.corpus = Searches(load_corpus, settings, metrics, clock, self.handles)
        self.watchdog = Watchdog(settings.queue, self.versions, self.corpus.versions)
        self.reloads = Reloader(settings, metrics, self.versions, self.corpus, self.serve)
        self._load = load
        self._attention = AttentionThread()
        self._loop_time = LoopTime()
        self._is_ticking = False
        self._asked_at = 0.0  # clock seconds when a request last came
        self._stall = ""  # as of the last tick: a sentence while work waits and nothing finishes, else empty
        self._loading = "The process is starting."
        self._failure: str | None = None  # a sentence once something broke for good
        self._load_error: Exception | None = None
        self._has_started = self._is_draining = self._refuses = self._has_stopped = False
        self._tasks: list[asyncio.Task[None]] = []  # of `start`: the first load, and those that watch
        metrics.watch(self.snapshot)

    # life

    def start(self) -> None:
        """Begin loading in the background and return at once. A second call does nothing."""
        if not self._tasks:
            self._loading = "The checkpoint is being loaded."
            loop = asyncio.get_running_loop()
            faults = (self.watchdog.hang, self.versions.lost, self.corpus.versions.lost)
            self._tasks = [loop.create_task(one) for one in (self._first_load(), *map(self._end_after, faults))]
            if seconds := self.settings.reload.watch_seconds:
                self.reloads.watch(seconds)

    async def wait_ready(self) -> None:
        """Return when requests can be served; call it after `start`. Raises the error that made loading fail."""
        await asyncio.wait(self._tasks[:1])
        if self._load_error is not None:
            raise self._load_error

    def begin_drain(self) -> None:
        """Report that the process is not ready, but keep serving requests."""
        self._is_draining = True

    async def stop(self, timeout_seconds: float) -> bool:
        """Finish the admitted requests, then free the engines. Return False if time ran out; the rest are answered 503."""
        self._is_draining = self._refuses = True
        self.reloads.stop()
        until = self.clock() + timeout_seconds
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.places.idle.wait(), timeout_seconds)
        finished = self.places.idle.is_set()
        if self._failure is not None or self.versions.has_lost_engine():
            until = self.clock() + 1.0  # the engine's thread may hang forever
        self._attention.stop()
        self.versions.fail_all(_draining)
        finished &= await self.corpus.stop(max(0.1, until - self.clock()))
        await self.versions.close(max(0.1, until - self.clock()))
        for task in self._tasks:
            task.cancel()
        gc.enable()
        self._has_stopped = True
        return finished

    async def serve(self, path: Path) -> ServedModel:
        """Load and warm the checkpoint at `path` beside the one that serves, then serve new requests with it.

        Requests that were already admitted finish on the old one, whose memory is then freed. Raises CheckpointError, EngineError,
        ReloadInProgress or Draining; then the old one keeps serving.
        """
        scheduler = await self.versions.load(functools.partial(self._load, path))
        if self._is_draining:
            scheduler.close()
            raise _draining()
        self.versions.install(scheduler)
        served: ServedModel = scheduler.loaded.served
        return served

    async def _first_load(self) -> None:
        checkpoint, towers, corpus = self.reloads.begin()
        try:
            scheduler = await self.versions.load(functools.partial(self._load, checkpoint))
            self._loading = "The corpus is being loaded."
            await self.corpus.load(towers, corpus, again=self.reloads.retrieval)
        except Exception as error:
            self._load_error = error
            log.error("not_loaded", reason=str(error))  # it may name a path, which a probe must not
            self._fatal("The checkpoint or the corpus could not be loaded; the log says why.")
            return
        self.versions.install(scheduler)
        self.reloads.keep()
        self._has_started = not self._is_draining
        gc.collect()
        gc.freeze()  # once: the collector never walks code and weights again; a swap adds little and must not pause the loop
        gc.disable()  # until `stop`: reading a long body would start a collection; see `watchdog.collect_garbage`

    async def _end_after(self, fault: Callable[[], Awaitable[str]]) -> None:
        self._fatal(await fault())

    def _fatal(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            self.versions.fail_all(lambda: EngineDown(reason, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS))
            self.corpus.fail_all(lambda: EngineDown(reason, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS))
            self.on_fatal(reason)

    def has_running_threads(self) -> bool:
        """Whether a thread of ours still loads or computes."""
        ours = (ENGINE_THREAD, RETRIEVAL_THREAD, ATTENTION_THREAD)
        return any(thread.name.startswith(ours) for thread in threading.enumerate())

    # admission

    def model(self, name: str = "") -> ServedModel:
        """Return the version that serves new requests. Raises NotReady, or ModelNotFound if `name` (or name@version) is not its name."""
        if self.versions.current is None:
            raise NotReady(self._reason, retry_after_seconds=RETRY_AFTER_START_SECONDS)
        served: ServedModel = self.versions.current.loaded.served
        manifest = served.manifest
        if name and name not in (manifest.name, f"{manifest.name}@{manifest.version}"):
            raise ModelNotFound
        return served

    def check_open(self, key: str | None, leaves_at: float = math.inf) -> None:
        """Raise the error that any request of this API key would get now: NotReady, Draining, EngineDown or Overloaded."""
        self._asked_at = now = self.clock()
        if not self._is_ticking:
            self._tick()
        self._check_able()
        limit = self.settings.queue.max_wait_seconds
        if limit and (wait := self._loop_time.wait_seconds(self.admission.requests)) > limit:
            what = "requests arrive faster than they can be answered"
            raise self.places.error(Refusal("loop_overrun", what, retry_after_seconds=wait - limit))
        if now < self.places.refused_at + CROWDED_SECONDS:
            refusal = self.admission.full(self.versions.running(), key, leaves_at)
            if refusal is not None:
                raise self.places.error(refusal)

    def admit(self, model: ServedModel, request: PlaceRequest) -> AbstractContextManager[RankJob]:
        """Return a block that holds a place for one request on `model`, which `self.model()` has returned for it.

        Entering raises Overloaded or DeadlineExceeded; the call itself NotReady, Draining or EngineDown.
        """
        self._check_able()
        scheduler = self._scheduler(model)
        job = RankJob(
            candidates=request.candidates,
            context_tokens=request.context_tokens(model.manifest.config.history_length),
            chunks=chunk_count(request.candidates, self.settings.batching),
            deadline=request.deadline,
            key=request.key,
            leaves_at=request.leaves_at,
            rated=request.rated,
            future=asyncio.get_running_loop().create_future(),
            model=model,
        )
        return self.places.take(job, scheduler)

    @contextmanager
    def kept(self, model: ServedModel) -> Iterator[None]:
        """See `interface.RankingService.kept`."""
        scheduler = self._scheduler(model)
        scheduler.hold()
        try:
            yield
        finally:
            scheduler.leave()

    def _check_able(self) -> None:
        if self._refuses:
            self.metrics.rejected.labels("draining").inc()
            raise _draining()
        if self._stall:  # it may have ended since the last tick
            self._stall = self.watchdog.stall()
        if down := self._failure or self._stall:
            raise EngineDown(down, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)
        if self.versions.current is None:
            self.metrics.rejected.labels("not_ready").inc()
            raise NotReady(self._reason, retry_after_seconds=RETRY_AFTER_START_SECONDS)

    def _scheduler(self, model: ServedModel) -> Scheduler[RankJob]:
        """Return the scheduler that serves exactly this model. Raises NotReady if it was replaced."""
        scheduler = self.versions.schedulers.get(model)
        if scheduler is None:
            raise NotReady("The model of this request was replaced.", retry_after_seconds=0.0)
        return scheduler

    def _tick(self) -> None:
        """Look at the engines and the loop. Ticks go on for a while after the last request: an idle process does not wake up."""
        now = self.clock()
        self._stall = self.watchdog.stall()
        self._loop_time.observe(now, LoopWork(time.thread_time(), self.places.freed, self.places.refused))
        self._is_ticking = now - self._asked_at < TICKING_SECONDS
        if self._is_ticking:
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    # ranking

    async def reserve(self, job: Job) -> None:
        """Do nothing: entering `admit` has given the job its place. Raises ValueError for a job without one."""
        assert isinstance(job, RankJob)
        self.places.scheduler(job)

    async def rank(self, job: Job, context: Context | str, candidates: Candidates) -> Ranked:
        """Score the candidates, in their order, for a context or one that is known by this handle. Frees the place of the job.

        Raises ContextUnknown, DeadlineExceeded, EngineDown or NonFiniteScores; ValueError for a job that was ranked before or for more
        candidates than were admitted.
        """
        assert isinstance(job, RankJob)
        scheduler = self.places.scheduler(job)
        by_handle = isinstance(context, str)
        if isinstance(context, str):
            context = self.handles.of(scheduler, context, job.key)
        if job.candidates != len(candidates) or job.context_tokens != 1 + len(context):
            self.admission.resize(job, len(candidates), 1 + len(context))
        job.context, job.items = context, candidates
        ranked: Ranked = await self.places.compute(job)
        return msgspec.structs.replace(ranked, context=context) if by_handle else ranked

    async def context(self, model: ServedModel, handle: str, key: str | None, deadline: float) -> Context:
        """Return the context that this handle names for this API key. Raises ContextUnknown, or NotReady if `model` is gone."""
        return self.handles.of(self._scheduler(model), handle, key)

    async def attention(
        self, model: ServedModel, context: Context, candidates: Candidates, deadline: float
    ) -> NDArray[np.float32]:
        """Return what the candidates attend to, float32 `[L, N, C, 1 + h + 1]`: the user, each event, themselves.

        Raises NotReady if `model` is gone, DeadlineExceeded or EngineDown.
        """
        loaded = self._scheduler(model).loaded
        return await self._attention.compute(loaded, context, candidates, deadline - self.clock())

    # what it says of itself

    @property
    def _reason(self) -> str:
        """Why the process is not ready as far as is known without looking at its engines; empty when it is."""
        if self._failure is not None:
            return self._failure
        if self._has_stopped:
            return "The process has stopped."
        if self._is_draining:
            return "The process is shutting down."
        if self.versions.current is not None:
            return ""
        return "The engine is warming up." if self.versions.is_warming else self._loading

    def health(self) -> Health:
        """Return what the probes report; looks at the engines and at the files that are served from."""
        stall = self.watchdog.stall()
        reason = self._reason or stall or self.corpus.problem or self.unreached()
        failed = self._failure is not None or (bool(stall) and not self._is_draining)
        feed = self.corpus.feed
        return Health(not reason, self._has_started, failed, self._is_draining, reason, feed.reason if feed else "")

    async def exposition(self) -> bytes:
        """Return every metric of this process."""
        return self.metrics.render()

    def snapshot(self) -> Snapshot:
        """Return the values that a scrape of the metrics reads."""
        current = None if self.versions.current is None else self.versions.current.loaded
        feed = self.corpus.feed
        return Snapshot(
            ready=self.health().ready,
            queue_requests=self.admission.requests,
            queue_candidates=self.admission.candidates,
            cache=self.versions.cache_stats(),
            model=None if current is None else current.labels(),
            last_forward_timestamp_seconds=self.metrics.last_forward_unix,
            stalled_seconds=self.versions.silent_seconds(),
            device_memory_bytes=None if current is None else current.device_memory_bytes(),
            engine_steps_down=None if current is None else current.steps_down(),
            searches_waiting=self.corpus.versions.waiting,
            corpus=self.corpus.present(),
            milestone=self.corpus.milestone,
            feed_lag_seconds=None if feed is None else feed.lag_seconds,
        )


def _draining() -> ServiceError:
    return Draining(retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)


def create_ranker(settings: Settings, metrics: Metrics) -> LocalService:
    """Return the ranker that the settings describe. It does not load yet: call its `start` in a running loop."""
    return LocalService(settings, metrics, load=checkpoint_loader(settings), load_corpus=corpus_loader(settings))
