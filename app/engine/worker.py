"""One engine and its queue: which jobs make the next forward, and what becomes of them. Not for who may join the queue."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import structlog

from app.engine.loading import LoadedModel
from app.engine.rank_job import RankJob
from app.engine.thread import EngineThread, NativeForwards, Result
from app.errors import DeadlineExceeded, EngineDown, NonFiniteScores, ServiceError
from app.scheduling.batching import Batcher, Chunk
from app.scheduling.forecast import Running
from app.scheduling.job import Clock
from app.settings import Batching
from app.telemetry.metrics import BatchReport
from model.engine import EngineError, Outcome, OverlappingEngine

LOOK_SECONDS = 0.001  # at least, from one look at all deadlines to the next
EARLY_CANDIDATES = 384
"""With so many waiting, an idle engine's forward begins at once, not at the end of the loop's turn: the loop reads the next requests
while the kernel's threads compute these."""

Ended = tuple[RankJob, ServiceError | None]


class Events(Protocol):
    """What a worker tells the service."""

    def warming(self) -> None:
        """The checkpoint is read, and the engine warms up."""
        ...

    def batch_done(self, report: BatchReport) -> None:
        """A forward finished."""
        ...

    def engine_lost(self, reason: str) -> None:
        """The engine cannot work any more, and only a new process can help."""
        ...


class EngineWorker:
    """Belongs to the event loop; the forwards run elsewhere, one at a time."""

    def __init__(
        self, thread: EngineThread, batching: Batching, events: Events, clock: Clock, loop: asyncio.AbstractEventLoop
    ) -> None:
        """`thread` has loaded the model."""
        self.model: LoadedModel = thread.ready.result()
        self.clock = clock
        self.unfinished = 0  # jobs that hold a place here
        self.retired = False  # another version serves new requests
        self.failure: str | None = None
        self.closed = thread.closed
        self.batcher: Batcher[RankJob] = Batcher(batching)
        self._thread = thread
        self._events = events
        self._loop = loop
        engine = self.model.engine
        self._native: NativeForwards | None = None
        if isinstance(engine, OverlappingEngine) and (descriptor := engine.open()) is not None:
            self._native = NativeForwards(engine, descriptor, loop, clock)
        self._runner = self._native or thread
        self._alone: deque[Chunk[RankJob]] = deque()  # of a batch that failed: each is tried by itself
        self._running: list[Chunk[RankJob]] = []
        self._running_since = self._collated = 0.0
        self._candidates = self._tokens = 0  # of what runs
        self._queue_seconds: list[float] = []  # of the jobs whose first forward runs
        self._busy_since = 0.0  # clock seconds when work came to an engine without any
        self._last_forward = 0.0  # clock seconds when one last finished
        self._next: asyncio.Handle | None = None  # will begin a forward
        self._look: asyncio.TimerHandle | None = None  # at the deadlines of all jobs
        self._look_at = math.inf  # clock seconds, of the earliest of them or before
        self.is_closing = False  # it takes no work any more

    def submit(self, job: RankJob) -> None:
        """Queue a job that has its context and items; it is told of its end by `finish`."""
        now = self.clock()
        if not self._has_work():
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
        if is_due and self._native is not None and self.batcher.candidates >= EARLY_CANDIDATES:
            self._begin()
        else:
            self._next = self._loop.call_soon(self._begin)  # what else arrives in this turn of the loop joins

    def cancel(self, job: RankJob) -> None:
        """The caller has its answer or has gone: the job is not computed unless it is in the forward that runs."""
        self.batcher.remove(job)

    def abandon(self) -> list[RankJob]:
        """Every job that waits or is being computed; those that wait leave the queue."""
        alone, self._alone = self._alone, deque()
        return [chunk.job for chunk in (*self._running, *alone)] + self.batcher.clear()

    def close(self) -> None:
        """Free the engine after its present forward; `closed` is done then."""
        self.is_closing = True
        if self._next is not None:
            self._next.cancel()
        self._look_later(math.inf)
        if not self._running:
            if self._native is not None:
                self._native.close()
            self._thread.close()

    def running(self) -> Running:
        """What is being computed right now."""
        if not self._running:
            return Running()
        return Running(len(self._running), self._candidates, self._tokens, self.clock() - self._running_since)

    def silent_seconds(self) -> float:
        """How long work has been waiting while no forward finished; 0 while there is no work."""
        return self.clock() - max(self._busy_since, self._last_forward) if self._has_work() else 0.0

    def _has_work(self) -> bool:
        return bool(self._running or self._alone or len(self.batcher))

    # deadlines

    def _look_later(self, at: float) -> None:
        if self._look is not None:
            self._look.cancel()
        self._look_at = at
        seconds = max(LOOK_SECONDS, at - self.clock())
        self._look = self._loop.call_later(seconds, self._expire) if at < math.inf else None

    def _expire(self) -> None:
        """Answer the jobs whose deadline has passed. Most end long before theirs, so one timer serves all of them."""
        now = self.clock()
        chunks = (*self._running, *self._alone)
        jobs = {job for job in (*(chunk.job for chunk in chunks), *self.batcher.jobs()) if job.done is not None}
        late = {job for job in jobs if job.deadline <= now}
        self._look_later(min((job.deadline for job in jobs - late), default=math.inf))
        for job in late:
            job.finish(DeadlineExceeded())

    # a forward

    def _begin(self) -> None:
        """Take the next batch out of the queue and have it computed."""
        self._next = None
        if self._running or self.is_closing or self.failure is not None:
            return
        now = self.clock()
        expired: list[RankJob] = []
        if self._alone:
            chunks = [self._alone.popleft()]
        else:
            chunks, expired = self.batcher.take(now)
        if chunks:
            self._running, self._running_since = chunks, now
            self._candidates = self._tokens = 0
            self._queue_seconds = []
            items = []
            for chunk in chunks:
                job = chunk.job
                self._candidates += chunk.stop - chunk.start
                self._tokens += chunk.context_tokens
                if job.started is None:
                    job.started = now
                    self._queue_seconds.append(now - job.arrived)
                items.append(job.item(chunk.start, chunk.stop))
            self._collated = self.clock()
            self._runner.forward(items, self._candidates + self._tokens, self._end)
        for job in expired:
            self._loop.call_soon(job.finish, DeadlineExceeded())  # later: one of them may be just being submitted
        if not chunks:
            self._begin_next()

    def _end(self, result: Result, finished: float) -> None:
        """The forward is over: begin the next one, then answer."""
        chunks, self._running, self._last_forward = self._running, [], finished
        for chunk in chunks:
            chunk.job.forward_seconds += finished - self._collated
        ended = self._failed(chunks, result) if isinstance(result, BaseException) else self._keep(chunks, result)
        report = BatchReport(
            [chunk.stop - chunk.start for chunk in chunks],
            self._candidates + self._tokens,
            self._queue_seconds,
            self._collated - self._running_since,
            finished - self._collated,
            isinstance(result, BaseException),
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

    def _begin_next(self) -> None:
        """An engine that was busy lets the next batch grow for the window."""
        if self._next is not None or not self._has_work():
            return
        grow_seconds = 0.0 if self._alone else self.batcher.window_end() - self.clock()
        if grow_seconds > 0:
            self._next = self._loop.call_later(grow_seconds, self._begin)
        else:
            self._begin()

    def _keep(self, chunks: Sequence[Chunk[RankJob]], outcomes: Sequence[Outcome]) -> list[Ended]:
        """Give the jobs their scores; those that end with this forward."""
        if [len(outcome.scores) for outcome in outcomes] != [chunk.stop - chunk.start for chunk in chunks]:
            return self._failed(chunks, EngineError("the engine answered for another number of candidates"))
        ended: list[Ended] = []
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            job, scores = chunk.job, outcome.scores
            if not scores.is_finite():
                ended.append((job, NonFiniteScores()))
                continue
            job.scores.append(scores)
            job.cache = outcome.cache if chunk.start == 0 else job.cache
            job.state, job.served = outcome.state, chunk.stop
            if job.served == job.candidates:
                ended.append((job, None))
            elif job.done is not None:
                self.batcher.put_back(job)
        return ended

    def _failed(self, chunks: Sequence[Chunk[RankJob]], error: BaseException) -> list[Ended]:
        """A batch that raises is split, so that only the item that is to blame fails."""
        structlog.get_logger("app").error("a forward failed", items=len(chunks), exc_info=error)
        if not isinstance(error, Exception):  # a bug of ours: say so, the process restarts
            self.failure = f"the engine thread died: {type(error).__name__}: {error}"
        elif isinstance(error, EngineError) and error.sticky:
            self.failure = f"the engine is lost: {error}"
        if self.failure is not None:
            self.close()
            down = EngineDown("The engine failed; the process restarts.", retry_after_seconds=5.0)
            return [(chunk.job, down) for chunk in chunks]
        if len(chunks) == 1:
            return [(chunks[0].job, EngineDown("The engine failed on this request.", retry_after_seconds=1.0))]
        self._alone.extend(chunk for chunk in chunks if chunk.job.done is not None)
        return []
