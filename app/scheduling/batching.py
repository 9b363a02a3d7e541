"""Decides which chunks of which requests make the next forward. Pure policy: no torch, no HTTP, no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from app.scheduling.job import Job


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """What one forward may hold. A request of more than `chunk_candidates` is served in chunks, in turn with others.

    `window_seconds` is how long a busy engine lets a batch grow that is not full; an idle engine never waits.
    """

    requests: int = 64
    candidates: int = 1024
    context_tokens: int = 8192
    chunk_candidates: int = 512
    window_seconds: float = 0.0


JobT = TypeVar("JobT", bound=Job)


@dataclass(frozen=True, slots=True)
class Chunk(Generic[JobT]):
    """Candidates `start … stop - 1` of a job."""

    job: JobT
    start: int
    stop: int

    @property
    def context_tokens(self) -> int:
        """Only the first chunk pays for the context; later ones are handed its state."""
        return self.job.context_tokens if self.start == 0 else 0

    @property
    def cost(self) -> int:
        """Tokens that run through the model."""
        return self.stop - self.start + self.context_tokens


@dataclass(frozen=True, slots=True)
class Take(Generic[JobT]):
    """The next forward, the jobs whose deadline passed in the queue, and, where `chunks` is empty, when to look again."""

    chunks: list[Chunk[JobT]] = field(default_factory=list)
    expired: list[JobT] = field(default_factory=list)
    look_again: float | None = None


def chunk_count(candidates: int, policy: BatchPolicy) -> int:
    """In how many chunks a request of that many candidates is served."""
    return max(1, -(-candidates // policy.chunk_candidates))


class Batcher(Generic[JobT]):
    """The queue of one engine. Not thread-safe: its owner holds a lock.

    Between API keys the order is fair queueing by cost: the key that was served least comes first. Within a key the order
    is first come, first served, except that a job with chunks left goes to the back after each of them.
    """

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.candidates = 0
        self._queues: dict[str | None, dict[JobT, None]] = {}  # dicts keep order and forget a cancelled job at once
        self._served: dict[str | None, int] = {}
        self._floor = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, job: JobT, now: float) -> None:
        """Queue a new job."""
        job.arrived = now
        self._append(job)

    def put_back(self, job: JobT) -> None:
        """Queue a job again whose chunk was served; its age stays."""
        self._append(job)

    def remove(self, job: JobT) -> bool:
        """Forget a job that is cancelled or expired; False when it is not queued (it is being computed, say)."""
        queue = self._queues.get(job.key)
        if queue is None or job not in queue:
            return False
        self._pop(job)
        return True

    def clear(self) -> list[JobT]:
        """Take every job out."""
        jobs = [job for queue in self._queues.values() for job in queue]
        for job in jobs:
            self._pop(job)
        return jobs

    def oldest(self) -> float | None:
        """When the job arrived that has been here longest."""
        return min((job.arrived for queue in self._queues.values() for job in queue), default=None)

    def take(self, now: float, *, idle: bool) -> Take[JobT]:
        """Choose the next forward and take its jobs out of the queue. `idle`: the engine has found the queue empty before."""
        expired = [job for queue in self._queues.values() for job in queue if job.deadline <= now]
        for job in expired:
            self._pop(job)
        if not idle and self._length and (grow_until := self._window_end()) > now:
            return Take(expired=expired, look_again=grow_until)
        return Take(chunks=self._fill(), expired=expired)

    def _window_end(self) -> float:
        """Until when the batch may grow; the past once it is full."""
        policy = self.policy
        if not policy.window_seconds or self._length >= policy.requests or self.candidates >= policy.candidates:
            return float("-inf")
        return (self.oldest() or 0.0) + policy.window_seconds

    def _fill(self) -> list[Chunk[JobT]]:
        chunks: list[Chunk[JobT]] = []
        candidates, tokens = self.policy.candidates, self.policy.context_tokens
        while self._queues and len(chunks) < self.policy.requests:
            key = min(self._queues, key=lambda name: self._served[name])
            chunk = self._next_chunk(next(iter(self._queues[key])))
            size = chunk.stop - chunk.start
            if chunks and (size > candidates or chunk.context_tokens > tokens):
                break  # it leads the next forward; passing it over would starve what is large
            self._floor = self._served[key]
            self._served[key] += chunk.cost
            self._pop(chunk.job)
            chunks.append(chunk)
            candidates, tokens = candidates - size, tokens - chunk.context_tokens
        return chunks

    def _next_chunk(self, job: JobT) -> Chunk[JobT]:
        left = job.candidates - job.served
        size = -(-left // chunk_count(left, self.policy))  # even chunks: 513 is 257 + 256, not 512 + 1
        return Chunk(job, job.served, job.served + size)

    def _append(self, job: JobT) -> None:
        if job.key not in self._queues:
            self._queues[job.key] = {}
            self._served[job.key] = max(self._served.get(job.key, 0), self._floor)  # silence earns no credit
        self._queues[job.key][job] = None
        self._length += 1
        self.candidates += job.candidates - job.served

    def _pop(self, job: JobT) -> None:
        queue = self._queues[job.key]
        del queue[job]
        self._length -= 1
        self.candidates -= job.candidates - job.served
        if not queue:
            del self._queues[job.key]
        if not self._queues:
            self._served.clear()
            self._floor = 0
