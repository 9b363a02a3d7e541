"""Decides which chunks of which requests make the next forward. Pure policy: no torch, no HTTP, no clock of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec

from app.settings import Batching


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """What policy sees of a job: how much it is, its API key and its deadline.

    `context_tokens` are user and history. `chunks` is how many chunks it is computed in, `computed` counts the candidates of finished ones.
    Times are clock seconds; `leaves_at` is when the caller will likely have left; `key` is the caller's API key, by name. `rated` is how
    many candidates count in the key's rate, None for its own.
    """

    candidates: int
    context_tokens: int
    deadline: float
    chunks: int = 1
    key: str | None = None
    leaves_at: float = float("inf")
    arrived: float = 0.0
    computed: int = 0
    rated: int | None = None

    @property
    def cost(self) -> int:
        """Tokens that run through the model."""
        return self.candidates + self.context_tokens


JobT = TypeVar("JobT", bound=Work)


class Chunk(msgspec.Struct, Generic[JobT], frozen=True, eq=False):
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


def chunk_count(candidates: int, batching: Batching) -> int:
    """Number of chunks in which a request of this many candidates is computed."""
    most = min(batching.chunk_candidates, batching.max_candidates)
    return 1 if candidates <= most else -(-candidates // most)


class Full(NamedTuple):
    """The limits of a forward. Any one of them fills it."""

    requests: int
    candidates: int
    context_tokens: int

    @classmethod
    def of(cls, batching: Batching) -> Full:
        """Return the limits that the settings give."""
        return cls(batching.max_requests, batching.max_candidates, batching.max_context_tokens)


def forwards_of(requests: int, candidates: int, context_tokens: int, full: Full) -> float:
    """Number of full forwards that this work fills."""
    return max(requests / full.requests, candidates / full.candidates, context_tokens / full.context_tokens)


class Batcher(Generic[JobT]):
    """The queue of one engine. Used by the event loop only.

    Between API keys the order is fair queueing by cost: the key that was served least comes first. Within a key the order
    is first come, first served, except that a job with chunks left goes to the back after each of them.
    """

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self.candidates = 0
        self._full = Full.of(batching)
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
        """Queue a job again after one of its chunks was computed; it keeps its arrival time."""
        self._append(job)

    def remove(self, job: JobT) -> bool:
        """Remove a cancelled or expired job. Return False if it is not queued, for example because it is being computed."""
        queue = self._queues.get(job.key)
        if queue is None or job not in queue:
            return False
        self._pop(job)
        return True

    def jobs(self) -> Iterator[JobT]:
        """Iterate over the waiting jobs; none may be added or removed meanwhile."""
        return itertools.chain.from_iterable(self._queues.values())

    def clear(self) -> list[JobT]:
        """Take every job out."""
        jobs = list(self.jobs())
        for job in jobs:
            self._pop(job)
        return jobs

    def oldest(self) -> float | None:
        """Arrival time of the oldest job, or None without jobs."""
        return min((job.arrived for job in self.jobs()), default=None)

    def window_end(self) -> float:
        """Clock seconds until which a busy engine lets the next forward grow; -inf if it is full, without jobs or without a window."""
        batching = self.batching
        full = self._length >= batching.max_requests or self.candidates >= batching.max_candidates
        if full or not self._length or not batching.window_seconds:
            return float("-inf")
        return (self.oldest() or 0.0) + batching.window_seconds

    def take(self, now: float) -> tuple[list[Chunk[JobT]], list[JobT]]:
        """Remove and return the chunks of the next forward, and the jobs whose deadline has passed."""
        expired = [job for job in self.jobs() if job.deadline <= now]
        for job in expired:
            self._pop(job)
        return self._fill(), expired

    def _fill(self) -> list[Chunk[JobT]]:
        chunks: list[Chunk[JobT]] = []
        _, candidates, tokens = self._full
        while self._queues and len(chunks) < self.batching.max_requests:
            key = min(self._queues, key=self._served.__getitem__)
            chunk = self._next_chunk(next(iter(self._queues[key])))
            size = chunk.stop - chunk.start
            if chunks and (size > candidates or chunk.context_tokens > tokens):
                break  # it leads the next forward; passing it over would starve large jobs
            self._floor = self._served[key]
            self._served[key] += chunk.cost
            self._pop(chunk.job)
            chunks.append(chunk)
            candidates, tokens = candidates - size, tokens - chunk.context_tokens
        return chunks

    def _next_chunk(self, job: JobT) -> Chunk[JobT]:
        left = job.candidates - job.computed
        size = -(-left // chunk_count(left, self.batching))  # even chunks: 513 is 257 + 256, not 512 + 1
        return Chunk(job, job.computed, job.computed + size)

    def _append(self, job: JobT) -> None:
        if job.key not in self._queues:
            self._queues[job.key] = {}
            self._served[job.key] = max(self._served.get(job.key, 0), self._floor)  # an idle key earns no credit
        self._queues[job.key][job] = None
        self._length += 1
        self.candidates += job.candidates - job.computed

    def _pop(self, job: JobT) -> None:
        queue = self._queues[job.key]
        del queue[job]
        self._length -= 1
        self.candidates -= job.candidates - job.computed
        if not queue:
            del self._queues[job.key]
        if not self._queues:
            self._served.clear()
