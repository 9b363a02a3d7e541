"""The timer around `scheduling.loop_lag`: ticks of the event loop while requests come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.scheduling.job import Clock
from app.scheduling.loop_lag import RECOVERED_SECONDS, TICK_SECONDS, LoopLag, Work


class LoopClock:
    """Used by the event loop only; seconds of `clock`. `work` says what the loop has done and has in hand."""

    def __init__(self, clock: Clock, work: Callable[[], Work]) -> None:
        self.lag = LoopLag()
        self._clock = clock
        self._work = work
        self._is_ticking = False
        self._last_request = 0.0

    def request_arrives(self) -> None:
        """Ticks go on for a while after the last of these."""
        self._last_request = self._clock()
        if not self._is_ticking:
            self._is_ticking, self.lag = True, LoopLag()
            self._tick()

    def _tick(self) -> None:
        now = self._clock()
        self.lag.tick(now, self._work())
        self._is_ticking = now - self._last_request < RECOVERED_SECONDS  # an idle process need not wake up
        if self._is_ticking:
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
