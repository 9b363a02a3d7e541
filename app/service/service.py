"""The ranking service without HTTP: admits requests, has them computed and reports its health. HTTP sees it through `interface`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import structlog
from numpy.typing import NDArray

from app.budgets import most_bytes
from app.engine.admission import Admission, Refusal
from app.engine.batching import chunk_count
from app.engine.job import RankJob
from app.engine.loading import Loader, RetrievalLoader
from app.engine.queue import Queue
from app.engine.runners import ENGINE_THREAD, RETRIEVAL_THREAD
from app.engine.versions import Versions
from app.engine.worker import Worker
from app.errors import Draining, EngineDown, NotReady, ServiceError
from app.interface import Changed, Done, Health, Second, ServedModel, Ticket
from app.load import Load
from app.loop_lag import Clock, LoopClock, Work
from app.service.contexts import Contexts
from app.service.lifecycle import Lifecycle, State
from app.service.plain_path import PLAIN_THREAD, PlainPath
from app.service.retrieval import RetrievalService
from app.service.second import SecondCheckpoint
from app.service.watchdog import Watchdog
from app.settings import Settings
from app.telemetry.exposition import Snapshot
from app.telemetry.metrics import Metrics
from model.inputs import Candidates, Context

RETRY_AFTER_START_SECONDS, RETRY_AFTER_DOWN_SECONDS = 2.0, 5.0  # guesses: nobody knows how long it takes
CROWDED_SECONDS = 0.1  # for this long after a refusal, check for room before reading a request
OVERRUN = Refusal("loop_overrun", "requests arrive faster than they can be answered", retry_after_seconds=1.0)

log = structlog.get_logger("app.service")


class RankingService:
    """The service of one process. Used by the event loop only; engines compute elsewhere.

    `load` loads and warms the first model in the engine's thread, `second` a second checkpoint, if there is one. `on_fatal(reason)` is
    called once, when only a new process can help and all waiting requests have been answered.
    """

    def __init__(
        self,
        load: Loader,
        settings: Settings,
        metrics: Metrics,
        *,
        retrieval: RetrievalLoader | None = None,
        second: Loader | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self.on_fatal: Callable[[str], None] = lambda reason: None
        self.lifecycle = Lifecycle()
        self.retrieval = RetrievalService(retrieval, settings, metrics, clock)
        self.plain_path = PlainPath()
        self.versions: Versions[RankJob] = Versions(settings.batching, self, clock, settings.reload.timeout_seconds)
        self.second_checkpoint = SecondCheckpoint(second, settings, self.versions, metrics, clock, self)
        self.retrieval.contexts = self.contexts = Contexts(metrics, self.versions, self.second_checkpoint.versions)
        self.admission = Admission(settings.queue, settings.batching, clock, self.second_checkpoint.running)
        self.load = Load(clock, lambda: metrics.busy_seconds, self.admission.behind_seconds)
        watched = self.versions, self.retrieval.versions, self.second_checkpoint, self.load
        self.watchdog = Watchdog(settings.queue, *watched)
        soon = self.second_checkpoint.soon if second else None
        self.queue: Queue[RankJob] = Queue(self.admission, metrics, metrics.record_batch, soon)
        self.batch_done = self.queue.batch_done
        self.loop_clock = LoopClock(clock, self._work)
        self._has_second = second is not None
        self._load = load
        self._load_error: Exception | None = None
        self._refusing = False
        self._stall = ""  # as of the last tick: a sentence while work waits and nothing finishes, else empty
        self._crowded_until = 0.0
        self._tasks: list[asyncio.Task[None]] = []  # of `start`: the first loads and the watchdog
        metrics.watch(self)

    # life

    def start(self) -> None:
        """Begin loading in the background and return at once. A second call does nothing."""
        if self.lifecycle.state is State.STARTING:
            self.lifecycle.move(State.LOADING)
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._first_load()), loop.create_task(self._watch())]

    async def wait_ready(self) -> None:
        """Return when requests can be served; call it after `start`. Raises the error that made loading fail."""
        await asyncio.wait(self._tasks[:1])
        if self._load_error is not None:
            raise self._load_error

    def begin_drain(self) -> None:
        """Report that the service is not ready, but keep serving requests."""
        self.lifecycle.move(State.DRAINING)

    def refuse_new(self) -> None:
        """Admit no more requests."""
        self.begin_drain()
        self._refusing = True

    async def stop(self, timeout_seconds: float) -> bool:
        """Finish the admitted requests, then free the engines. Return False if time ran out; the rest are answered 503."""
        self.refuse_new()
        until = self.clock() + timeout_seconds
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.queue.idle.wait(), timeout_seconds)
        finished = not self.admission.requests
        if self.lifecycle.failure is not None:
            until = self.clock() + 1.0  # the engine's thread may hang forever
        self._fail_all(lambda: Draining(retry_after_seconds=RETRY_AFTER_DOWN_SECONDS))
        self.plain_path.stop()
        finished &= await self.retrieval.stop(max(0.1, until - self.clock()))
        both = self.versions, self.second_checkpoint.versions
        await asyncio.gather(*(versions.close(max(0.1, until - self.clock())) for versions in both))
        for task in self._tasks:
            task.cancel()
        gc.enable()
        self.lifecycle.move(State.STOPPED)
        return finished

    async def _first_load(self) -> None:
        try:
            worker = await self.versions.load(self._load)
            await self.retrieval.load()
        except Exception as error:
            self._load_error = error
            self._fatal(f"The checkpoint could not be loaded: {error}")
        else:
            self.versions.install(worker)
            gc.collect()
            gc.freeze()  # once: the collector never walks code and weights again; a swap adds little and must not pause the loop
            gc.disable()  # until `stop`: reading a long body would start a collection; see `watchdog.collect_garbage`
            log.info("memory", **{f"{name}_bytes": count for name, count in self.most_bytes().items()})
            self.lifecycle.move(State.READY)
            self._tasks.append(asyncio.get_running_loop().create_task(self.second_checkpoint.load()))

    def most_bytes(self) -> dict[str, int]:
        """Return `budgets.most_bytes` for the model and corpus that serve. Raises NotReady."""
        corpus = self.retrieval.state()
        searched = () if corpus is None else (self.retrieval.served.manifest.config, corpus.posts)
        return most_bytes(self.settings, self.model.manifest.config, *searched)

    # admission

    @property
    def model(self) -> ServedModel:
        """The version that serves new requests. Raises NotReady while nothing is loaded."""
        if self.versions.current is None:
            raise NotReady(self.lifecycle.reason, retry_after_seconds=RETRY_AFTER_START_SECONDS)
        served: ServedModel = self.versions.current.model.served
        return served

    @property
    def second(self) -> Second | None:
        """The second checkpoint; None if none is configured."""
        return self.second_checkpoint.state

    def check_open(self, key: str | None = None) -> None:
        """Raise NotReady, Draining, EngineDown or Overloaded if every request of this API key would get it. Reads no request."""
        ticks = self.loop_clock
        ticks.last_request = now = self.clock()
        if not ticks.is_ticking:
            ticks.begin()
        self._check_able()
        if ticks.lag.overrun and ticks.lag.refuses(self.admission.requests):
            raise self._refused(OVERRUN)
        if now < self._crowded_until and (refusal := self.admission.full(key)) is not None:
            raise self._refused(refusal)

    def admit(
        self,
        model: ServedModel,
        *,
        candidates: int,
        history: int,
        deadline: float | None,
        key: str | None = None,
        again: bool = False,
        waits: bool = False,
    ) -> RankJob:
        """As `interface.Service.admit`; `model` is what `service.model` or `service.second` was for the request."""
        self._check_able()
        worker, now, limits = self._worker(model), self.clock(), self.settings.deadline
        deadline = now + limits.default_seconds if deadline is None else deadline
        job = RankJob(
            candidates=candidates,
            context_tokens=1 + min(history, model.manifest.config.history_length),
            chunks=chunk_count(candidates, self.settings.batching),
            deadline=min(deadline, now + limits.max_seconds),
            key=key,
            worker=worker,
            on_release=self.queue.leave,
        )
        if (refusal := self.queue.join(job, again=again)) is not None:
            self._crowded_until = now + CROWDED_SECONDS
            raise self._refused(refusal, counted=not waits)
        return job

    def _check_able(self) -> None:
        if self._refusing:
            self.metrics.rejected.labels("draining").inc()
            raise Draining(retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)
        if self._stall:  # the stall may have ended since the last tick
            self._stall = self.watchdog.stall()
        if down := self.lifecycle.failure or self._stall:
            raise EngineDown(down, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)
        if self.versions.current is None:
            self.metrics.rejected.labels("not_ready").inc()
            raise NotReady(self.lifecycle.reason, retry_after_seconds=RETRY_AFTER_START_SECONDS)

    def _work(self) -> Work:
        """Called at every tick of the loop clock. The first tick comes before the request that started the clock is checked."""
        self._stall = self.watchdog.stall()
        return Work(time.thread_time(), self.queue.answered, self.queue.refused, self.admission.requests)

    def _refused(self, refusal: Refusal, *, counted: bool = True) -> ServiceError:
        return self.queue.error(refusal, counted=counted, may_wait=self.loop_clock.lag.is_short_of_time)

    def _worker(self, model: ServedModel) -> Worker[RankJob]:
        """Return the worker that serves exactly this model. Raises NotReady if it was replaced."""
        current = self.versions.current
        if current is not None and current.model.served is model:
            return current  # nearly always; the look-ups below are rare
        worker = self.versions.find(model) or self.second_checkpoint.versions.find(model)
        if worker is None:
            raise NotReady("The model of this request was replaced.", retry_after_seconds=0.0)
        return worker

    def is_busy(self) -> bool:
        """Whether there is work to do for callers."""
        waiting = self.admission.requests or self.retrieval.queue.admission.requests
        return bool(waiting or self.loop_clock.lag.is_short_of_time or self.lifecycle.draining)

    # ranking

    def shrink(self, ticket: Ticket, candidates: int) -> None:
        """Lower the number of candidates of a ticket. Call it before `rank`."""
        assert isinstance(ticket, RankJob)
        if not ticket.reserved or not 0 < candidates <= ticket.candidates:
            raise ValueError("this ticket was used before, or is for fewer candidates")
        self.admission.shrink(ticket, candidates)

    def rank(self, ticket: Ticket, context: Context | str, candidates: Candidates, done: Done) -> None:
        """As `interface.Service.rank`."""
        assert isinstance(ticket, RankJob)
        if not ticket.reserved or ticket.done is not None:
            raise ValueError("this ticket was used before")
        if isinstance(context, str):
            context = self.contexts.of(ticket.worker, context, ticket.key)
            self.admission.has_context(ticket, 1 + len(context))
        ticket.context, ticket.items = context, candidates
        ticket.done = self.second_checkpoint.watched(ticket, done) if self._has_second else done
        ticket.worker.submit(ticket)

    async def context(self, model: ServedModel, handle: str, key: str | None) -> Context:
        """As `interface.Service.context`."""
        return self.contexts.of(self._worker(model), handle, key)

    async def attention(
        self, model: ServedModel, context: Context, candidates: Candidates, deadline: float
    ) -> NDArray[np.float32]:
        """Return what the candidates attend to, as `interface.Service.attention`."""
        return await self.plain_path.attention(self._worker(model).model, context, candidates, deadline - self.clock())

    def health(self) -> Health:
        """As `interface.Service.health`."""
        feed = self.retrieval.feed
        return self.lifecycle.health(self.watchdog.stall(), self.retrieval.problem, feed.reason if feed else "")

    def has_running_threads(self) -> bool:
        """Whether an engine thread still loads or computes."""
        ours = (ENGINE_THREAD, RETRIEVAL_THREAD, PLAIN_THREAD)
        return any(thread.name.startswith(ours) for thread in threading.enumerate())

    async def corpus(self) -> Changed | None:
        """Return the present state of the corpus, or None without one."""
        return self.retrieval.state()

    async def exposition(self) -> bytes:
        """Every metric of this process."""
        return self.metrics.render()

    def snapshot(self) -> Snapshot:
        """Return the values that a scrape of the metrics reads."""
        current = self.versions.current
        return Snapshot(
            ready=self.health().ready,
            load=self.load.value,
            queue_requests=self.admission.requests,
            queue_candidates=self.admission.candidates,
            cache=self.second_checkpoint.cache_stats(),
            model=None if current is None else current.model.labels(),
            last_forward_timestamp_seconds=self.metrics.last_forward_unix,
            device_memory_bytes=None if current is None else current.model.device_memory_bytes(),
            engine_steps_down=None if current is None else current.model.steps_down(),
            searches_waiting=self.retrieval.versions.waiting,
            corpus=self.retrieval.state(),
            milestone=self.retrieval.milestone,
            feed_lag_seconds=None if self.retrieval.feed is None else self.retrieval.feed.lag_seconds,
        )

    async def _watch(self) -> None:
        self._fatal(await self.watchdog.hang())

    def _fatal(self, reason: str) -> None:
        if self.lifecycle.failure is None:
            self.lifecycle.failure = reason
            self._fail_all(lambda: EngineDown(reason, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS))
            self.retrieval.abandon(lambda: EngineDown(reason, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS))
            self.on_fatal(reason)

    def _fail_all(self, error: Callable[[], ServiceError]) -> None:
        for job in self.versions.abandon() + self.second_checkpoint.versions.abandon():
            job.finish(error())

    # reported by engines

    def warming(self) -> None:
        """A checkpoint was read and its engine warms up. Changes nothing while another engine serves."""
        self.lifecycle.move(State.WARMING)

    def engine_lost(self, reason: str) -> None:
        """An engine is lost for good."""
        self._fatal(reason)

    async def swap(self, load: Loader) -> ServedModel:
        """Load and warm another model beside the one that serves, then serve new requests with it. One swap at a time.

        Requests admitted before finish on the old one, whose memory is then freed. Raises what `load` raises; the old one keeps serving.
        """
        worker = await self.versions.load(load)
        if self.lifecycle.draining:
            worker.close()
            raise Draining(retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)
        self.versions.install(worker)
        return self.model
