"""Has the second checkpoint score a share of the requests that the first has answered, while the service is idle."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import structlog

from app.budgets import SHADOW_WAITING
from app.engine.batching import chunk_count
from app.engine.job import RankJob
from app.engine.versions import Versions
from app.engine.worker import Worker
from app.errors import ServiceError
from app.interface import Done, Ranked
from app.loop_lag import Clock
from app.settings import Settings
from app.telemetry.shadow import FAILED, FULL, LATE, SCORED, ShadowMetrics
from model.inputs import Candidates, Context, Scores
from weights.agreement import agreement, score_weights

Pair = tuple[Worker[RankJob], Worker[RankJob]]  # the first checkpoint's and the second's
MAX_WAIT_SECONDS = 1.0  # how long a request waits for an idle moment before it is dropped
READ_ALIKE = ("history_length", "product_surfaces", "post_age_granularity_minutes", "post_age_buckets")
WORDS = ("action_names", "ids")

log = structlog.get_logger("app.service.shadow")


@dataclass(slots=True, eq=False)
class _Shadowed:
    """An answered request, with the first checkpoint's scores and the second's scores so far."""

    arrived: float
    pair: Pair
    context: Context
    candidates: Candidates
    scores: Scores
    found: list[Scores] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def done(self) -> int:
        return sum(map(len, self.found))


class Shadow:
    """Used by the event loop only. Computes at most one chunk of one request at a time, and begins it only if `is_busy` is False."""

    def __init__(
        self,
        settings: Settings,
        first: Versions[RankJob],
        second: Versions[RankJob],
        metrics: ShadowMetrics,
        clock: Clock,
        is_busy: Callable[[], bool],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.batching = settings.batching
        self.share = 0.0 if settings.split.users else settings.shadow.share
        self.reason = ""  # why nothing is scored: the two read requests differently
        self._first, self._second = first, second
        self._metrics = metrics
        self._clock = clock
        self._is_busy = is_busy
        self._draw = draw
        self._waiting: deque[_Shadowed] = deque()
        self._running: _Shadowed | None = None
        self._next: asyncio.Handle | None = None
        self._pair: Pair | None = None  # the pair that `reason` is about

    def watched(self, job: RankJob, done: Done) -> Done:
        """Return `done`, or a wrapper of it after which the request may be scored again. Contexts that are not kept, such as those
        of explanations, and contexts without candidates are left out."""
        context, candidates, second = job.context, job.items, self._second.current
        assert context is not None
        assert candidates is not None
        if (
            not context.is_kept
            or not len(candidates)
            or job.worker is not self._first.current
            or self._draw() >= self.share
        ):
            return done
        if second is None or not self._reads_alike((job.worker, second)):
            return done
        if self._is_full():
            return done
        pair = job.worker, second

        def answered(result: Ranked | ServiceError) -> None:
            done(result)
            if isinstance(result, Ranked):
                self._offer(_Shadowed(self._clock(), pair, context, candidates, result.scores))

        return answered

    def soon(self) -> None:
        """Continue in the next iteration of the event loop, after whatever arrives in this one."""
        if self._waiting and self._running is None and self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._go_on)

    def _reads_alike(self, pair: Pair) -> bool:
        """Whether both checkpoints read the same from a request. Checked once for each pair."""
        if pair != self._pair:
            one, other = (worker.model.served.manifest for worker in pair)
            differing = [name for name in READ_ALIKE if getattr(one.config, name) != getattr(other.config, name)]
            differing += [name for name in WORDS if getattr(one, name) != getattr(other, name)]
            self._pair, self.reason = pair, ""
            if differing:
                self.reason = (
                    f"It shadows nothing: it reads requests differently from the first ({', '.join(differing)})."
                )
                log.warning("shadow_reads_otherwise", differing=differing)
        return not self.reason

    def _offer(self, request: _Shadowed) -> None:
        if not self._is_full():
            self._waiting.append(request)
            self.soon()

    def _is_full(self) -> bool:
        """Whether the waiting list is full. If so, count the request that found it full."""
        self._drop_late()
        if full := len(self._waiting) >= SHADOW_WAITING:
            self._metrics.ended[FULL].inc()
        return full

    def _drop_late(self) -> None:
        """Drop requests that have waited too long, or for a second checkpoint that is gone."""
        worker, oldest = self._second.current, self._clock() - MAX_WAIT_SECONDS
        while self._waiting and (self._waiting[0].arrived < oldest or self._waiting[0].pair[1] is not worker):
            self._waiting.popleft()
            self._metrics.ended[LATE].inc()

    def _go_on(self) -> None:
        """Begin the next chunk of the oldest request, unless the service is busy."""
        self._next = None
        self._drop_late()
        worker = self._second.current
        if not self._waiting or self._running is not None or worker is None or self._is_busy():
            return
        request = self._running = self._waiting.popleft()
        left, done = len(request.candidates) - request.done, request.done
        chunk = request.candidates.chunk(done, done - (-left // chunk_count(left, self.batching)))
        job = RankJob(
            candidates=len(chunk), context_tokens=1 + len(request.context), deadline=float("inf"), worker=worker,
            on_release=lambda job: job.worker.leave(), context=request.context, items=chunk, done=self._scored,
        )  # fmt: skip
        worker.hold()
        worker.submit(job)

    def _scored(self, result: Ranked | ServiceError) -> None:
        request, self._running = self._running, None
        assert request is not None
        if isinstance(result, ServiceError):
            self._metrics.ended[FAILED].inc()
        else:
            request.found.append(result.scores)
            request.seconds += result.forward_seconds
            if request.done < len(request.candidates):
                self._waiting.appendleft(request)
            else:
                self._compare(request)
        self.soon()

    def _compare(self, request: _Shadowed) -> None:
        """Record the figures of `weights compare` for one request; each score uses its own checkpoint's weights."""
        metrics, (first, second) = self._metrics, (worker.model.served.manifest for worker in request.pair)
        pair = {"first": (first, request.scores), "second": (second, Scores.concatenate(request.found))}
        metrics.ended[SCORED].inc()
        metrics.seconds.observe(request.seconds)
        metrics.candidates.inc(len(request.candidates))
        for name, (manifest, scores) in pair.items():
            sums = np.add.reduce(scores.probabilities, 0, np.float64).tolist()
            for action, total in zip(manifest.action_names, sums, strict=True):
                metrics.probability.labels(action, name).inc(total)
        if len(request.candidates) < 2:
            return
        alike = agreement(*(scores.probabilities @ score_weights(manifest) for manifest, scores in pair.values()))
        metrics.kendall.observe((1 - alike.kendall) / 2)
        if np.isfinite(alike.correlation):
            metrics.correlation.observe((1 - alike.correlation) / 2)
        for k, share in alike.overlap.items():
            metrics.overlap.labels(str(k)).observe(share)
