"""Whether the event loop has more requests in hand than it can answer soon. Knows no queue.

With a small model the Python around it runs out before the engine does. The loop's *wait* is the time in which it answers what
is admitted: unanswered requests, times the processor time that one took it lately. A burst makes it long once; callers who send
again as soon as they are answered, or more who come than can be served, make it long all the time. An *overrun* refuses what
would wait longer, so that those who are admitted wait no longer than in a loop that is just full.

| rule | refuses | by which quantity | limit |
|---|---|---|---|
| begin | | the wait at every tick, and how late ticks are on average | `WAIT_SECONDS`, `LATE_SECONDS`, for `STANDING_SECONDS` |
| while it lasts | what would wait longer | the wait | `WAIT_SECONDS` |
| end | | the wait at every tick | half of it, for `RECOVERED_SECONDS` |

A loop whose ticks are on time waits for its engine, and how long that may take is admission's business. None of the limits is a
setting: they follow from what reading and refusing cost (docs/decisions/2026-11-21-impatient-callers.md).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import NamedTuple

Clock = Callable[[], float]  # seconds that never run backwards

TICK_SECONDS = 0.01  # from one tick to the next
FULL_SECONDS = 0.025  # of work
FULL_REQUESTS = 64  # more may be 25 ms of work, but callers would wait many times as long
LATE_SECONDS = 0.002  # with less, the loop has time to spare
STANDING_SECONDS = 0.1
RECOVERED_SECONDS = 1.0  # with less, the refusals themselves would shorten the wait and end the overrun
MEMORY_SECONDS = 0.5  # of what a request costs
LATE_MEMORY_SECONDS = 0.1
REFUSAL_SHARE = 0.1  # of what a request costs that is answered


class Work(NamedTuple):
    """What the loop has done and has in hand: processor seconds, answered and refused requests as totals, unanswered ones now."""

    cpu_seconds: float
    answered: int
    refused: int
    unanswered: int


class LoopLag:
    """Judges the loop from its ticks, in seconds of any clock."""

    def __init__(self) -> None:
        self.overrun = False
        self._last: tuple[float, Work] | None = None
        self._long_since: float | None = None  # the first of the ticks with a long wait, without another between
        self._busy_at = -math.inf  # when the wait was last more than half of what it may be
        self._cpu_seconds = self._requests = 0.0  # of the recent past
        self._late_seconds = 0.0  # on average

    @property
    def is_short_of_time(self) -> bool:
        """Whether other work of the loop, such as refusing, takes time from the requests that it serves."""
        return self.overrun or self._late_seconds >= LATE_SECONDS

    def wait_seconds(self, unanswered: int) -> float:
        """Seconds in which the loop answers this many requests."""
        return unanswered * self._cpu_seconds / self._requests if self._requests else 0.0

    def full(self, unanswered: int) -> float:
        """How full the loop is with this many requests in hand: 1 is the most that may wait."""
        return max(self.wait_seconds(unanswered) / FULL_SECONDS, unanswered / FULL_REQUESTS) if self._requests else 0.0

    def tick(self, now: float, work: Work) -> None:
        """The tick that was due `TICK_SECONDS` after the one before."""
        if self._last is not None:
            then, before = self._last
            self._learn(now - then, before, work)
        self._last = now, work
        full = self.full(work.unanswered)
        if self._late_seconds < LATE_SECONDS or full < 1:
            self._long_since = None
        elif self._long_since is None:
            self._long_since = now
        elif now - self._long_since > STANDING_SECONDS:
            self.overrun = True
        if full >= 0.5:
            self._busy_at = now
        elif now - self._busy_at > RECOVERED_SECONDS:
            self.overrun = False

    def refuses(self, unanswered: int) -> bool:
        """Whether to refuse a request that arrives behind this many others."""
        return self.overrun and self.full(unanswered) > 1

    def _learn(self, seconds: float, before: Work, now: Work) -> None:
        share = math.exp(-seconds / LATE_MEMORY_SECONDS)
        self._late_seconds = share * self._late_seconds + (1 - share) * (seconds - TICK_SECONDS)
        keep = math.exp(-seconds / MEMORY_SECONDS)
        requests = now.answered - before.answered + REFUSAL_SHARE * (now.refused - before.refused)
        self._requests = self._requests * keep + requests
        self._cpu_seconds = self._cpu_seconds * keep + now.cpu_seconds - before.cpu_seconds


class LoopClock:
    """Ticks of the event loop while requests come; seconds of `clock`. `work` says what the loop has done and has in hand, at each tick."""

    def __init__(self, clock: Clock, work: Callable[[], Work]) -> None:
        self.lag = LoopLag()
        self.is_ticking = False
        self.last_request = 0.0
        self._clock = clock
        self._work = work

    def begin(self) -> None:
        """Start ticking: a request has come. Ticks go on for a while after the last request."""
        self.is_ticking, self.lag = True, LoopLag()
        self.last_request = self._clock()
        self._tick()

    def _tick(self) -> None:
        now = self._clock()
        self.lag.tick(now, self._work())
        self.is_ticking = now - self.last_request < RECOVERED_SECONDS  # an idle process does not wake up
        if self.is_ticking:
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
