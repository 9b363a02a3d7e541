"""What the connections of a process share: budgets, refusals that wait, a count of those that the server closed, whether it drains."""

from __future__ import annotations

from email.utils import formatdate
from typing import Protocol

from app.budgets import Budget
from app.server.patience import Refusals
from app.settings import Settings
from app.telemetry.metrics import Metrics

HELD_REFUSALS = 1024  # most 429s that wait because their callers sent again within a second of the last one


class Reader(Protocol):
    """A connection, as it is known here."""

    def shutdown(self) -> None:
        """End it as soon as nothing is pending on it."""
        ...

    def cut_for_room(self) -> None:
        """End it, and forget what is unread."""
        ...


class Observer:
    """Belongs to the event loop."""

    def __init__(self, metrics: Metrics, settings: Settings) -> None:
        self.draining = False
        self.resting = 0  # connections, whose next requests wait for those of others
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
        """To be called every second."""
        self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()

    def closed(self, reason: str) -> None:
        """The server has closed a connection."""
        self._closed.labels(reason).inc()

    def drain(self) -> None:
        """From here on every reply ends its connection, and none waits."""
        self.draining = True
        self.refusals.end_all()

    def unsent(self, reader: Reader, count: int) -> None:
        """So many bytes wait for this connection's client. Beyond the budget, who has waited longest is cut off."""
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
            oldest.cut_for_room()
