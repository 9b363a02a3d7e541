"""One engine and its queue: picks the jobs of each forward and gives them their results."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import structlog

from app.errors import DeadlineExceeded, EngineDown, ServiceError
from app.queue.batching import Batcher, Chunk
from app.queue.forecast import Clock, Running
from app.queue.job import Job
from app.queue.runners import EARLY_CANDIDATES, Loaded, Result, Runner
from app.settings import Batching
from app.telemetry.metrics import BatchReport
from model.engine import EngineError

RETRY_AFTER_SECONDS = 5.0
LOOK_SECONDS = 0.001  # the least time between two checks of all deadlines

J = TypeVar("J", bound=Job)
T = TypeVar("T")
Ended = tuple[J, ServiceError | None]

log = structlog.get_logger("app.queue.scheduler")


class Scheduler(Generic[J]):
    """Queues jobs for one engine. Used by the event loop only; forwards run elsewhere, one at a time."""

    def __init__(
        self,
        loaded: Loaded,
        runner: Runner,
        batching: Batching,
        clock: Clock,
        batch_done: Callable[[BatchReport], None],
        lost: Callable[[str], None],
    ) -> None:
        """`batch_done` is called with a report after each forward. `lost` is called with
        the reason after the engine was lost for good and its jobs have got their errors."""
        self.loaded: Any = loaded  # callers know of which kind
        self.clock = clock
        self.unfinished = 0  # calls of `hold` that `leave` has not undone
        self.failure: str | None = None
        self.closed = runner.closed
        self.is_closing = False  # takes no more work
        self._runner = runner
        self._batch_done = batch_done
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._on_unused: Callable[[Scheduler[J]], None] | None = None  # set once another version serves
        self._batcher: Batcher[J] = Batcher(batching)
        self._alone: deque[Chunk[J]] = deque()  # chunks of a failed batch; each is tried by itself
        self._calls: deque[tuple[Callable[[], object], asyncio.Future[Any]]] = deque()  # to be made between forwards
        self._call: asyncio.Future[Any] | None = None  # the one being made
        self._running: list[Chunk[J]] = []
        self._running_since = self._collated = 0.0
        self._candidates = self._tokens = 0  # of the forward that runs
        self._busy_since = 0.0  # clock seconds when the idle engine got work
        self._last_forward = 0.0  # clock seconds when a forward or call last finished
        self._next: asyncio.Handle | None = None  # will begin a forward
        self._look: asyncio.TimerHandle | None = None  # checks the deadlines of all jobs
        self._look_at = math.inf  # clock seconds: the earliest deadline or sooner

    def submit(self, job: J) -> None:
        """Queue a job whose work is set. Its future is done when it ends."""
        if self.is_closing:  # the engine is lost or was closed
            job.fail(EngineDown(self.failure, retry_after_seconds=RETRY_AFTER_SECONDS))
            return
        now = self.clock()
        if not self.has_work:
            self._busy_since = now
        self._batcher.add(job, now)
        if job.deadline < self._look_at:
            self._look_later(job.deadline)
        if self._running:
            return
        is_due = self._batcher.window_end() <= now
        if self._next is not None:
            if not is_due:
                return
            self._next.cancel()
        if is_due and self._runner.is_native and self._batcher.candidates >= EARLY_CANDIDATES:
            self._begin()
        else:
            self._next = self._loop.call_soon(self._begin)  # jobs that arrive in this loop iteration join

    def drop(self, job: J) -> None:
        """Compute no more of a job that nobody waits for. What is in the running forward is computed all the same."""
        self._batcher.remove(job)
        if self._alone:
            self._alone = deque(chunk for chunk in self._alone if chunk.job is not job)

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

    def fail_all(self, error: Callable[[], ServiceError]) -> None:
        """Empty the queue, and fail every job that waits or is being computed, each with an error of its own."""
        alone, self._alone = self._alone, deque()
        for job in [chunk.job for chunk in (*self._running, *alone)] + self._batcher.clear():
            job.fail(error())

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
        """Keep this version until `leave`, for one more job."""
        self.unfinished += 1

    def leave(self) -> None:
        """Undo one `hold`."""
        self.unfinished -= 1
        if self._on_unused is not None and not self.unfinished:
            self._on_unused(self)

    def retire(self, on_unused: Callable[[Scheduler[J]], None]) -> None:
        """Note that another version serves new requests. Calls `on_unused` once nobody holds this one."""
        self._on_unused = on_unused
        if not self.unfinished:
            on_unused(self)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait to be computed."""
        return len(self._batcher) + len(self._alone)

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
        return bool(self._running or self._alone or len(self._batcher) or self._call or self._calls)

    # deadlines

    def _look_later(self, at: float) -> None:
        if self._look is not None:
            self._look.cancel()
        self._look_at = at
        seconds = max(LOOK_SECONDS, at - self.clock())
        self._look = self._loop.call_later(seconds, self._expire) if at < math.inf else None

    def _expire(self) -> None:
        """Fail the jobs whose deadline has passed. Most jobs end long before theirs, so one timer serves all."""
        now = self.clock()
        jobs = {chunk.job for chunk in (*self._running, *self._alone)} | set(self._batcher.jobs())
        waiting = {job for job in jobs if job.is_waited_for}
        late = {job for job in waiting if job.deadline <= now}
        self._look_later(min((job.deadline for job in waiting - late), default=math.inf))
        for job in late:
            job.fail(DeadlineExceeded())

    # a forward

    def _begin(self) -> None:
        """Run the next call of `between`, or else take the next batch out of the queue and have it computed."""
        self._next = None
        if self._running or self._call is not None or self.is_closing:
            return
        if self._calls:
            call, self._call = self._calls.popleft()
            self._runner.call(call, self._called)
            return
        now = self.clock()
        if self._alone:
            self._forward([self._alone.popleft()], now)
            return
        chunks, expired = self._batcher.take(now)
        for job in expired:
            job.fail(DeadlineExceeded())
        if chunks:
            self._forward(chunks, now)

    def _forward(self, chunks: list[Chunk[J]], now: float) -> None:
        """Have these chunks computed."""
        self._running, self._running_since = chunks, now
        self._candidates = self._tokens = 0
        parts = []
        for chunk in chunks:
            job = chunk.job
            self._candidates += chunk.stop - chunk.start
            self._tokens += chunk.context_tokens
            if job.started is None:
                job.started = now
            parts.append(job.part(chunk.start, chunk.stop))
        self._collated = self.clock()
        self._runner.forward(parts, self._candidates + self._tokens, self._end)

    def _end(self, result: Result, finished: float) -> None:
        """The forward has ended: begin the next one, then give the jobs their results."""
        chunks, self._running, self._last_forward = self._running, [], finished
        seconds = finished - self._collated
        for chunk in chunks:
            chunk.job.forward_seconds += seconds
        if not isinstance(result, BaseException) and (changed := self.loaded.changed_file()):
            result = EngineError(changed)
        is_failed = isinstance(result, BaseException)
        ended = self._failed(chunks, result) if isinstance(result, BaseException) else self._keep(chunks, result)
        report = BatchReport(
            [chunk.stop - chunk.start for chunk in chunks],
            self._candidates + self._tokens,
            self._collated - self._running_since,
            seconds,
            is_failed,
        )
        if self.is_closing:
            self.close()
        self._begin_next()
        for job, error in ended:
            job.state = None  # a reference to the context's keys and values would outlive the request
            job.finish() if error is None else job.fail(error)
        self._loop.call_soon(self._batch_done, report)  # after the waiting tasks: figures keep no reply waiting
        if self.failure is not None:
            self.fail_all(lambda: EngineDown(self.failure, retry_after_seconds=RETRY_AFTER_SECONDS))
            self._lost(self.failure)

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
        grow_seconds = 0.0 if self._alone or self._calls else self._batcher.window_end() - self.clock()
        if grow_seconds > 0:
            self._next = self._loop.call_later(grow_seconds, self._begin)
        else:
            self._begin()

    def _keep(self, chunks: Sequence[Chunk[J]], outcomes: Sequence[Any]) -> list[Ended[J]]:
        """Give the jobs their outcomes; return those that end with this forward."""
        ended: list[Ended[J]] = []
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            job = chunk.job
            error = job.take(outcome)
            if error is not None:
                ended.append((job, error))
                continue
            job.computed = chunk.stop
            if job.computed == job.candidates:
                ended.append((job, None))
            elif job.is_waited_for:
                self._batcher.put_back(job)
        return ended

    def _failed(self, chunks: Sequence[Chunk[J]], error: BaseException) -> list[Ended[J]]:
        """Split a batch that raised, so that only the job to blame fails. Return the jobs that fail now."""
        log.error("forward_failed", items=len(chunks), exc_info=error)
        if not isinstance(error, Exception):  # a bug in our code: report it, and the process restarts
            self.failure = "The engine's thread has died; the log says why."
        elif isinstance(error, EngineError) and error.sticky:
            self.failure = "The engine is lost; the log says why."
        if self.failure is not None:
            self.close()
            down = "The engine failed; the process restarts."
            return [(chunk.job, EngineDown(down, retry_after_seconds=RETRY_AFTER_SECONDS)) for chunk in chunks]
        if len(chunks) == 1:
            return [(chunks[0].job, EngineDown("The engine failed on this request.", retry_after_seconds=1.0))]
        self._alone.extend(chunk for chunk in chunks if chunk.job.is_waited_for)
        return []
