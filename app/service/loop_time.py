"""Predicts how long the event loop takes to answer what it has in hand. Knows no engine.

With a small model, the Python around the engine is the bottleneck: requests wait for the loop, and `engine.admission`, which only
predicts the wait for the engine, would admit far too many.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MEMORY_SECONDS = 0.5  # of what a request costs
LEAST_REQUESTS = 50.0  # within the memory; with fewer, what else the loop does would count as theirs
REFUSAL_SHARE = 0.3  # of what a request costs that is answered: an estimate


class LoopWork(NamedTuple):
    """What the loop has done since the start: processor seconds, answered and refused requests."""

    cpu_seconds: float
    answered: int
    refused: int


class LoopTime:
    """A moving average of the processor time that one request takes of the loop."""

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
