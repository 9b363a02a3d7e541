"""The places of admitted jobs of one kind: taken with `with`, counted until they are freed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic

from app.errors import DeadlineExceeded, Overloaded, ServiceError
from app.queue.admission import Admission, Refusal
from app.queue.scheduler import J, Scheduler
from app.telemetry.metrics import BatchReport, Metrics


class Places(Generic[J]):
    """Used by the event loop only. `record` counts a forward in the metrics."""

    def __init__(
        self, admission: Admission, metrics: Metrics, record: Callable[[BatchReport], None] = lambda report: None
    ) -> None:
        self.admission = admission
        self.metrics = metrics
        self.freed = self.refused = 0  # since the start
        self.refused_at = float("-inf")  # clock seconds of the last refusal of a request that was read
        self.idle = asyncio.Event()  # set while no place is taken
        self.idle.set()
        self._record = record
        self._taken: dict[J, Scheduler[J]] = {}

    @contextmanager
    def take(self, job: J, scheduler: Scheduler[J]) -> Iterator[J]:
        """Take a place for this job on this engine. Leaving the block frees it and drops what is not computed.

        Raises Overloaded or DeadlineExceeded where admission refuses it.
        """
        if (refusal := self.admission.refusal(job, scheduler.running())) is not None:
            self.refused_at = self.admission.clock()
            raise self.error(refusal)
        self.admission.add(job)
        self.idle.clear()
        scheduler.hold()
        self._taken[job] = scheduler
        try:
            yield job
        finally:
            self.free(job)

    def scheduler(self, job: J) -> Scheduler[J]:
        """Return the scheduler on which this job has its place. Raises ValueError where it has none any more."""
        scheduler = self._taken.get(job)
        if scheduler is None:
            raise ValueError("this job has no place: it was computed before, or its block was left")
        return scheduler

    async def compute(self, job: J) -> Any:
        """Queue the job, whose work is set, and return its result; then its place is free. Cancelling drops the work.

        Raises what the job failed with, and ValueError where it has no place.
        """
        self.scheduler(job).submit(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self.metrics.cancelled.labels("queue" if job.started is None else "forward").inc()
            if job.future.done() and not job.future.cancelled():
                job.future.exception()  # it failed just now; else asyncio logs that nobody asked
            raise
        finally:
            self.free(job)

    def free(self, job: J) -> None:
        """Free the job's place and drop what is not computed. A second call does nothing."""
        scheduler = self._taken.pop(job, None)
        if scheduler is None:
            return
        self.freed += 1
        self.admission.remove(job)
        scheduler.drop(job)
        scheduler.leave()
        if not self._taken:
            self.idle.set()

    def batch_done(self, report: BatchReport) -> None:
        """A forward finished. Admission predicts waits from the times of forwards."""
        if not report.failed:
            self.admission.forward_time.observe(report.cost, report.forward_seconds)
        self._record(report)

    def error(self, refusal: Refusal) -> ServiceError:
        """Count a refusal, and return the caller's error."""
        self.refused += 1
        self.metrics.rejected.labels(refusal.reason).inc()
        kind: type[ServiceError] = DeadlineExceeded if refusal.reason == "deadline" else Overloaded
        return kind(f"Refused on arrival: {refusal.detail}.", retry_after_seconds=refusal.retry_after_seconds)
