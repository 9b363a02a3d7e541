"""The engine thread of one loaded model: builds it, warms it up, runs what the batcher chose. Not for who may join the queue."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from app.admission import Clock
from app.batching import Batcher, BatchPolicy, Job, Part
from app.errors import DeadlineExceeded, EngineDown, NonFiniteScores, ServiceError
from app.forecast import Load
from app.metrics import BatchReport
from model.engine import CacheResult, Engine, EngineError, Item, Outcome
from model.inputs import Candidates, Context, Scores

ENGINE_THREAD = "engine"


@dataclass(slots=True, eq=False, kw_only=True)
class RankJob(Job):
    """A request on its way through the engine thread; only the event loop touches `future`."""

    context: Context
    items: Candidates
    future: asyncio.Future[list[Scores]]
    scores: list[Scores] = field(default_factory=list)
    state: Any = None
    cache: CacheResult = "miss"
    abandoned: bool = False
    started: float | None = None
    forward_seconds: float = 0.0


class Events(Protocol):
    """What a worker tells the event loop; each is called there, never in the engine thread."""

    def batch_done(self, worker: EngineWorker, report: BatchReport) -> None: ...

    def worker_lost(self, worker: EngineWorker, reason: str) -> None:
        """The engine cannot work any more, and only a new process can help."""
        ...


Result = tuple[RankJob, ServiceError | None]


class EngineWorker:
    """One engine, one thread, one queue. All methods but `_run` and what it calls belong to the event loop."""

    def __init__(
        self,
        build: Callable[[Callable[[str], None]], Any],
        policy: BatchPolicy,
        events: Events,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`build(say)` runs in the thread, returns what has an `engine`, and reports `say("warming")` between its steps."""
        self.clock = clock
        self.batcher: Batcher[RankJob] = Batcher(policy)
        self.ready: asyncio.Future[Any] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.last_forward: float | None = None  # clock seconds when a forward last finished
        self.running_since: float | None = None
        self._running: list[Part[RankJob]] = []
        self._busy_since = 0.0  # clock seconds when work came to an engine without any
        self.failure: str | None = None
        self._build = build
        self._events = events
        self._loop = loop
        self._wake = threading.Condition()
        self._closing = False
        self.stage = "loading"
        self._thread = threading.Thread(target=self._main, name=ENGINE_THREAD, daemon=True)

    def start(self) -> None:
        """Begin to load; `ready` is done when the engine is warm, or holds the error."""
        self._thread.start()

    def submit(self, job: RankJob) -> None:
        """Queue a job; its future gets the scores of its parts, in order."""
        with self._wake:
            now = self.clock()
            if self.running_since is None and not len(self.batcher):
                self._busy_since = now
            self.batcher.add(job, now)
            self._wake.notify()

    def cancel(self, job: RankJob) -> None:
        """Nobody waits for this job any more: it is not computed unless it is in the forward that runs."""
        with self._wake:
            job.abandoned = True
            self.batcher.remove(job)

    def abandon(self) -> list[RankJob]:
        """Every job that waits or is being computed; those that wait leave the queue."""
        with self._wake:
            return [part.job for part in self._running] + self.batcher.clear()

    def close(self) -> None:
        """End the thread after its present forward and free the engine; `closed` is done then."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def running(self) -> Load:
        """What is being computed right now."""
        with self._wake:
            since, parts = self.running_since, self._running
        if since is None:
            return Load()
        candidates = sum(part.stop - part.start for part in parts)
        return Load(len(parts), candidates, sum(part.context_tokens for part in parts), self.clock() - since)

    def silent_seconds(self) -> float:
        """How long work has been waiting while no forward finished; 0 while there is no work."""
        with self._wake:
            if self.running_since is None and not len(self.batcher):
                return 0.0
            return self.clock() - max(self._busy_since, self.last_forward or 0.0)

    def _main(self) -> None:
        try:
            model = self._build(self._say)
        except BaseException as error:  # whatever it is belongs to the one who waits
            self._post(_settle, self.ready, None, error)
            self._post(_settle, self.closed, None, None)
            return
        self._say("serving")
        self._post(_settle, self.ready, model, None)
        engine: Engine = model.engine
        del model
        try:
            self._run(engine)
        except BaseException as error:  # a bug of ours: say so, the process restarts
            self._lost(f"the engine thread died: {type(error).__name__}: {error}")
        finally:
            engine.close()
            self._post(_settle, self.closed, None, None)

    def _say(self, stage: str) -> None:
        self.stage = stage

    def _run(self, engine: Engine) -> None:
        while (batch := self._next_batch()) is not None:
            parts, expired = batch
            results: list[Result] = [(job, DeadlineExceeded()) for job in expired]
            report = self._forward(engine, parts, results) if parts else None
            self._post(self._deliver, results, report)
            if self.failure is not None:
                self._lost(self.failure)
                return

    def _next_batch(self) -> tuple[list[Part[RankJob]], list[RankJob]] | None:
        """Wait for work; None when the worker is closed."""
        idle = False
        with self._wake:
            while not self._closing:
                now = self.clock()
                take = self.batcher.take(now, idle=idle)
                if take.parts:
                    self.running_since, self._running = now, take.parts
                if take.parts or take.expired:
                    return take.parts, take.expired
                idle = idle or take.look_again is None
                self._wake.wait(None if take.look_again is None else max(0.0, take.look_again - now))
        return None

    def _forward(self, engine: Engine, parts: list[Part[RankJob]], results: list[Result]) -> BatchReport:
        """Run one batch; adds what is finished or failed to `results` and queues the rest of long jobs again."""
        began = self.clock()
        items = [Item(part.job.context, part.job.items.part(part.start, part.stop), part.job.state) for part in parts]
        first = [part.job for part in parts if part.job.started is None]
        for job in first:
            job.started = began
        collated = self.clock()
        answers = self._guarded(engine, items)
        failed = any(isinstance(answer, ServiceError) for answer in answers)
        finished = self.clock()
        for part, answer in zip(parts, answers, strict=True):
            self._account(part, answer, finished - collated, results)
        with self._wake:
            self.running_since, self.last_forward, self._running = None, finished, []
        return BatchReport(
            [part.stop - part.start for part in parts],
            sum(part.cost for part in parts),
            [began - job.arrived for job in first],
            collated - began,
            finished - collated,
            failed,
        )

    def _guarded(self, engine: Engine, items: list[Item]) -> list[Outcome | ServiceError]:
        """Outcomes; where the batch raises, each item alone once, so that the innocent get their scores."""
        try:
            return list(self._checked(engine, items))
        except EngineError as error:
            if error.sticky:
                self.failure = f"the engine is lost: {error}"
                return [_lost_engine() for _ in items]
        except Exception as error:  # told apart below, one by one; the tensors it holds are gone by then
            _log_failure("a forward failed; its items are tried one by one", error, len(items))
        return [self._alone(engine, item) for item in items]

    def _alone(self, engine: Engine, item: Item) -> Outcome | ServiceError:
        if self.failure is None:
            try:
                return self._checked(engine, [item])[0]
            except EngineError as error:
                if error.sticky:
                    self.failure = f"the engine is lost: {error}"
            except Exception as error:
                _log_failure("a forward failed on one request", error, 1)
                return EngineDown("The engine failed on this request.", retry_after_seconds=1.0)
        return _lost_engine()

    def _checked(self, engine: Engine, items: list[Item]) -> list[Outcome]:
        outcomes = engine.forward(items)
        if [len(outcome.scores) for outcome in outcomes] != [len(item.candidates) for item in items]:
            raise EngineError("the engine answered for another number of candidates than it was asked")
        return outcomes

    def _account(
        self, part: Part[RankJob], answer: Outcome | ServiceError, seconds: float, results: list[Result]
    ) -> None:
        job = part.job
        job.forward_seconds += seconds
        if isinstance(answer, ServiceError):
            results.append((job, answer))
        elif not answer.scores.is_finite():
            results.append((job, NonFiniteScores()))
        else:
            job.scores.append(answer.scores)
            job.cache = answer.cache if part.start == 0 else job.cache
            job.state, job.served = answer.state, part.stop
            if job.served == job.candidates:
                results.append((job, None))
            else:
                with self._wake:
                    if not job.abandoned:
                        self.batcher.put_back(job)

    def _deliver(self, results: list[Result], report: BatchReport | None) -> None:
        """In the event loop, once a batch: answer whoever still waits."""
        for job, error in results:
            job.state = None  # a reference to the context's keys and values would outlive the request
            if job.future.done():
                continue
            if error is None:
                job.future.set_result(job.scores)
            else:
                job.future.set_exception(error)
        if report is not None:
            self._events.batch_done(self, report)

    def _lost(self, reason: str) -> None:
        self.failure = reason
        self._post(self._events.worker_lost, self, reason)

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends, nobody waits
            self._loop.call_soon_threadsafe(call, *arguments)


def _log_failure(event: str, error: Exception, items: int) -> None:
    structlog.get_logger("app").error(event, items=items, exc_info=error)


def _lost_engine() -> EngineDown:
    return EngineDown("The engine failed; the process restarts.", retry_after_seconds=5.0)


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
