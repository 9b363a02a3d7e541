"""Refusals that wait: who sends again at once after a 429 gets the next one later, so that refusing costs those who are served little.

connection                                           its 429 is written
was not refused within the last `REPEAT_SECONDS`     at once
asks again sooner, as no caller does who waits       after `HOLD_SECONDS`; at once where so many are held already, and when
for the Retry-After of at least a second             the process drains
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.telemetry.metrics import Metrics

REPEAT_SECONDS = 0.9
HOLD_SECONDS = 0.25


class Refusals:
    """Of all connections of a process; at most `most` wait."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most = most
        self._count = metrics.refusals_held
        self._held: dict[Callable[[], None], asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, write: Callable[[], None]) -> bool:
        """Whether the refusal waits; then `write` is called once, later, unless it is forgotten before."""
        if len(self._held) >= self.most:
            return False
        self._held[write] = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._end, write)
        self._count.inc()
        return True

    def forget(self, write: Callable[[], None]) -> None:
        """Its client has disconnected."""
        if (timer := self._held.pop(write, None)) is not None:
            timer.cancel()

    def end_all(self) -> None:
        """Write all of them now, and hold none from here on."""
        self.most = 0
        for write, timer in list(self._held.items()):
            timer.cancel()
            self._end(write)

    def _end(self, write: Callable[[], None]) -> None:
        if self._held.pop(write, None) is not None:
            write()
