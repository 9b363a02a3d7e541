"""Tracks the admitted jobs of one kind of work, from admission to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic

from app.engine.admission import Admission, Refusal
from app.engine.worker import J
from app.errors import DeadlineExceeded, Overloaded, ServiceError
from app.telemetry.metrics import BatchReport, Metrics


class Queue(Generic[J]):
    """Used by the event loop only. `record` counts a forward; `on_idle` is called when the last admitted job has left."""

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
        self.idle = asyncio.Event()  # set while no admitted job is unanswered
        self.idle.set()
        self._record = record
        self._on_idle = on_idle

    def join(self, job: J, *, again: bool = False) -> Refusal | None:
        """Reserve a place for the job, whose `on_release` is `leave`, or return why there is none. `again`: it was refused before."""
        job.reserved = False
        refusal = self.admission.refusal(job, again=again)
        if refusal is None:
            self.admission.add(job)
            self.idle.clear()
            job.worker.hold()
            job.reserved = True
        return refusal

    def leave(self, job: J) -> None:
        """Remove a job that was answered, was cancelled or expired."""
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
        """As `worker.Events.batch_done`. Admission predicts waits from the forward times."""
        if not report.failed:
            self.admission.forward_time.observe(report.cost, report.forward_seconds)
        self._record(report)

    def error(self, refusal: Refusal, *, counted: bool = True, may_wait: bool = False) -> ServiceError:
        """Return the caller's error, and count the refusal if `counted` or if its reason is the deadline."""
        kind: type[ServiceError] = DeadlineExceeded if refusal.reason == "deadline" else Overloaded
        if counted or kind is DeadlineExceeded:
            self.refused += 1
            self.metrics.rejected.labels(refusal.reason).inc()
        detail = f"Refused on arrival: {refusal.detail}."
        return kind(detail, retry_after_seconds=refusal.retry_after_seconds, may_wait=may_wait)
