"""Decides whether a request may join the queue: bounded work, predicted wait, fair shares. Pure policy, not for serving order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from app.scheduling.batching import BatchPolicy
from app.scheduling.forecast import ForwardTime, Load, Offered
from app.scheduling.job import Clock, Job

Reason = Literal["queue_full", "deadline"]

NO_RATE_RETRY_SECONDS = 1.0  # what a refusal says before the first forward was seen
LIGHT, HEAVY = 0.8, 2.0  # offered work as a share of the capacity: see `_longest_wait_seconds`
SMALLEST = Job(candidates=1, context_tokens=1, deadline=float("inf"))
IDLE_KEY_SECONDS = 60.0  # a key that has been silent for longer has a full bucket anyway


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """How much admitted work may be unfinished. `queue_seconds` bounds the predicted wait; 0 leaves it unbounded.

    `key_share` is what one API key alone may fill of the queue; the fuller the queue, the less each key may hold.
    `key_candidates_per_second` 0 sets no rate for a key; a key may burst to `key_burst_seconds` of its rate.
    """

    queue_requests: int = 4096
    queue_candidates: int = 32_768
    queue_context_tokens: int = 262_144
    queue_seconds: float = 0.5
    key_share: float = 0.5
    key_candidates_per_second: float = 0.0
    key_burst_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not join, and after how many seconds it would fit at the observed rate."""

    reason: Reason
    detail: str
    retry_after_seconds: float


@dataclass(slots=True)
class _Key:
    """One API key: its unfinished work, and a bucket of candidates that refills with time."""

    candidates: int = 0
    context_tokens: int = 0
    bucket: float = 0.0
    refilled: float = 0.0

    @property
    def cost(self) -> int:
        """Unfinished, in tokens."""
        return self.candidates + self.context_tokens


class Admission:
    """Counts admitted, unfinished job. Used by the event loop only. `running` tells what is being computed right now."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        clock: Clock,
        batch: BatchPolicy | None = None,
        running: Callable[[], Load] = Load,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.batch = batch or BatchPolicy()
        self.forward_time = ForwardTime()
        # The shortest memory sees an overload begin before it has filled the queue; the longest one knows that it lasts.
        self.offered = [Offered(memory_seconds=seconds) for seconds in (0.1, 0.5, 0.8)]
        self.requests = 0
        self.candidates = 0
        self.context_tokens = 0
        self._running = running
        self._keys: dict[str, _Key] = {}

    @property
    def cost(self) -> int:
        """Admitted and unfinished, in tokens."""
        return self.candidates + self.context_tokens

    def predicted_wait_seconds(self, key: str | None = None) -> float:
        """Until a newcomer's first forward begins: what is left of the present one, and the full batches ahead of it."""
        now, batch = self._running(), self.batch
        left = max(0.0, (self.forward_time.seconds(now.cost) or 0.0) - now.seconds) if now.requests else 0.0
        batches = max(
            (self.requests - now.requests) / batch.requests,
            (self.candidates - now.candidates) / batch.candidates,
            (self.context_tokens - now.context_tokens) / batch.context_tokens,
        )
        if batches <= 0:
            return left
        full = self.forward_time.seconds((self.cost - now.cost) / batches) or 0.0
        return left + int(batches * self._share_ahead(key) + 1e-9) * full

    def _share_ahead(self, key: str | None) -> float:
        """The part of the queue that is served before a newcomer of this key, whose turn comes by what its key has waiting."""
        if key is None or not self.cost:
            return 1.0
        busy = sum(1 for other in self._keys.values() if other.cost)
        own = self._keys[key].cost if key in self._keys else 0
        return min(1.0, (own * max(busy, 1) + (self.cost - own) / max(busy, 1)) / self.cost)

    def full(self) -> Refusal | None:
        """Whether even the smallest request would be refused, whoever sends it."""
        if not self.requests:
            return None
        refusal = self._over_limit(SMALLEST)
        if refusal is not None:
            self._observe(None)
        return refusal

    def refusal(self, job: Job) -> Refusal | None:
        """None when the job may join now. An idle engine takes any request, for nothing smaller could be said of it."""
        self._observe(Load(1, job.candidates, job.context_tokens))
        if job.deadline <= self.clock():
            return Refusal("deadline", "the deadline had passed on arrival", 0.0)
        if job.key is not None and (limited := self._over_key_rate(job, job.key)):
            return limited
        if not self.requests:
            return None
        return self._over_limit(job) or self._over_deadline(job)

    def add(self, job: Job) -> None:
        """The job joins."""
        self.requests += 1
        self.candidates += job.candidates
        self.context_tokens += job.context_tokens
        if job.key is not None:
            state = self._key(job.key)
            state.candidates += job.candidates
            state.context_tokens += job.context_tokens
            state.bucket -= job.candidates

    def remove(self, job: Job) -> None:
        """The job is answered, cancelled or expired."""
        self.requests -= 1
        self.candidates -= job.candidates
        self.context_tokens -= job.context_tokens
        if job.key is not None:
            state = self._keys[job.key]
            state.candidates -= job.candidates
            state.context_tokens -= job.context_tokens
            self._forget_idle_keys()

    def _over_limit(self, job: Job) -> Refusal | None:
        policy = self.policy
        excess = max(
            self.candidates + job.candidates - policy.queue_candidates,
            self.context_tokens + job.context_tokens - policy.queue_context_tokens,
            self.cost // self.requests if self.requests >= policy.queue_requests else 0,
        )
        if job.key is not None:
            excess = max(excess, self._over_share(job, job.key))
        if excess > 0:
            return Refusal("queue_full", "the queue is full", self._seconds_of(excess))
        wait = self.predicted_wait_seconds(job.key)
        if policy.queue_seconds and wait > self._longest_wait_seconds():
            return Refusal("queue_full", "the predicted wait is over the limit", wait - policy.queue_seconds)
        return None

    def _longest_wait_seconds(self) -> float:
        """The bound, and where it is shorter than a forward, more while later arrivals would not fill the next forward.

        Refusing then would lose work: below capacity a burst may wait two forwards more, near it for the next one.
        """
        size = (self.batch.requests, self.batch.candidates, self.batch.context_tokens)
        seconds = self.forward_time.seconds(self.offered[-1].batch_cost(*size)) or 0.0
        now, bound = self.clock(), self.policy.queue_seconds
        rush, lately, longer = (offered.batches_per_second(now, *size) * seconds for offered in self.offered)
        if max(rush, lately) >= HEAVY:
            return bound
        return bound + 2 * seconds if max(lately, longer) < LIGHT else max(bound, seconds)

    def _observe(self, work: Load | None) -> None:
        for offered in self.offered:
            offered.observe(self.clock(), work)

    def _over_share(self, job: Job, key: str) -> int:
        """A key may hold `share / (1 - share)` times what is free: alone its share, among many less, so a newcomer finds room."""
        policy, held = self.policy, self._key(key)
        if policy.key_share >= 1:
            return 0
        times = policy.key_share / (1 - policy.key_share)
        free = policy.queue_candidates - self.candidates, policy.queue_context_tokens - self.context_tokens
        return max(
            held.candidates + job.candidates - int(free[0] * times),
            held.context_tokens + job.context_tokens - int(free[1] * times),
        )

    def _over_deadline(self, job: Job) -> Refusal | None:
        own = self.forward_time.seconds(job.cost / job.chunks)
        if own is None:
            return None
        wait = self.predicted_wait_seconds(job.key)
        late = self.clock() + (wait + own) * job.chunks - job.deadline
        return Refusal("deadline", "the predicted wait is longer than the deadline", wait) if late > 0 else None

    def _seconds_of(self, cost: int) -> float:
        """How long that much of the queue takes at the observed rate of full batches."""
        full = min(self.cost, self.batch.candidates + self.batch.context_tokens)
        seconds = self.forward_time.seconds(full)
        return NO_RATE_RETRY_SECONDS if seconds is None else seconds * cost / max(full, 1)

    def _over_key_rate(self, job: Job, key: str) -> Refusal | None:
        per_second = self.policy.key_candidates_per_second
        if not per_second:
            return None
        state, burst = self._key(key), per_second * self.policy.key_burst_seconds
        now = self.clock()
        state.bucket = min(burst, state.bucket + (now - state.refilled) * per_second)
        state.refilled = now
        missing = min(job.candidates, burst) - state.bucket  # a request larger than the burst waits for a full bucket
        return Refusal("queue_full", "the key is over its rate", missing / per_second) if missing > 1e-6 else None

    def _key(self, key: str) -> _Key:
        if key not in self._keys:
            burst = self.policy.key_candidates_per_second * self.policy.key_burst_seconds
            self._keys[key] = _Key(bucket=burst, refilled=self.clock())
        return self._keys[key]

    def _forget_idle_keys(self) -> None:
        if len(self._keys) < 1024:
            return
        old = self.clock() - max(IDLE_KEY_SECONDS, self.policy.key_burst_seconds)
        self._keys = {name: key for name, key in self._keys.items() if key.cost or key.refilled > old}
