"""The timers around `scheduling.loop_lag`: ticks of the event loop while requests come, and how long its present turn has read them."""

from __future__ import annotations

import asyncio

from app.scheduling.job import Clock
from app.scheduling.loop_lag import RECOVERED_SECONDS, TICK_SECONDS, LoopLag


class LoopClock:
    """Used by the event loop only; seconds of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self.lag = LoopLag()
        self._clock = clock
        self._is_ticking = False
        self._last_request = 0.0
        self._turn_began: float | None = None

    def request_arrives(self) -> float:
        """Seconds since the first request of this turn of the loop: 0 for the first, which begins the turn."""
        now = self._last_request = self._clock()
        if not self._is_ticking:
            self._is_ticking, self.lag = True, LoopLag()
            self._tick()
        if self._turn_began is None:
            self._turn_began = now
            asyncio.get_running_loop().call_soon(self._end_turn)
        return now - self._turn_began

    def _end_turn(self) -> None:
        self._turn_began = None

    def _tick(self) -> None:
        now = self._clock()
        self.lag.tick(now)
        self._is_ticking = now - self._last_request < RECOVERED_SECONDS  # an idle process need not wake up
        if self._is_ticking:
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
