"""How long the next forwards will take, from those observed lately. Pure arithmetic, not for deciding who is admitted."""

from __future__ import annotations

import math
from dataclasses import dataclass


class ForwardTime:
    """Seconds of a forward as `fixed + per_token · cost`, both fitted to the recent past and never negative.

    Where only one size was seen, the time is taken to be fixed: the optimist lets batches grow, and so learns what they cost.
    """

    def __init__(self, half_life_seconds: float = 2.0) -> None:
        self.half_life_seconds = half_life_seconds
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, cost: int, seconds: float) -> None:
        """A forward of that many tokens took that long. One that took no measurable time says nothing."""
        if seconds <= 0 or cost <= 0:
            return
        keep = 0.5 ** (seconds / self.half_life_seconds)
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + cost
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + cost * cost
        self._xy = self._xy * keep + cost * seconds

    def seconds(self, cost: float) -> float | None:
        """Predicted seconds of one forward; None before the first was seen."""
        if not self._weight:
            return None
        mean_cost, mean_seconds = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_cost**2
        slope = 0.0
        if spread > 1e-6 * mean_cost**2:
            slope = (self._xy / self._weight - mean_cost * mean_seconds) / spread
            slope = min(max(slope, 0.0), mean_seconds / mean_cost)
        return mean_seconds + slope * (cost - mean_cost)


@dataclass(frozen=True, slots=True)
class Load:
    """Work in the model's units. `seconds` is for how long it has been computing, where it is what runs now."""

    requests: int = 0
    candidates: int = 0
    context_tokens: int = 0
    seconds: float = 0.0

    @property
    def cost(self) -> int:
        """One number to add up: tokens that run through the model."""
        return self.candidates + self.context_tokens


class Offered:
    """Work asked for per second over the last half second or so, refused or not."""

    def __init__(self, memory_seconds: float = 0.5) -> None:
        self.memory_seconds = memory_seconds
        self._requests = self._candidates = self._tokens = 0.0
        self._at = 0.0

    def observe(self, now: float, work: Load | None = None) -> None:
        """A request came; one of unknown size counts as an average one."""
        keep = math.exp(-max(0.0, now - self._at) / self.memory_seconds)
        self._at = now
        if work is None:
            grow = keep * (1 + 1 / self._requests) if self._requests > 1e-3 else keep
            self._requests, self._candidates, self._tokens = (
                value * grow for value in (self._requests, self._candidates, self._tokens)
            )
            return
        self._requests = self._requests * keep + work.requests
        self._candidates = self._candidates * keep + work.candidates
        self._tokens = self._tokens * keep + work.context_tokens

    def batches_per_second(self, now: float, requests: int, candidates: int, context_tokens: int) -> float:
        """How many forwards of at most this size a second of such traffic would fill."""
        keep = math.exp(-max(0.0, now - self._at) / self.memory_seconds)
        fullest = max(self._requests / requests, self._candidates / candidates, self._tokens / context_tokens)
        return fullest * keep / self.memory_seconds

    def batch_cost(self, requests: int, candidates: int, context_tokens: int) -> float:
        """Tokens in one such full forward."""
        fullest = max(self._requests / requests, self._candidates / candidates, self._tokens / context_tokens)
        return (self._candidates + self._tokens) / fullest if fullest else 0.0
