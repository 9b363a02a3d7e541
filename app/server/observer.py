"""What the connections of a process share: budgets, deadlines, refusals that wait, whether the process drains.

Who sends again at once after a 429 gets the next one later, so that refusing costs those who are served little:

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
HELD_REFUSALS = 1024  # most 429s that wait because their callers sent again within a second of the last one


class Reader(Protocol):
    """A connection, as it is known here. `due_at`: its deadline, in seconds of the loop's clock."""

    due_at: float

    def pass_deadline(self) -> None:
        """Do what follows from its deadline, which has passed."""
        ...

    def shutdown(self) -> None:
        """End it as soon as nothing is pending on it."""
        ...

    def cut(self, reason: str) -> None:
        """End it at once, and forget what is unread."""
        ...


class Observer:
    """Belongs to the event loop."""

    def __init__(self, metrics: Metrics, settings: Settings) -> None:
        self.draining = False
        self.resting = 0  # connections that rest: their next requests wait for those of others
        self.open: set[Reader] = set()
        self.date = b""  # a header line, written anew by `tick`
        self.tick()
        self.refusals = Refusals(HELD_REFUSALS, metrics)
        self.connections = metrics.watch_budget("connections", Budget(settings.budgets.connections))
        self.body_bytes = metrics.watch_budget("body_bytes", Budget(settings.limits.buffered_bytes))
        self.reply_bytes = metrics.watch_budget("reply_bytes", Budget(settings.limits.buffered_bytes))
        self._closed = metrics.connections_closed
        self._unsent: dict[Reader, int] = {}  # by connection, the one that was paused first in front

    def tick(self) -> None:
        """Called every second."""
        self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()

    def look(self, now: float) -> None:
        """Tell connections whose deadline has passed. Called often, with the loop's time, so that setting a deadline costs nothing."""
        for reader in [reader for reader in self.open if reader.due_at <= now]:
            reader.pass_deadline()

    def closed(self, reason: str) -> None:
        """The server has closed a connection."""
        self._closed.labels(reason).inc()

    def drain(self) -> None:
        """From now on every reply closes its connection, and no refusal waits."""
        self.draining = True
        self.refusals.end_all()

    def unsent(self, reader: Reader, count: int) -> None:
        """Set how many bytes wait for this connection's client. Beyond the budget the connection that has waited longest is cut off."""
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
    """Refusals that wait, of all connections of a process; at most `most`."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most = most
        self._count = metrics.refusals_held
        self._held: dict[Callable[[], None], asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, write: Callable[[], None]) -> bool:
        """Hold a refusal back if there is room; return whether. `write` is then called once, later, unless `forget` comes first."""
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
        """Write all of them now and hold none from now on."""
        self.most = 0
        for write, timer in list(self._held.items()):
            timer.cancel()
            self._end(write)

    def _end(self, write: Callable[[], None]) -> None:
        if self._held.pop(write, None) is not None:
            write()
