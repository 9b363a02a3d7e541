"""The ranking service without HTTP: admits requests, has them computed, knows its own health. Not for JSON or sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from app.admission import Admission, AdmissionPolicy, Clock, Refusal, Work
from app.batching import BatchPolicy, part_count
from app.errors import DeadlineExceeded, Draining, EngineDown, NotReady, Overloaded, ServiceError
from app.fleet import Fleet, LoadedModel, Loader, SwapInProgress
from app.lifecycle import Lifecycle, State
from app.metrics import BatchReport, Metrics, Snapshot
from app.tickets import Ranked, Ticket
from app.turn import LoopTurn
from app.worker import EngineWorker, RankJob
from model.inputs import Candidates, Context, Scores

__all__ = ["Health", "LoadedModel", "Policies", "Ranked", "RankingService", "SwapInProgress", "Ticket"]

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


@dataclass(frozen=True, slots=True)
class Health:
    """What `/readyz` says. `reason` is a sentence, empty when ready."""

    ready: bool
    state: str
    reason: str


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
        self.fleet = Fleet(policies.batch, self, clock)
        self.admission = Admission(policies.admission, clock, policies.batch, self.fleet.running)
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
        """Begin to load in the background; returns at once."""
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
        await self.fleet.close(max(0.1, until - self.clock()))
        for task in self._tasks:
            task.cancel()
        self.lifecycle.move(State.STOPPED)
        return finished

    # requests

    @property
    def model(self) -> LoadedModel:
        """The model that serves new requests. Raises NotReady while nothing is loaded."""
        if self.fleet.current is None:
            raise NotReady(self.lifecycle.reason, retry_after_seconds=RETRY_AFTER_START_SECONDS)
        return self.fleet.current.model

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
        self,
        model: LoadedModel,
        *,
        candidates: int,
        history: int,
        deadline: float | None,
        key: str | None = None,
    ) -> Ticket:
        """Reserve room for one request on `model`, which is what `service.model` was for it.

        `deadline` is in seconds of `service.clock`; None takes the default. Raises NotReady, Draining, EngineDown,
        Overloaded or DeadlineExceeded.
        """
        self._check_able()
        serving = self.fleet.find(model)
        if serving is None:
            raise NotReady("The model of this request was replaced.", retry_after_seconds=0.0)
        now, policies = self.clock(), self.policies
        deadline = now + policies.default_deadline_seconds if deadline is None else deadline
        deadline = min(deadline, now + policies.max_deadline_seconds)
        window = model.engine.config.history_length
        work = Work(candidates, 1 + min(history, window), part_count(candidates, policies.batch))
        refusal = self.admission.refusal(work, deadline=deadline, key=key)
        if refusal is not None:
            self._refuse(refusal)
        self.admission.add(work, key)
        self._idle.clear()
        serving.unfinished += 1
        return Ticket(self._release, serving, work, key, deadline)

    async def rank(self, ticket: Ticket, context: Context, candidates: Candidates) -> Ranked:
        """Scores in the order of the candidates. Cancelling it drops the work unless it is being computed.

        Raises DeadlineExceeded, NonFiniteScores, EngineDown.
        """
        if not ticket.open:
            raise ValueError("this ticket was used before")
        loop = asyncio.get_running_loop()
        job = RankJob(
            candidates=len(candidates),
            context_tokens=ticket.work.context_tokens,
            deadline=ticket.deadline,
            key=ticket.key,
            context=context,
            items=candidates,
            future=loop.create_future(),
        )
        worker = ticket.serving.worker
        timer = loop.call_later(max(0.0, ticket.deadline - self.clock()), _expire, job)
        try:
            if worker.failure is not None:
                raise EngineDown(worker.failure, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)
            worker.submit(job)
            scores = Scores.concatenate(await job.future)
        except asyncio.CancelledError:
            self.metrics.cancelled.labels("queue" if job.started is None else "forward").inc()
            raise
        finally:
            timer.cancel()
            worker.cancel(job)
            ticket.release()
        started = job.arrived if job.started is None else job.started
        return Ranked(scores, job.cache, started - job.arrived, job.forward_seconds)

    # health

    def health(self) -> Health:
        """Whether requests may be sent here, and why not."""
        state, reason = self.lifecycle.state, self.lifecycle.reason
        if state is State.READY and not reason:
            reason = self._stall()
        return Health(not reason, str(state), reason)

    def snapshot(self) -> Snapshot:
        """For a scrape of the metrics."""
        current = self.fleet.current
        return Snapshot(
            ready=self.health().ready,
            queue_requests=self.admission.requests,
            queue_candidates=self.admission.candidates,
            cache=self.fleet.cache_stats(),
            model=None if current is None else current.model.labels(),
            last_forward_timestamp_seconds=self._last_forward_unix,
            device_memory_bytes=None if current is None else current.model.device_memory_bytes(),
        )

    # swaps

    async def swap(self, load: Loader) -> LoadedModel:
        """Load and warm another model beside the one that serves, then serve new requests with it.

        Requests admitted before finish on the old one, whose memory is then freed. Raises what `load` raises; the old
        one serves on. One swap at a time.
        """
        serving = await self.fleet.load(load)
        if self.lifecycle.draining:
            serving.worker.close()
            raise Draining
        self.fleet.install(serving)
        return serving.model

    # inside

    async def _first_load(self) -> None:
        try:
            serving = await self.fleet.load(self._load, self._follow)
        except Exception as error:
            self._load_error = error
            self._fatal(f"The checkpoint could not be loaded: {error}")
        else:
            self.fleet.install(serving)
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
        if self.fleet.current is None:
            self.metrics.rejected.labels("not_ready").inc()
            raise NotReady(self.lifecycle.reason, retry_after_seconds=RETRY_AFTER_START_SECONDS)
        if stall := self._stall():
            raise EngineDown(stall, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS)

    def _refuse(self, refusal: Refusal) -> None:
        self.metrics.rejected.labels(refusal.reason).inc()
        kind: type[ServiceError] = Overloaded if refusal.reason == "queue_full" else DeadlineExceeded
        raise kind(f"Refused on arrival: {refusal.detail}.", retry_after_seconds=refusal.retry_after_seconds)

    def _release(self, ticket: Ticket) -> None:
        self.admission.remove(ticket.work, ticket.key)
        if not self.admission.requests:
            self._idle.set()
        ticket.serving.unfinished -= 1
        self.fleet.free_if_done(ticket.serving)

    def _stall(self) -> str:
        """A sentence when work waits and no forward finishes, else nothing."""
        silent = self.fleet.silent_seconds()
        if silent <= self.policies.stall_seconds:
            return ""
        return f"The engine has work and has finished no forward for {silent:.1f} s."

    async def _watchdog(self) -> None:
        while True:
            await asyncio.sleep(WATCHDOG_SECONDS)
            silent = self.fleet.silent_seconds()
            if silent > self.policies.exit_seconds:
                self._fatal(f"The engine has finished no forward for {silent:.0f} s.")
            if self.fleet.has_dead_thread():
                self._fatal("The engine thread is gone.")

    def batch_done(self, worker: EngineWorker, report: BatchReport) -> None:
        """A forward finished."""
        self._last_forward_unix = time.time()
        if not report.failed:
            self.admission.forward_time.observe(report.cost, report.forward_seconds)
        self.metrics.record_batch(report)

    def worker_lost(self, worker: EngineWorker, reason: str) -> None:
        """An engine broke for good."""
        worker.failure = reason
        self._fatal(reason)

    def _fatal(self, reason: str) -> None:
        if self.lifecycle.failure is None:
            self.lifecycle.failure = reason
            self._fail_all(lambda: EngineDown(reason, retry_after_seconds=RETRY_AFTER_DOWN_SECONDS))
            self.on_fatal(reason)

    def _fail_all(self, error: Callable[[], ServiceError]) -> None:
        for job in self.fleet.abandon():
            if not job.future.done():
                job.future.set_exception(error())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _expire(job: RankJob) -> None:
    if not job.future.done():
        job.future.set_exception(DeadlineExceeded())
