"""The one deadline that a connection has at a time. Most are moved before they pass, so a timer is made anew only when it must."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

CLOCK_SECONDS = 0.001  # resolution of uvloop's clock


class Deadline:
    """Calls what it was last given when that time has passed; belongs to the event loop."""

    __slots__ = ("_act", "_arguments", "_ends", "_loop", "_timer", "at")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.at = math.inf  # in seconds of the loop's clock
        self._act: Callable[..., None] = _nothing
        self._arguments: tuple[Any, ...] = ()
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None  # looks at the deadline, then or before
        self._ends = math.inf

    def set(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call that so many seconds from now, in place of what was set before. An earlier timer stays: it will look again."""
        self.at = self._loop.time() + seconds
        self._act, self._arguments = act, arguments
        if self.at < self._ends:
            self._set_timer(self.at)

    @property
    def is_set(self) -> bool:
        """Whether there is one now."""
        return self.at < math.inf

    def clear(self) -> None:
        """None for now."""
        self.at = math.inf

    def close(self) -> None:
        """None any more, and nothing kept of what it would have called."""
        self._act, self._arguments = _nothing, ()
        self.clear()
        self._set_timer(None)

    def _set_timer(self, until: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if until is None else self._loop.call_at(until, self._look)
        self._ends = math.inf if until is None else until

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self.at:
            self._set_timer(None)
            self.clear()
            self._act(*self._arguments)
        else:
            self._set_timer(max(self.at, now + CLOCK_SECONDS) if self.at < math.inf else None)


def _nothing() -> None: ...
