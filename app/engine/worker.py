"""The engine thread of one loaded model: builds it, warms it up, runs what the batcher chose. Not for who may join the queue."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import structlog

from app.errors import DeadlineExceeded, EngineDown, NonFiniteScores, ServiceError
from app.scheduling.batching import Batcher, BatchPolicy, Chunk
from app.scheduling.forecast import Load
from app.scheduling.job import Clock, Job
from app.telemetry.metrics import BatchReport
from model.engine import CacheResult, Engine, EngineError, Item, Outcome
from model.inputs import Candidates, Context, Scores

ENGINE_THREAD = "engine"


@dataclass(slots=True, eq=False, kw_only=True)
class RankJob(Job):
    """One admitted request: first a reserved place on one worker, from `submit` on its work. Only the event loop touches `future`.

    `on_release` is called once, when the place becomes free; a job that is dropped releases itself.
    """

    worker: EngineWorker[Any]
    on_release: Callable[[RankJob], None]
    reserved: bool = True
    context: Context | None = None
    items: Candidates | None = None
    future: asyncio.Future[list[Scores]] | None = None
    scores: list[Scores] = field(default_factory=list)
    state: Any = None
    cache: CacheResult = "miss"
    abandoned: bool = False
    started: float | None = None
    forward_seconds: float = 0.0

    def release(self) -> None:
        """Free the place; a second time does nothing."""
        if self.reserved:
            self.reserved = False
            self.on_release(self)

    def __del__(self) -> None:
        self.release()

    def item(self, start: int, stop: int) -> Item:
        """Candidates `start … stop - 1` as the engine takes them."""
        assert self.context is not None
        assert self.items is not None
        return Item(self.context, self.items.chunk(start, stop), self.state)

    def settle(self, error: ServiceError | None) -> None:
        """Answer whoever waits: with the scores, or with this error."""
        if self.future is None or self.future.done():
            return
        if error is None:
            self.future.set_result(self.scores)
        else:
            self.future.set_exception(error)


class Warm(Protocol):
    """What loading gives to a worker."""

    @property
    def engine(self) -> Engine: ...


ModelT = TypeVar("ModelT", bound=Warm)


class Events(Protocol):
    """What a worker tells the event loop; each is called there, never in the engine thread."""

    def batch_done(self, report: BatchReport) -> None: ...

    def engine_lost(self, reason: str) -> None:
        """The engine cannot work any more, and only a new process can help."""
        ...


Result = tuple[RankJob, ServiceError | None]


class EngineWorker(Generic[ModelT]):
    """One engine, one thread, one queue. All methods but `_run` and what it calls belong to the event loop."""

    def __init__(
        self,
        build: Callable[[Callable[[str], None]], ModelT],
        policy: BatchPolicy,
        events: Events,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`build(say)` runs in the thread, returns what has an `engine`, and reports `say("warming")` between its steps."""
        self.clock = clock
        self.batcher: Batcher[RankJob] = Batcher(policy)
        self.unfinished = 0  # jobs that hold a place here
        self.retired = False  # another version serves new requests
        self.ready: asyncio.Future[ModelT] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.last_forward: float | None = None  # clock seconds when a forward last finished
        self.running_since: float | None = None
        self._running: list[Chunk[RankJob]] = []
        self._busy_since = 0.0  # clock seconds when work came to an engine without any
        self.failure: str | None = None
        self._build = build
        self._events = events
        self._loop = loop
        self._wake = threading.Condition()
        self._closing = False
        self.stage = "loading"
        self._thread = threading.Thread(target=self._main, name=ENGINE_THREAD, daemon=True)

    @property
    def model(self) -> ModelT:
        """What was loaded; only after `ready`."""
        return self.ready.result()

    def start(self) -> None:
        """Begin to load; `ready` is done when the engine is warm, or holds the error."""
        self._thread.start()

    def submit(self, job: RankJob) -> None:
        """Queue a job that has its context and items; its future gets the scores of its chunks, in order."""
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
            return [chunk.job for chunk in self._running] + self.batcher.clear()

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
            since, chunks = self.running_since, self._running
        if since is None:
            return Load()
        candidates = sum(chunk.stop - chunk.start for chunk in chunks)
        return Load(len(chunks), candidates, sum(chunk.context_tokens for chunk in chunks), self.clock() - since)

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
        engine = model.engine
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
            chunks, expired = batch
            results: list[Result] = [(job, DeadlineExceeded()) for job in expired]
            report = self._forward(engine, chunks, results) if chunks else None
            self._post(self._deliver, results, report)
            if self.failure is not None:
                self._lost(self.failure)
                return

    def _next_batch(self) -> tuple[list[Chunk[RankJob]], list[RankJob]] | None:
        """Wait for work; None when the worker is closed."""
        idle = False
        with self._wake:
            while not self._closing:
                now = self.clock()
                take = self.batcher.take(now, idle=idle)
                if take.chunks:
                    self.running_since, self._running = now, take.chunks
                if take.chunks or take.expired:
                    return take.chunks, take.expired
                idle = idle or take.look_again is None
                self._wake.wait(None if take.look_again is None else max(0.0, take.look_again - now))
        return None

    def _forward(self, engine: Engine, chunks: list[Chunk[RankJob]], results: list[Result]) -> BatchReport:
        """Run one batch; adds what is finished or failed to `results` and queues the rest of long jobs again."""
        began = self.clock()
        items = [chunk.job.item(chunk.start, chunk.stop) for chunk in chunks]
        first = [chunk.job for chunk in chunks if chunk.job.started is None]
        for job in first:
            job.started = began
        collated = self.clock()
        answers = self._guarded(engine, items)
        failed = any(isinstance(answer, ServiceError) for answer in answers)
        finished = self.clock()
        for chunk, answer in zip(chunks, answers, strict=True):
            self._account(chunk, answer, finished - collated, results)
        with self._wake:
            self.running_since, self.last_forward, self._running = None, finished, []
        return BatchReport(
            [chunk.stop - chunk.start for chunk in chunks],
            sum(chunk.cost for chunk in chunks),
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
        self, chunk: Chunk[RankJob], answer: Outcome | ServiceError, seconds: float, results: list[Result]
    ) -> None:
        job = chunk.job
        job.forward_seconds += seconds
        if isinstance(answer, ServiceError):
            results.append((job, answer))
        elif not answer.scores.is_finite():
            results.append((job, NonFiniteScores()))
        else:
            job.scores.append(answer.scores)
            job.cache = answer.cache if chunk.start == 0 else job.cache
            job.state, job.served = answer.state, chunk.stop
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
            job.settle(error)
        if report is not None:
            self._events.batch_done(report)

    def _lost(self, reason: str) -> None:
        self.failure = reason
        self._post(self._events.engine_lost, reason)

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
