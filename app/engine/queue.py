"""Who is admitted for one kind of work, from the reserved place to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic

from app.engine.admission import Admission, Refusal
from app.engine.worker import J
from app.errors import DeadlineExceeded, Overloaded, ServiceError
from app.telemetry.metrics import BatchReport, Metrics


class Queue(Generic[J]):
    """Belongs to the event loop. `record` counts a forward; `on_idle` is called when the last admitted job has left."""

    def __init__(
        self,
        admission: Admission,
        metrics: Metrics,
        record: Callable[[BatchReport], None],
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self.admission = admission
        self.metrics = metrics
        self.answered = self.refused = 0  # since the start
        self.idle = asyncio.Event()  # set while every admitted job is answered
        self.idle.set()
        self._record = record
        self._on_idle = on_idle

    def join(self, job: J, *, again: bool = False) -> Refusal | None:
        """Reserve a place for the job, whose `on_release` is `leave`, or return why there is none. `again`: the job was refused before."""
        job.reserved = False
        refusal = self.admission.refusal(job, again=again)
        if refusal is None:
            self.admission.add(job)
            self.idle.clear()
            job.worker.hold()
            job.reserved = True
        return refusal

    def leave(self, job: J) -> None:
        """The job is answered, cancelled or expired."""
        self.answered += 1
        self.admission.remove(job)
        if job.done is not None:
            job.done = None
            self.metrics.cancelled.labels("queue" if job.started is None else "forward").inc()
        if job.started is None or job.served < job.candidates:  # a job that computes only a context has no candidates
            job.worker.cancel(job)
        job.worker.leave()
        if not self.admission.requests:
            self.idle.set()
            if self._on_idle is not None:
                self._on_idle()

    def batch_done(self, report: BatchReport) -> None:
        """As `worker.Events.batch_done`. How long forwards take decides who is admitted."""
        if not report.failed:
            self.admission.forward_time.observe(report.cost, report.forward_seconds)
        self._record(report)

    def error(self, refusal: Refusal, *, counted: bool = True, may_wait: bool = False) -> ServiceError:
        """The error that the caller gets. A passed deadline is counted in any case."""
        kind: type[ServiceError] = DeadlineExceeded if refusal.reason == "deadline" else Overloaded
        if counted or kind is DeadlineExceeded:
            self.refused += 1
            self.metrics.rejected.labels(refusal.reason).inc()
        detail = f"Refused on arrival: {refusal.detail}."
        return kind(detail, retry_after_seconds=refusal.retry_after_seconds, may_wait=may_wait)
