"""The engine thread of one loaded model: builds it, warms it up, runs what the batcher chose. Not for who may join the queue."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from app.engine.loading import LoadedModel, Loader
from app.errors import DeadlineExceeded, EngineDown, NonFiniteScores, ServiceError
from app.scheduling.batching import Batcher, Chunk
from app.scheduling.forecast import Running
from app.scheduling.job import Clock, Job
from app.settings import Batching
from app.telemetry.metrics import BatchReport
from model.engine import CacheResult, Engine, EngineError, Item, Outcome
from model.inputs import Candidates, Context, Scores

ENGINE_THREAD = "engine"


@dataclass(slots=True, eq=False, kw_only=True)
class RankJob(Job):
    """One request on one worker: first a ticket for a place that is `reserved`, from `submit` on the work itself.

    `on_release` is called once, when the place becomes free; a job that is dropped releases itself. `future` belongs to the event
    loop alone; from `submit` to its end the engine thread writes what it has computed.
    """

    worker: EngineWorker
    on_release: Callable[[RankJob], None]
    reserved: bool = False
    context: Context | None = None
    items: Candidates | None = None
    future: asyncio.Future[list[Scores]] | None = None
    scores: list[Scores] = field(default_factory=list)
    state: Any = None
    cache: CacheResult = "miss"
    abandoned: bool = False
    started: float | None = None
    forward_seconds: float = 0.0
    task: Any = None

    def release(self) -> None:
        """Free the place; a second time does nothing."""
        if self.task is not None:
            self.task.cancel()
        if self.reserved:
            self.reserved = False
            self.on_release(self)

    def __del__(self) -> None:
        self.release()

    def item(self, start: int, stop: int) -> Item:
        """Candidates `start … stop - 1` as the engine takes them."""
        assert self.context is not None
        assert self.items is not None
        whole = stop - start == len(self.items)
        return Item(self.context, self.items if whole else self.items.chunk(start, stop), self.state)

    def settle(self, error: ServiceError | None) -> None:
        """Answer the caller, unless that has happened: with the scores, or with this error."""
        if self.future is None or self.future.done():
            return
        if error is None:
            self.future.set_result(self.scores)
        else:
            self.future.set_exception(error)


class Events(Protocol):
    """What a worker tells the event loop; each is called there, never in the engine thread."""

    def warming(self) -> None:
        """The checkpoint is read, and the engine warms up."""
        ...

    def batch_done(self, report: BatchReport) -> None:
        """A forward finished."""
        ...

    def engine_lost(self, reason: str) -> None:
        """The engine cannot work any more, and only a new process can help."""
        ...


Result = tuple[RankJob, ServiceError | None]


class EngineWorker:
    """One engine, one thread, one queue. All methods but `_main` and what it calls belong to the event loop."""

    def __init__(
        self, load: Loader, batching: Batching, events: Events, clock: Clock, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.clock = clock
        self.unfinished = 0  # jobs that hold a place here
        self.retired = False  # another version serves new requests
        self.failure: str | None = None
        self.ready: asyncio.Future[LoadedModel] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._load = load
        self._events = events
        self._loop = loop
        self._thread = threading.Thread(target=self._main, name=ENGINE_THREAD, daemon=True)
        self._wake = threading.Condition()  # guards what follows
        self.batcher: Batcher[RankJob] = Batcher(batching)
        self._running: list[Chunk[RankJob]] = []
        self._running_since: float | None = None
        self._busy_since = 0.0  # clock seconds when work came to an engine without any
        self._last_forward = 0.0  # clock seconds when one last finished
        self._closing = False

    @property
    def model(self) -> LoadedModel:
        """What was loaded; only after `ready`."""
        return self.ready.result()

    def start(self) -> None:
        """Begin to load; `ready` is done when the engine is warm, or holds the error."""
        self._thread.start()

    def submit(self, job: RankJob) -> None:
        """Queue a job that has its context and items; its future gets the scores of its chunks, in order."""
        with self._wake:
            now = self.clock()
            if not self._has_work():
                self._busy_since = now
            self.batcher.add(job, now)
            self._wake.notify()

    def cancel(self, job: RankJob) -> None:
        """The caller has its answer or has gone: the job is not computed unless it is in the forward that runs."""
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

    def running(self) -> Running:
        """What is being computed right now."""
        with self._wake:
            since, chunks = self._running_since, self._running
        if since is None:
            return Running()
        candidates = sum(chunk.stop - chunk.start for chunk in chunks)
        return Running(len(chunks), candidates, sum(chunk.context_tokens for chunk in chunks), self.clock() - since)

    def silent_seconds(self) -> float:
        """How long work has been waiting while no forward finished; 0 while there is no work."""
        with self._wake:
            return self.clock() - max(self._busy_since, self._last_forward) if self._has_work() else 0.0

    def _has_work(self) -> bool:
        return self._running_since is not None or bool(len(self.batcher))

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends, and nothing waits for this
            self._loop.call_soon_threadsafe(call, *arguments)

    # in the engine thread

    def _main(self) -> None:
        try:
            model = self._load(lambda: self._post(self._events.warming))
        except BaseException as error:  # it belongs to the one who waits for `ready`
            self._post(self.ready.set_exception, error)
        else:
            self._post(self.ready.set_result, model)
            self._serve(model.engine)
        self._post(self.closed.set_result, None)

    def _serve(self, engine: Engine) -> None:
        try:
            while self.failure is None and (batch := self._next_batch()) is not None:
                self._run(engine, *batch)
        except BaseException as error:  # a bug of ours: say so, the process restarts
            self.failure = f"the engine thread died: {type(error).__name__}: {error}"
        if self.failure is not None:
            self._post(self._events.engine_lost, self.failure)
        engine.close()

    def _next_batch(self) -> tuple[list[Chunk[RankJob]], list[RankJob]] | None:
        """Wait for work, and let the batch of a busy engine grow for the window; None when the worker is closed."""
        idle = False  # whether the engine has waited for work
        with self._wake:
            while not self._closing:
                now = self.clock()
                grow_seconds = 0.0 if idle else self.batcher.window_end() - now
                if not len(self.batcher):
                    idle = True
                    self._wake.wait()
                elif grow_seconds > 0:
                    self._wake.wait(grow_seconds)
                else:
                    chunks, expired = self.batcher.take(now)
                    self._running, self._running_since = chunks, now if chunks else None
                    return chunks, expired
        return None

    def _run(self, engine: Engine, chunks: list[Chunk[RankJob]], expired: list[RankJob]) -> None:
        """One forward: compute, put back what has chunks left, tell the event loop."""
        results: list[Result] = [(job, DeadlineExceeded()) for job in expired]
        if not chunks:
            self._post(self._deliver, results, None)
            return
        began = self.clock()
        items = [chunk.job.item(chunk.start, chunk.stop) for chunk in chunks]
        first = [chunk.job for chunk in chunks if chunk.job.started is None]
        for job in first:
            job.started = began
        collated = self.clock()
        answers = self._outcomes(engine, items)
        finished = self.clock()
        for chunk, answer in zip(chunks, answers, strict=True):
            chunk.job.forward_seconds += finished - collated
            results += self._keep(chunk, answer)
        with self._wake:
            self._running, self._running_since, self._last_forward = [], None, finished
        report = BatchReport(
            [chunk.stop - chunk.start for chunk in chunks],
            sum(chunk.cost for chunk in chunks),
            [began - job.arrived for job in first],
            collated - began,
            finished - collated,
            any(isinstance(answer, ServiceError) for answer in answers),
        )
        self._post(self._deliver, results, report)

    def _outcomes(self, engine: Engine, items: list[Item]) -> Sequence[Outcome | ServiceError]:
        """An answer for each item. A batch that raises is split once, so that only the item that is to blame fails."""
        if self.failure is not None:
            return [EngineDown("The engine failed; the process restarts.", retry_after_seconds=5.0) for _ in items]
        try:
            outcomes = engine.forward(items)
            if [len(outcome.scores) for outcome in outcomes] != [len(item.candidates) for item in items]:
                raise EngineError("the engine answered for another number of candidates than it was asked")
            return outcomes
        except Exception as error:  # the tensors that it holds are freed before the items are tried one by one
            structlog.get_logger("app").error("a forward failed", items=len(items), exc_info=error)
            if isinstance(error, EngineError) and error.sticky:
                self.failure = f"the engine is lost: {error}"
                return self._outcomes(engine, items)
        if len(items) == 1:
            return [EngineDown("The engine failed on this request.", retry_after_seconds=1.0)]
        return [answer for item in items for answer in self._outcomes(engine, [item])]

    def _keep(self, chunk: Chunk[RankJob], answer: Outcome | ServiceError) -> list[Result]:
        """Give the job its scores; the result of a job that ends with this chunk, and otherwise none."""
        job = chunk.job
        if isinstance(answer, ServiceError):
            return [(job, answer)]
        if not answer.scores.is_finite():
            return [(job, NonFiniteScores())]
        job.scores.append(answer.scores)
        job.cache = answer.cache if chunk.start == 0 else job.cache
        job.state, job.served = answer.state, chunk.stop
        if job.served == job.candidates:
            return [(job, None)]
        with self._wake:
            if not job.abandoned:
                self.batcher.put_back(job)
        return []

    # back in the event loop

    def _deliver(self, results: list[Result], report: BatchReport | None) -> None:
        for job, error in results:
            job.state = None  # a reference to the context's keys and values would outlive the request
            job.settle(error)
        if report is not None:
            self._events.batch_done(report)
