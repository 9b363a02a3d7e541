"""The one deadline that a connection has at a time, and those of a request that arrives."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from app.settings import Connections

CLOCK_SECONDS = 0.001  # resolution of uvloop's clock
LEAST_BODY_SECONDS = 1.0  # after slow headers, a body still gets this long
LEAST_BODY_BYTES = 4096  # in each `stall_seconds`


class Deadline:
    """Calls what it was last given when that time has passed; belongs to the event loop.

    Most deadlines are moved before they pass, so a timer is made anew only when it must.
    """

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


class Arrival:
    """Whether a request arrives in time: its headers, then its body, which must not stall. `refuse("slow")` is called where it does not."""

    __slots__ = ("_deadline", "_limits", "_loop", "_until", "begun", "bytes")

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Connections, deadline: Deadline) -> None:
        self.begun = loop.time()
        self.bytes = 0  # received of the present body
        self._loop = loop
        self._limits = limits
        self._deadline = deadline
        self._until = 0.0

    def watch_head(self, refuse: Callable[[str], None]) -> None:
        """A request has begun, and what was read does not end its headers."""
        self._deadline.set(self.begun + self._limits.header_seconds - self._loop.time(), refuse, "slow")

    def watch_body(self, refuse: Callable[[str], None]) -> None:
        """The headers are complete, and what was read does not end the body."""
        self._until = max(self.begun + self._limits.body_seconds, self._loop.time() + LEAST_BODY_SECONDS)
        self._watch(refuse)

    def _watch(self, refuse: Callable[[str], None]) -> None:
        left = self._until - self._loop.time()
        self._deadline.set(min(left, self._limits.stall_seconds), self._check, refuse, self.bytes)

    def _check(self, refuse: Callable[[str], None], bytes_before: int) -> None:
        if self._loop.time() < self._until and self.bytes - bytes_before >= LEAST_BODY_BYTES:
            self._watch(refuse)
        else:
            refuse("slow")


def _nothing() -> None: ...
