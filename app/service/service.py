"""The ranking service without HTTP: admits requests, has them computed, knows its own health. What HTTP sees of it: `interface`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from app.engine.versions import Loader, Versions
from app.engine.worker import ENGINE_THREAD, RankJob
from app.errors import DeadlineExceeded, Draining, EngineDown, NotReady, Overloaded, ServiceError
from app.interface import Health, Ranked, ServedModel, Ticket
from app.scheduling.admission import Admission, AdmissionPolicy, Refusal
from app.scheduling.batching import BatchPolicy, chunk_count
from app.scheduling.job import Clock
from app.scheduling.loop_lag import LoopTurn
from app.service.lifecycle import Lifecycle, State
from app.telemetry.metrics import BatchReport, Metrics, Snapshot
from model.inputs import Candidates, Context, Scores

RETRY_AFTER_START_SECONDS = 2.0  # while loading, nobody knows better
RETRY_AFTER_DOWN_SECONDS = 5.0
RETRY_AFTER_TURN_SECONDS = 1.0  # whole seconds are what the header can say
WATCHDOG_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Policies:
    """What the operator chose. `stall_seconds` without a finished forward is a stall; `exit_seconds` of it end the process."""

    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    batch: BatchPolicy = field(default_factory=BatchPolicy)
    default_deadline_seconds: float = 10.0
    max_deadline_seconds: float = 60.0
    stall_seconds: float = 4.0
    exit_seconds: float = 30.0


class RankingService:
    """One process's service. All methods belong to the event loop; engines live in threads of their own.

    `load(say)` loads and warms the first model in the engine's thread; `say("warming")` marks the step between.
    `on_fatal(reason)` is called once when only a new process can help, after everyone who waited was answered.
    """

    def __init__(
        self,
        load: Loader,
        policies: Policies,
        metrics: Metrics,
        *,
        clock: Clock = time.monotonic,
        on_fatal: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.policies = policies
        self.metrics = metrics
        self.clock = clock
        self.on_fatal = on_fatal
        self.lifecycle = Lifecycle()
        self.versions = Versions(policies.batch, self, clock)
        self.admission = Admission(policies.admission, clock, policies.batch, self.versions.running)
        self.turn = LoopTurn(clock)
        self._load = load
        self._load_error: BaseException | None = None
        self._last_forward_unix = 0.0
        self._refusing = False
        self._settled = asyncio.Event()  # loading ended, well or not
        self._idle = asyncio.Event()  # nothing is admitted and unanswered
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        metrics.watch(self)

    # life

    def start(self) -> None:
        """Begin to load in the background; returns at once. A second time does nothing."""
        if self.lifecycle.state is not State.STARTING:
            return
        self.lifecycle.move(State.LOADING)
        self._spawn(self._first_load())
        self._spawn(self._watchdog())

    async def wait_ready(self) -> None:
        """Return when requests can be served. Raises what made loading fail."""
        await self._settled.wait()
        if self._load_error is not None:
            raise self._load_error

    def begin_drain(self) -> None:
        """Readiness is lost; requests are still served."""
        self.lifecycle.move(State.DRAINING)

    def refuse_new(self) -> None:
        """From now on nothing is admitted."""
        self.begin_drain()
        self._refusing = True

    async def stop(self, timeout_seconds: float = 30.0) -> bool:
        """Finish what was admitted, then free the engines. False when the time was not enough; the rest is answered 503."""
        self.refuse_new()
        until = self.clock() + timeout_seconds
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        finished = not self.admission.requests
        if self.lifecycle.failure is not None:
            until = self.clock() + 1.0  # its thread may hang for good
        self._fail_all(Draining)
        await self.versions.close(max(0.1, until - self.clock()))
        for task in self._tasks:
            task.cancel()
        self.lifecycle.move(State.STOPPED)
        return finished

    # requests

    @property
    def default_deadline_seconds(self) -> float:
        """For a request that names no deadline."""
        return self.policies.default_deadline_seconds

    @property
    def model(self) -> ServedModel:
        """The version that serves new requests. Raises NotReady while nothing is loaded."""
        if self.versions.current is None:
            raise NotReady(self.lifecycle.reason, retry_after_seconds=RETRY_AFTER_START_SECONDS)
        return self.versions.current.model.served

    def check_open(self) -> None:
        """Raise what any request would get now: NotReady, Draining, EngineDown or Overloaded. Reads nothing of the request."""
        self._check_able()
        if self.turn.is_over():
            self._refuse(
                Refusal("queue_full", "requests arrive faster than they can be read", RETRY_AFTER_TURN_SECONDS)
            )
        if (refusal := self.admission.full()) is not None:
            self._refuse(refusal)

    def admit(
        self, model: ServedModel, *, candidates: int, history: int, deadline: float | None, key: str | None = None
    ) -> RankJob:
        """Reserve room for one request on `model`, which is what `service.model` was for it.

        `deadline` is in seconds of `service.clock`; None takes the default. Raises NotReady, Draining, EngineDown,
        Overloaded or DeadlineExceeded.
        """
        self._check_able()
        worker = self.versions.find(model)
        if worker is None:
            raise NotReady("The model of this request was replaced.", retry_after_seconds=0.0)
        now, policies = self.clock(), self.policies
        deadline = now + policies.default_deadline_seconds if deadline is None else deadline
        job = RankJob(
            candidates=candidates,
            context_tokens=1 + min(history, model.manifest.config.history_length),
            chunks=chunk_count(candidates, policies.batch),
            deadline=min(deadline, now + policies.max_deadline_seconds),
            key=key,
            worker=worker,
            on_release=self._release,
            reserved=False,
        )
        refusal = self.admission.refusal(job)
        if refusal is not None:
            self._refuse(refusal)
        self.admission.add(job)
        self._idle.clear()
        worker.unfinished += 1
        job.reserved = True
        return job

    async def rank(self, ticket: Ticket, context: Context, candidates: Candidates) -> Ranked:
        """Scores in the order of the candidates. Cancelling it drops the work unless it is being computed.

        Raises DeadlineExceeded, NonFiniteScores, EngineDown.
        """
        assert isinstance(ticket, RankJob)
        job, loop = ticket, asyncio.get_running_loop()
        if not job.reserved or job.future is not None:
            raise ValueError("this ticket was used before")
        job.context, job.items, job.future = context, candidates, loop.create_future()
        timer = loop.call_later(max(0.0, job.deadline - self.clock()), job.settle, DeadlineExceeded())
        try:
            if job.worker.failure is not None:
                raise EngineDown(job.worker.failure, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)
            job.worker.submit(job)
            scores = Scores.concatenate(await job.future)
        except asyncio.CancelledError:
            self.metrics.cancelled.labels("queue" if job.started is None else "forward").inc()
            raise
        finally:
            timer.cancel()
            job.worker.cancel(job)
            job.release()
        started = job.arrived if job.started is None else job.started
        return Ranked(scores, job.cache, started - job.arrived, job.forward_seconds)

    # health

    def health(self) -> Health:
        """Whether requests may be sent here, and why not."""
        life = self.lifecycle
        reason = life.reason or self._stall()
        return Health(
            ready=not reason,
            started=life.started,
            failed=life.failure is not None or (life.state is State.READY and bool(reason)),
            draining=life.draining,
            reason=reason,
        )

    def has_running_threads(self) -> bool:
        """Whether an engine thread still loads or computes."""
        return any(thread.name == ENGINE_THREAD and thread.is_alive() for thread in threading.enumerate())

    def snapshot(self) -> Snapshot:
        """For a scrape of the metrics."""
        current = self.versions.current
        return Snapshot(
            ready=self.health().ready,
            queue_requests=self.admission.requests,
            queue_candidates=self.admission.candidates,
            cache=self.versions.cache_stats(),
            model=None if current is None else current.model.labels(),
            last_forward_timestamp_seconds=self._last_forward_unix,
            device_memory_bytes=None if current is None else current.model.device_memory_bytes(),
        )

    # swaps

    async def swap(self, load: Loader) -> ServedModel:
        """Load and warm another model beside the one that serves, then serve new requests with it.

        Requests admitted before finish on the old one, whose memory is then freed. Raises what `load` raises; the old
        one serves on. One swap at a time.
        """
        worker = await self.versions.load(load)
        if self.lifecycle.draining:
            worker.close()
            raise Draining
        self.versions.install(worker)
        return worker.model.served

    # inside

    async def _first_load(self) -> None:
        try:
            worker = await self.versions.load(self._load, self._follow)
        except Exception as error:
            self._load_error = error
            self._fatal(f"The checkpoint could not be loaded: {error}")
        else:
            self.versions.install(worker)
            gc.collect()
            gc.freeze()  # once: code and weights are never walked again; a swap adds little, and must not pause the loop
            self.lifecycle.move(State.READY)
        finally:
            self._settled.set()

    def _follow(self, stage: str) -> None:
        if stage == State.WARMING:
            self.lifecycle.move(State.WARMING)

    def _check_able(self) -> None:
        if self._refusing:
            self.metrics.rejected.labels("draining").inc()
            raise Draining(retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)
        if self.lifecycle.failure is not None:
            raise EngineDown(self.lifecycle.failure, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)
        if self.versions.current is None:
            self.metrics.rejected.labels("not_ready").inc()
            raise NotReady(self.lifecycle.reason, retry_after_seconds=RETRY_AFTER_START_SECONDS)
        if stall := self._stall():
            raise EngineDown(stall, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)

    def _refuse(self, refusal: Refusal) -> None:
        self.metrics.rejected.labels(refusal.reason).inc()
        kind: type[ServiceError] = Overloaded if refusal.reason == "queue_full" else DeadlineExceeded
        raise kind(f"Refused on arrival: {refusal.detail}.", retry_after_seconds=refusal.retry_after_seconds)

    def _release(self, job: RankJob) -> None:
        self.admission.remove(job)
        if not self.admission.requests:
            self._idle.set()
        job.worker.unfinished -= 1
        self.versions.free_if_done(job.worker)

    def _stall(self) -> str:
        """A sentence when work waits and no forward finishes, else nothing."""
        silent = self.versions.silent_seconds()
        if silent <= self.policies.stall_seconds:
            return ""
        return f"The engine has work and has finished no forward for {silent:.1f} s."

    async def _watchdog(self) -> None:
        while True:
            await asyncio.sleep(WATCHDOG_SECONDS)
            silent = self.versions.silent_seconds()
            if silent > self.policies.exit_seconds:
                self._fatal(f"The engine has finished no forward for {silent:.0f} s.")
            if self.versions.has_dead_thread():
                self._fatal("The engine thread is gone.")

    def batch_done(self, report: BatchReport) -> None:
        """A forward finished."""
        self._last_forward_unix = time.time()
        if not report.failed:
            self.admission.forward_time.observe(report.cost, report.forward_seconds)
        self.metrics.record_batch(report)

    def engine_lost(self, reason: str) -> None:
        """An engine broke for good."""
        self._fatal(reason)

    def _fatal(self, reason: str) -> None:
        if self.lifecycle.failure is None:
            self.lifecycle.failure = reason
            self._fail_all(lambda: EngineDown(reason, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS))
            self.on_fatal(reason)

    def _fail_all(self, error: Callable[[], ServiceError]) -> None:
        for job in self.versions.abandon():
            job.settle(error())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
