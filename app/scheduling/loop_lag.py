"""Whether the event loop itself is overrun, and how long its present turn has been admitting. Knows nothing of engines or queues.

Where parsing, not the engine, is what runs out, requests wait in socket buffers, unseen by any queue. The sign is a loop that
is late all the time, as a standing queue is one that never empties; a burst makes it late once. From then on, until the loop has
been on time for a while, requests that a turn of the loop has no time for are refused unread.
"""

from __future__ import annotations

import asyncio

from app.scheduling.job import Clock

TURN_SECONDS = 0.0015  # longer, and more are answered but later: every turn is waited for three times, to be read, run and answered
TICK_SECONDS = 0.01
LATE_SECONDS = (
    0.025  # a reply takes three turns; a hundred callers who each wait for their reply make no turn this long on end
)
SPARE_SECONDS = 0.005  # a tick that is less late than this shows a loop with time to spare
STANDING_SECONDS = 0.1  # late for so long on end, after the first late tick: a pause of any length makes one tick late
RECOVERED_SECONDS = 1.0  # on time for so long on end, and it is over: refusing gives the loop moments to spare
QUIET_SECONDS = 1.0  # without requests, the ticking stops


class LoopTurn:
    """Used by the event loop only; `clock` in seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: float | None = None
        self._asked = 0.0
        self._due: float | None = None
        self._late_since: float | None = None  # the first of the late ticks without one on time between
        self._busy = 0.0  # when the loop last had no time to spare
        self._overrun = False

    def is_over(self) -> bool:
        """Whether the loop is overrun and this turn has admitted for `TURN_SECONDS`. The first question begins a turn."""
        now = self._asked = self._clock()
        if self._due is None:
            self._tick_at(now + TICK_SECONDS)
        if self._began is None:
            self._began = now
            asyncio.get_running_loop().call_soon(self._end)
        return self._overrun and now - self._began > TURN_SECONDS

    def _end(self) -> None:
        self._began = None

    def _tick_at(self, due: float) -> None:
        self._due = due
        asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now = self._clock()
        late = now - (self._due or now)
        if late < LATE_SECONDS:
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now
        elif now - self._late_since > STANDING_SECONDS:
            self._overrun = True
        if late >= SPARE_SECONDS:
            self._busy = now
        elif now - self._busy > RECOVERED_SECONDS:
            self._overrun = False
        if now - self._asked > QUIET_SECONDS:
            self._due, self._late_since, self._overrun = None, None, False
        else:
            self._tick_at(now + TICK_SECONDS)
