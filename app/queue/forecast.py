"""Estimates from the recent past: how long forwards take, how much work is offered, and how long the event loop takes. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from app import lateness

Clock = Callable[[], float]  # seconds that never run backwards

MEMORY_SECONDS = 0.5  # of `Offered` and `LoopTime`
LEAST_REQUESTS = 50.0  # within that memory of `LoopTime`; with fewer, what else the loop does would count as theirs
REFUSAL_SHARE = 0.3  # of what a request costs that is answered: an estimate


class ForwardTime:
    """Seconds of a forward as `fixed + per_token · cost`, both fitted to the recent past and never negative.

    While only one size was seen, the time counts as fixed. This optimistic guess lets batches grow, which shows what they cost.
    """

    def __init__(self, half_life_seconds: float = 2.0) -> None:
        self.half_life_seconds = half_life_seconds
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._fixed = self._per_token = 0.0  # seconds, as fitted

    def observe(self, cost: int, seconds: float) -> None:
        """Record that a forward of `cost` tokens took `seconds`. One without measurable time is ignored."""
        if seconds <= 0 or cost <= 0:
            return
        keep = 0.5 ** (seconds / self.half_life_seconds)
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + cost
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + cost * cost
        self._xy = self._xy * keep + cost * seconds
        mean_cost, mean_seconds = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_cost**2
        self._per_token = 0.0
        if spread > 1e-6 * mean_cost**2:
            slope = (self._xy / self._weight - mean_cost * mean_seconds) / spread
            self._per_token = min(max(slope, 0.0), mean_seconds / mean_cost)
        self._fixed = mean_seconds - self._per_token * mean_cost

    def outlook(self, begins_at: float, shared_cost: float) -> Outlook:
        """Of a request whose first forward begins then and holds so many tokens of others. Before the first forward was recorded, forwards
        count as taking no time."""
        return Outlook(begins_at, shared_cost, self._fixed, self._per_token)

    def seconds(self, cost: float) -> float | None:
        """Predicted seconds of one forward; None before the first was recorded."""
        return self._fixed + self._per_token * cost if self._weight else None


class Outlook(NamedTuple):
    """What awaits a request that joins the queue now.

    `begins_at`: when its first forward begins, in seconds of the machine's monotonic clock. `shared_cost`: tokens of other requests in that
    forward. `fixed_seconds` and `seconds_per_token`: what a forward takes.
    """

    begins_at: float
    shared_cost: float
    fixed_seconds: float
    seconds_per_token: float

    def late_seconds(self, cost: int, chunks: int, leaves_at: float, now: float) -> float:
        """By how much a request of so many tokens and forwards ends after its caller has left; 0 or less where it is in time."""
        own = (self.fixed_seconds + self.seconds_per_token * cost / chunks) * chunks
        wait = max(0.0, self.begins_at - now)
        end = own + (wait + self.seconds_per_token * self.shared_cost) * chunks
        return lateness.late_seconds(end, leaves_at - now, own)


class Running(NamedTuple):
    """The work of the running forward, and for how many seconds it has run. No requests means no forward."""

    requests: int = 0
    candidates: int = 0
    context_tokens: int = 0
    seconds: float = 0.0

    @property
    def cost(self) -> int:
        """Tokens that run through the model."""
        return self.candidates + self.context_tokens


class Offered:
    """Work requested lately, refused or not, in forwards a second: a moving average over about `MEMORY_SECONDS`."""

    def __init__(self) -> None:
        self._forwards = 0.0  # requested within the memory
        self._of_a_request = 0.0  # the part of a forward that a recent request fills on average
        self._read = 0  # requests in that average, 20 at most
        self._at = 0.0

    def observe(self, now: float, forwards: float | None = None) -> None:
        """Record a request that fills this part of a forward. One that is refused unread (None) counts as average-sized."""
        if forwards is None:
            forwards = self._of_a_request
        else:
            self._read = min(self._read + 1, 20)
            self._of_a_request += (forwards - self._of_a_request) / self._read
        self._forwards = self._remembered(now) + forwards
        self._at = now

    def forwards_per_second(self, now: float) -> float:
        """Number of full forwards that one second of recent traffic fills."""
        return self._remembered(now) / MEMORY_SECONDS

    def _remembered(self, now: float) -> float:
        return self._forwards * math.exp(-max(0.0, now - self._at) / MEMORY_SECONDS)


class LoopWork(NamedTuple):
    """What the loop has done since the start: processor seconds, answered and refused requests."""

    cpu_seconds: float
    answered: int
    refused: int


class LoopTime:
    """A moving average of the processor time that one request takes of the event loop.

    With a small model the Python around the engine is the bottleneck: requests wait for the loop. `Admission`, which predicts the wait for
    the engine alone, would admit far too many.
    """

    def __init__(self) -> None:
        self._at = 0.0
        self._last: LoopWork | None = None
        self._cpu_seconds = self._requests = 0.0  # of the recent past

    def observe(self, now: float, work: LoopWork) -> None:
        """Record what has been done by now, in seconds of any clock. To be called every few hundredths of a second while requests come."""
        if self._last is not None:
            keep = math.exp(-(now - self._at) / MEMORY_SECONDS)
            requests = work.answered - self._last.answered + REFUSAL_SHARE * (work.refused - self._last.refused)
            self._requests = self._requests * keep + requests
            self._cpu_seconds = self._cpu_seconds * keep + work.cpu_seconds - self._last.cpu_seconds
        self._at, self._last = now, work

    def wait_seconds(self, unanswered: int) -> float:
        """Predicted processor seconds until this many requests are answered; 0 where too few came lately to tell."""
        if self._requests < LEAST_REQUESTS:
            return 0.0
        return unanswered * self._cpu_seconds / self._requests
