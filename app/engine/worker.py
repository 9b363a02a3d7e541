"""One engine and its queue: picks the jobs of each forward and gives them their results."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import structlog

from app.engine.batching import Batcher, Chunk
from app.engine.forecast import Running
from app.engine.job import QueuedJob
from app.engine.runners import EARLY_CANDIDATES, Result, Runner
from app.errors import DeadlineExceeded, EngineDown, ServiceError
from app.loop_lag import Clock
from app.settings import Batching
from app.telemetry.metrics import BatchReport
from model.engine import EngineError

RETRY_AFTER_SECONDS = 5.0
LOOK_SECONDS = 0.001  # the least time between two checks of all deadlines

J = TypeVar("J", bound=QueuedJob)
T = TypeVar("T")
Ended = tuple[J, ServiceError | None]

log = structlog.get_logger("app")


class Events(Protocol):
    """What a worker reports to the service."""

    def warming(self) -> None:
        """The checkpoint was read, and the engine warms up."""
        ...

    def batch_done(self, report: BatchReport) -> None:
        """A forward finished."""
        ...

    def engine_lost(self, reason: str) -> None:
        """The engine is lost for good; only a new process can help."""
        ...


class Worker(Generic[J]):
    """Queues jobs for one engine. Used by the event loop only; forwards run elsewhere, one at a time."""

    def __init__(self, model: Any, runner: Runner, batching: Batching, events: Events, clock: Clock) -> None:
        """`model` is the loaded model, which has `served` and `engine`."""
        self.model = model
        self.clock = clock
        self.unfinished = 0  # calls of `hold` that `leave` has not undone
        self.on_unused: Callable[[Worker[J]], None] | None = None  # set once another version serves
        self.failure: str | None = None
        self.closed = runner.closed
        self.batcher: Batcher[J] = Batcher(batching)
        self._runner = runner
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._alone: deque[Chunk[J]] = deque()  # chunks of a failed batch; each is tried by itself
        self._calls: deque[tuple[Callable[[], object], asyncio.Future[Any]]] = deque()  # to be made between forwards
        self._call: asyncio.Future[Any] | None = None  # the one being made
        self._running: list[Chunk[J]] = []
        self._running_since = self._collated = 0.0
        self._candidates = self._tokens = 0  # of the forward that runs
        self._queue_seconds: list[float] = []  # of the jobs whose first forward runs
        self._busy_since = 0.0  # clock seconds when the idle engine got work
        self._last_forward = 0.0  # clock seconds when a forward or call last finished
        self._next: asyncio.Handle | None = None  # will begin a forward
        self._look: asyncio.TimerHandle | None = None  # checks the deadlines of all jobs
        self._look_at = math.inf  # clock seconds: the earliest deadline or sooner
        self.is_closing = False  # takes no more work

    def submit(self, job: J) -> None:
        """Queue a job whose work and `done` are set. The worker calls its `finish` when it ends."""
        if self.is_closing:  # the engine is lost or was closed
            self._loop.call_soon(job.finish, EngineDown(self.failure, retry_after_seconds=RETRY_AFTER_SECONDS))
            return
        now = self.clock()
        if not self.has_work:
            self._busy_since = now
        self.batcher.add(job, now)
        if job.deadline < self._look_at:
            self._look_later(job.deadline)
        if self._running:
            return
        is_due = self.batcher.window_end() <= now
        if self._next is not None:
            if not is_due:
                return
            self._next.cancel()
        if is_due and self._runner.is_native and self.batcher.candidates >= EARLY_CANDIDATES:
            self._begin()
        else:
            self._next = self._loop.call_soon(self._begin)  # jobs that arrive in this loop iteration join

    def cancel(self, job: J) -> None:
        """Drop a job whose caller was answered or has gone. If it is in the running forward, that still computes it."""
        self.batcher.remove(job)

    async def between(self, call: Callable[[], T]) -> T:
        """Run `call` in the engine's thread between two forwards; return its result. Raises what it raises; EngineError when closing."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self.is_closing:
            raise EngineError("the engine is closed")
        if not self.has_work:
            self._busy_since = self.clock()
        self._calls.append((call, future))
        self._begin()
        return await future

    def abandon(self) -> list[J]:
        """Return every job that waits or is being computed, and empty the queue."""
        alone, self._alone = self._alone, deque()
        return [chunk.job for chunk in (*self._running, *alone)] + self.batcher.clear()

    def close(self) -> None:
        """Free the engine after its present forward; `closed` is done then."""
        self.is_closing = True
        if self._next is not None:
            self._next.cancel()
        self._look_later(math.inf)
        while self._calls:
            _, future = self._calls.popleft()
            if not future.done():
                future.set_exception(EngineError("the engine is closed"))
        if not self._running and self._call is None:
            self._runner.close()

    def hold(self) -> None:
        """Keep this version until `leave`, for one more job or for a caller that may still use it."""
        self.unfinished += 1

    def leave(self) -> None:
        """Undo one `hold`. The last one frees a version that was replaced."""
        self.unfinished -= 1
        if self.on_unused is not None and not self.unfinished:
            self.on_unused(self)

    def retire(self, on_unused: Callable[[Worker[J]], None]) -> None:
        """Note that another version serves new requests. Calls `on_unused` once nobody holds this one."""
        self.on_unused = on_unused
        if not self.unfinished:
            on_unused(self)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait to be computed."""
        return len(self.batcher) + len(self._alone)

    def running(self) -> Running:
        """What is being computed right now."""
        if not self._running:
            return Running()
        return Running(len(self._running), self._candidates, self._tokens, self.clock() - self._running_since)

    def silent_seconds(self) -> float:
        """Seconds that work has waited without any forward finishing; 0 without work."""
        return self.clock() - max(self._busy_since, self._last_forward) if self.has_work else 0.0

    @property
    def has_work(self) -> bool:
        """Whether anything waits or is being computed."""
        return bool(self._running or self._alone or len(self.batcher) or self._call or self._calls)

    # deadlines

    def _look_later(self, at: float) -> None:
        if self._look is not None:
            self._look.cancel()
        self._look_at = at
        seconds = max(LOOK_SECONDS, at - self.clock())
        self._look = self._loop.call_later(seconds, self._expire) if at < math.inf else None

    def _expire(self) -> None:
        """Answer the jobs whose deadline has passed. Most jobs end long before theirs, so one timer serves all."""
        now = self.clock()
        chunks = (*self._running, *self._alone)
        jobs = {job for job in (*(chunk.job for chunk in chunks), *self.batcher.jobs()) if job.done is not None}
        late = {job for job in jobs if job.deadline <= now}
        self._look_later(min((job.deadline for job in jobs - late), default=math.inf))
        for job in late:
            job.finish(DeadlineExceeded())

    # a forward

    def _begin(self) -> None:
        """Run the next call of `between`, or else take the next batch out of the queue and have it computed."""
        self._next = None
        if self._running or self._call is not None or self.is_closing or self.failure is not None:
            return
        if self._calls:
            call, self._call = self._calls.popleft()
            self._runner.call(call, self._called)
            return
        now = self.clock()
        expired: list[J] = []
        if self._alone:
            chunks = [self._alone.popleft()]
        else:
            chunks, expired = self.batcher.take(now)
        if chunks:
            self._running, self._running_since = chunks, now
            self._candidates = self._tokens = 0
            self._queue_seconds = []
            parts = []
            for chunk in chunks:
                job = chunk.job
                self._candidates += chunk.stop - chunk.start
                self._tokens += chunk.context_tokens
                if job.started is None:
                    job.started = now
                    self._queue_seconds.append(now - job.arrived)
                parts.append(job.part(chunk.start, chunk.stop))
            self._collated = self.clock()
            self._runner.forward(parts, self._candidates + self._tokens, self._end)
        for job in expired:
            self._loop.call_soon(job.finish, DeadlineExceeded())  # later: one of them may still be in `submit`
        if not chunks:
            self._begin_next()

    def _end(self, result: Result, finished: float) -> None:
        """The forward has ended: begin the next one, then answer."""
        chunks, self._running, self._last_forward = self._running, [], finished
        seconds = finished - self._collated
        for chunk in chunks:
            chunk.job.forward_seconds += seconds
        if not isinstance(result, BaseException) and (changed := self.model.changed_file()):
            result = EngineError(changed)
        is_failed = isinstance(result, BaseException)
        ended = self._failed(chunks, result) if isinstance(result, BaseException) else self._keep(chunks, result)
        report = BatchReport(
            [chunk.stop - chunk.start for chunk in chunks],
            self._candidates + self._tokens,
            self._queue_seconds,
            self._collated - self._running_since,
            seconds,
            is_failed,
        )
        if self.is_closing:
            self.close()
        self._begin_next()
        for job, error in ended:
            job.state = None  # a reference to the context's keys and values would outlive the request
            job.finish(error)
        self._events.batch_done(report)
        if self.failure is not None:
            self._events.engine_lost(self.failure)

    def _called(self, result: Any, finished: float) -> None:
        future, self._call, self._last_forward = self._call, None, finished
        assert future is not None
        if not future.done():
            future.set_exception(result) if isinstance(result, BaseException) else future.set_result(result)
        if self.is_closing:
            self.close()
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin the next forward once its batch has grown for the window."""
        if self._next is not None or not self.has_work:
            return
        grow_seconds = 0.0 if self._alone or self._calls else self.batcher.window_end() - self.clock()
        if grow_seconds > 0:
            self._next = self._loop.call_later(grow_seconds, self._begin)
        else:
            self._begin()

    def _keep(self, chunks: Sequence[Chunk[J]], outcomes: Sequence[Any]) -> list[Ended[J]]:
        """Give the jobs their results; return those that end with this forward."""
        ended: list[Ended[J]] = []
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            job = chunk.job
            error = job.take(outcome)
            if error is not None:
                ended.append((job, error))
                continue
            job.served = chunk.stop
            if job.served == job.candidates:
                ended.append((job, None))
            elif job.done is not None:
                self.batcher.put_back(job)
        return ended

    def _failed(self, chunks: Sequence[Chunk[J]], error: BaseException) -> list[Ended[J]]:
        """Split a batch that raised, so that only the job to blame fails. Return the jobs that fail now."""
        log.error("forward_failed", items=len(chunks), exc_info=error)
        if not isinstance(error, Exception):  # a bug in our code: report it, and the process restarts
            self.failure = f"the engine thread died: {type(error).__name__}: {error}"
        elif isinstance(error, EngineError) and error.sticky:
            self.failure = f"the engine is lost: {error}"
        if self.failure is not None:
            self.close()
            down = EngineDown("The engine failed; the process restarts.", retry_after_seconds=RETRY_AFTER_SECONDS)
            return [(chunk.job, down) for chunk in chunks]
        if len(chunks) == 1:
            return [(chunks[0].job, EngineDown("The engine failed on this request.", retry_after_seconds=1.0))]
        self._alone.extend(chunk for chunk in chunks if chunk.job.done is not None)
        return []
