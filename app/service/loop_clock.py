"""The timers around `scheduling.loop_lag`: ticks of the event loop, and how long its present turn has been reading requests."""

from __future__ import annotations

import asyncio

from app.scheduling.job import Clock
from app.scheduling.loop_lag import TICK_SECONDS, LoopLag


class LoopClock:
    """Used by the event loop only; seconds of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self.lag = LoopLag()
        self._clock = clock
        self._turn_began: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick from now on."""
        self._tick()

    def stop(self) -> None:
        """Tick no more."""
        if self._timer is not None:
            self._timer.cancel()

    def request_arrives(self) -> float:
        """Seconds since the first request of this turn of the loop: 0 for the first, which begins the turn."""
        now = self._clock()
        if self._turn_began is None:
            self._turn_began = now
            asyncio.get_running_loop().call_soon(self._end_turn)
        return now - self._turn_began

    def _tick(self) -> None:
        self.lag.tick(self._clock())
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _end_turn(self) -> None:
        self._turn_began = None
