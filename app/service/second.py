"""Holds a second checkpoint beside the first, and gives up only that one when it breaks. `shadow` has it score requests."""

from __future__ import annotations

from typing import Protocol

import structlog

from app.engine.forecast import Running
from app.engine.job import RankJob
from app.engine.loading import Loader
from app.engine.versions import Versions
from app.errors import EngineDown
from app.interface import Done, Second, ServedModel
from app.loop_lag import Clock
from app.service.shadow import Shadow
from app.settings import Settings
from app.telemetry.exposition import add_stats
from app.telemetry.metrics import BatchReport, Metrics
from app.telemetry.shadow import CHECKPOINTS, ShadowMetrics
from model.engine import CacheStats

LOADING = "The second checkpoint is being loaded."

log = structlog.get_logger("app.service.second")


class Beside(Protocol):
    """The part of the service that it uses."""

    def batch_done(self, report: BatchReport) -> None: ...

    def is_busy(self) -> bool: ...


class SecondCheckpoint:
    """`load` is None if none is configured; then nothing here does anything. Used by the event loop only.

    If it answers users, its forwards count in the service's figures; if it only shadows, they do not.
    """

    def __init__(
        self,
        load: Loader | None,
        settings: Settings,
        first: Versions[RankJob],
        metrics: Metrics,
        clock: Clock,
        service: Beside,
    ) -> None:
        self.versions: Versions[RankJob] = Versions(settings.batching, self, clock, settings.reload.timeout_seconds)
        self.is_split = settings.split.users > 0
        self.failure = LOADING
        self._load = load
        self._first = first
        self._queue = settings.queue
        self._service = service
        self._shadow: Shadow | None = None
        self._hangs = False  # at the last `look`
        if load is not None:
            series = ShadowMetrics(metrics.registry, self.labels)
            self._shadow = Shadow(settings, first, self.versions, series, clock, service.is_busy)
            self._answers = [series.answers.labels(checkpoint) for checkpoint in CHECKPOINTS]

    @property
    def state(self) -> Second | None:
        """As `interface.Service.second`."""
        if self._shadow is None:
            return None
        current = self.versions.current
        if current is None:
            return Second(None, self.failure, False)
        answers = self.is_split and self.versions.silent_seconds() <= self._queue.stall_seconds
        return Second(current.model.served, self._shadow.reason, answers)

    def labels(self) -> dict[str, str] | None:
        """The labels of `second_info`; None while none is held."""
        current = self.versions.current
        return None if current is None else current.model.labels()

    def running(self) -> Running:
        """What is being computed for callers: by both checkpoints if both answer them, since they share the machine."""
        if not self.is_split:
            return self._first.running()
        one, other = self._first.running(), self.versions.running()
        return Running(
            one.requests + other.requests,
            one.candidates + other.candidates,
            one.context_tokens + other.context_tokens,
            max(one.seconds, other.seconds),
        )

    def cache_stats(self) -> CacheStats:
        """Cache counts of the engines that answer callers."""
        stats = self._first.cache_stats()
        return add_stats(stats, self.versions.cache_stats(), keep_gauges=True) if self.is_split else stats

    # life

    async def load(self) -> None:
        """Load it once the first checkpoint serves. A failure is logged and otherwise ignored."""
        if self._load is None:
            return
        try:
            model = await self.swap(self._load)
        except Exception as error:
            self.failure = f"The second checkpoint could not be loaded: {error}"
            log.error("second_checkpoint_failed", reason=str(error) or type(error).__name__)
        else:
            log.info("second_checkpoint", version=model.manifest.version, digest=model.manifest.digest)

    async def swap(self, load: Loader) -> ServedModel:
        """Load and warm another one, then hold that. Raises what `load` raises and ReloadInProgress; the old one is then kept."""
        worker = await self.versions.load(load)
        self.versions.install(worker)
        served: ServedModel = worker.model.served
        return served

    def look(self) -> None:
        """Call this now and then: it gives up a checkpoint that hangs for two calls."""
        silent = self.versions.silent_seconds()
        before, self._hangs = self._hangs, silent > self._queue.stall_exit_seconds
        if before and self._hangs:
            self.engine_lost(f"it has work and has finished no forward for {silent:.1f} s")
        self.soon()

    # requests

    def watched(self, job: RankJob, done: Done) -> Done:
        """Count a request that is about to be ranked; `done`, after which the second checkpoint may score it too. One is configured."""
        assert self._shadow is not None
        self._answers[job.worker in self.versions.held].inc()
        return self._shadow.watched(job, done)

    def soon(self) -> None:
        """Called when the queue may be empty."""
        if self._shadow is not None:
            self._shadow.soon()

    # reported by its engine

    def warming(self) -> None:
        """It warms up; nothing else changes."""

    def batch_done(self, report: BatchReport) -> None:
        """A forward finished."""
        if self.is_split:
            self._service.batch_done(report)

    def engine_lost(self, reason: str) -> None:
        """Give it up: its requests are answered 503, and from now on the first checkpoint answers its users. A reload brings it back."""
        if self.versions.current is None:
            return
        self.failure = f"The second checkpoint was given up: {reason}"
        log.error("second_checkpoint_lost", reason=reason)
        for job in self.versions.drop():
            job.finish(EngineDown("The second checkpoint was given up.", retry_after_seconds=0.0))
