"""What the connections of a process share: budgets, deadlines, refusals that wait, whether the process drains.

A caller that retries at once after a 429 gets its next 429 later, so that refusals take little time from the requests that are served:

connection                                           its 429 is written
was not refused within the last `REPEAT_SECONDS`     at once
asks again sooner, as no caller does who waits       after `HOLD_SECONDS`; at once where so many are held already, and when
for the Retry-After of at least a second             the process drains
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from email.utils import formatdate
from typing import Protocol

from app.budgets import Budget
from app.settings import Settings
from app.telemetry.metrics import Metrics

REPEAT_SECONDS = 0.9
HOLD_SECONDS = 0.25
HELD_REFUSALS = 1024  # most 429s held at once because their callers retried within `REPEAT_SECONDS`


class Reader(Protocol):
    """What an observer needs of a connection. `due_at`: its deadline, in seconds of the loop's clock."""

    due_at: float

    def pass_deadline(self) -> None:
        """Act on its deadline, which has passed."""
        ...

    def shutdown(self) -> None:
        """End it once no reply is pending."""
        ...

    def cut(self, reason: str) -> None:
        """Abort it at once, dropping what is unread."""
        ...


class Observer:
    """State shared by all connections of the process. Used in the event loop only."""

    def __init__(self, metrics: Metrics, settings: Settings) -> None:
        self.draining = False
        self.resting = 0  # rests in progress on all connections: their next requests wait for those of others
        self.open: set[Reader] = set()
        self.date = b""  # the Date header line, updated by `tick`
        self.tick()
        self.refusals = Refusals(HELD_REFUSALS, metrics)
        self.connections = metrics.watch_budget("connections", Budget(settings.budgets.connections))
        self.body_bytes = metrics.watch_budget("body_bytes", Budget(settings.limits.buffered_bytes))
        self.reply_bytes = metrics.watch_budget("reply_bytes", Budget(settings.limits.buffered_bytes))
        self._closed = metrics.connections_closed
        self._unsent: dict[Reader, int] = {}  # by connection, the longest paused first

    def tick(self) -> None:
        """Update the Date header; to be called every second."""
        self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()

    def look(self, now: float) -> None:
        """Act on all deadlines before `now`, in the loop's time. Called often, so that a deadline needs no timer of its own."""
        for reader in [reader for reader in self.open if reader.due_at <= now]:
            reader.pass_deadline()

    def closed(self, reason: str) -> None:
        """Count a connection that the server closed."""
        self._closed.labels(reason).inc()

    def drain(self) -> None:
        """From now on every reply ends its connection, and no refusal is held."""
        self.draining = True
        self.refusals.end_all()

    def unsent(self, reader: Reader, count: int) -> None:
        """Record how many unsent bytes this connection holds. Beyond the budget, cut the connections that have been paused longest."""
        self.reply_bytes.give(self._unsent.get(reader, 0))
        if not count:
            self._unsent.pop(reader, None)
            return
        self._unsent[reader] = count  # keeps its place if it has one
        self.reply_bytes.used += count
        while self.reply_bytes.used > self.reply_bytes.limit:
            self.reply_bytes.refused += 1
            oldest = next(iter(self._unsent))
            self.unsent(oldest, 0)
            oldest.cut("reply_budget")


class Refusals:
    """The 429s that are held back, for all connections of the process; at most `most` at once."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most = most
        self._count = metrics.refusals_held
        self._held: dict[Callable[[], None], asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, write: Callable[[], None]) -> bool:
        """Hold a refusal and call `write` after `HOLD_SECONDS`, unless it is forgotten first. Return False if too many are held."""
        if len(self._held) >= self.most:
            return False
        self._held[write] = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._end, write)
        self._count.inc()
        return True

    def forget(self, write: Callable[[], None]) -> None:
        """Drop a held refusal: its client has disconnected."""
        if (timer := self._held.pop(write, None)) is not None:
            timer.cancel()

    def end_all(self) -> None:
        """Write all held refusals now, and hold none from now on."""
        self.most = 0
        for write, timer in list(self._held.items()):
            timer.cancel()
            self._end(write)

    def _end(self, write: Callable[[], None]) -> None:
        if self._held.pop(write, None) is not None:
            write()
