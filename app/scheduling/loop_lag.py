"""Whether requests arrive faster than the event loop can read them, judged by how late its ticks are. Pure; knows no queue.

With a small model parsing runs out before the engine does, and requests wait in socket buffers that no queue counts. A loop
in that state is late all the time, whereas a burst or a pause makes it late once. An *overrun* refuses requests unread, but for
those that each turn of the loop has time for: a reply takes three turns (read, run, answer), so turns must be short.

| rule | refuses | by which quantity | limit |
|---|---|---|---|
| begin | | every tick late, counted from the first late one | `LATE_SECONDS` each, for `STANDING_SECONDS` |
| while it lasts | what a turn of the loop has no time for | time since the turn's first request | `TURN_SECONDS` |
| end | | every tick on time | `SPARE_SECONDS` each, for `RECOVERED_SECONDS` |

None of them is a setting: they follow from what parsing and refusing cost (measured in docs/decisions/2026-11-20-own-listeners.md).
"""

from __future__ import annotations

TICK_SECONDS = 0.01  # from one tick to when the next is due
LATE_SECONDS = 0.025  # a hundred callers who each wait for their reply make no turn this long on end
STANDING_SECONDS = 0.1
TURN_SECONDS = 0.0015  # longer, and more are answered but later
SPARE_SECONDS = 0.005  # a tick that is less late shows a loop with time to spare
RECOVERED_SECONDS = 1.0  # with less, the refusing itself, which gives the loop time to spare, would end the overrun


class LoopLag:
    """Told the time of each tick, in seconds of any clock."""

    def __init__(self) -> None:
        self.overrun = False
        self._last_tick: float | None = None
        self._late_since: float | None = None  # the first of the late ticks without one on time between
        self._busy_at = 0.0  # when the loop last had no time to spare

    def tick(self, now: float) -> None:
        """The tick that was due `TICK_SECONDS` after the one before."""
        late = 0.0 if self._last_tick is None else now - self._last_tick - TICK_SECONDS
        self._last_tick = now
        if late < LATE_SECONDS:
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now
        elif now - self._late_since > STANDING_SECONDS:
            self.overrun = True
        if late >= SPARE_SECONDS:
            self._busy_at = now
        elif now - self._busy_at > RECOVERED_SECONDS:
            self.overrun = False

    def refuses(self, turn_seconds: float) -> bool:
        """Whether a request is refused that comes so long after the first one of its turn of the loop."""
        return self.overrun and turn_seconds > TURN_SECONDS
