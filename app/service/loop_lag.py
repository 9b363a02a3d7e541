"""Whether the event loop has more requests in hand than it can answer soon. Knows no engine.

With a small model the Python around it runs out before the engine does. The loop's *wait* is the time in which it answers what is
admitted: the unanswered requests, times the processor time that one took lately. A burst makes it long once; callers who never pause make
it long all the time. That is an *overrun*: until it ends, what would wait longer is refused, before it is read. A loop whose ticks are
on time only waits for its engine, and how long that may take is the business of `engine.admission`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

TICK_SECONDS = 0.01  # from one tick to the next
FULL_SECONDS = 0.05  # of work
FULL_REQUESTS = 64  # more may be less work than that, but callers would wait many times as long
LATE_SECONDS = 0.002  # with less, the loop has time to spare
STANDING_SECONDS = 0.1
RECOVERED_SECONDS = 1.0  # with less, the refusals themselves would shorten the wait and end the overrun
MEMORY_SECONDS = 0.5  # of what a request costs
LATE_MEMORY_SECONDS = 0.1
REFUSAL_SHARE = 0.1  # of what a request costs that is answered


class LoopWork(NamedTuple):
    """What the loop has done and has in hand: processor seconds, answered and refused requests as totals, unanswered ones now."""

    cpu_seconds: float
    answered: int
    refused: int
    unanswered: int


class LoopLag:
    """Judges the loop from its ticks, in seconds of any clock.

    An overrun begins when the loop is full and its ticks are late for `STANDING_SECONDS`. It ends when the loop has been less than half
    full for `RECOVERED_SECONDS`.
    """

    def __init__(self) -> None:
        self.overrun = False
        self._last: tuple[float, LoopWork] | None = None
        self._full_since: float | None = None  # the first of the full and late ticks, without another between
        self._busy_at = -math.inf  # when the loop was last more than half full
        self._cpu_seconds = self._requests = 0.0  # of the recent past
        self._late_seconds = 0.0  # on average

    def refuses(self, unanswered: int) -> bool:
        """Whether to refuse a request that arrives behind this many others."""
        return self.overrun and self.full(unanswered) > 1

    def full(self, unanswered: int) -> float:
        """How full the loop is with this many requests in hand: 1 is the most that may wait."""
        if not self._requests:
            return 0.0
        wait_seconds = unanswered * self._cpu_seconds / self._requests
        return max(wait_seconds / FULL_SECONDS, unanswered / FULL_REQUESTS)

    def tick(self, now: float, work: LoopWork) -> None:
        """The tick that was due `TICK_SECONDS` after the one before."""
        if self._last is not None:
            self._learn(now, work, *self._last)
        self._last = now, work
        full = self.full(work.unanswered)
        if self._late_seconds < LATE_SECONDS or full < 1:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        elif now - self._full_since > STANDING_SECONDS:
            self.overrun = True
        if full >= 0.5:
            self._busy_at = now
        elif now - self._busy_at > RECOVERED_SECONDS:
            self.overrun = False

    def _learn(self, now: float, work: LoopWork, then: float, before: LoopWork) -> None:
        seconds = now - then
        late = math.exp(-seconds / LATE_MEMORY_SECONDS)
        self._late_seconds = late * self._late_seconds + (1 - late) * (seconds - TICK_SECONDS)
        keep = math.exp(-seconds / MEMORY_SECONDS)
        requests = work.answered - before.answered + REFUSAL_SHARE * (work.refused - before.refused)
        self._requests = self._requests * keep + requests
        self._cpu_seconds = self._cpu_seconds * keep + work.cpu_seconds - before.cpu_seconds
