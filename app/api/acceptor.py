"""Takes the connections that come to a listening socket, begins a few of them in each turn of the event loop, and says where it cannot.

uvloop's own server takes and begins one connection in each turn, in the order in which they came. When callers come faster than that, give
up and come again, all that it begins are old, and their callers leave before the reply. If file descriptors run out, it closes those who
come without a word.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog
from prometheus_client import Counter

MOST_TAKEN = 64  # connections from the system's queue in one turn; with several workers, the others take the rest
MOST_BEGUN = 2  # in one turn, of which one is the oldest and the others are the newest
MOST_WAITING = 1024
LOOK_SECONDS = 0.1  # between two looks for those who have left
PAUSE_SECONDS = 0.1  # between two attempts where there is no room; meanwhile connections wait in the system's queue
SAME_SHORTAGE_SECONDS = 10.0  # between two log lines about it
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ESTABLISHED = 1  # tcpi_state of Linux' struct tcp_info, its first byte

log = structlog.get_logger("app.api.acceptor")


class Taken(NamedTuple):
    """A connection that is not begun yet. `since`: seconds of the loop's clock."""

    connection: socket.socket
    since: float

    def has_left(self) -> bool:
        """Whether the client has closed the connection, or its sending half."""
        return self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED


class Acceptor:
    """Gives each connection to one socket a protocol from `make`. Used by the event loop only; begins at once.

    It stands in for an `asyncio.Server`. `shortages` counts the attempts that failed for lack of file descriptors or memory.
    """

    def __init__(self, listener: socket.socket, make: Callable[[], asyncio.Protocol], shortages: Counter) -> None:
        self.listener = listener
        self.make = make
        self.shortages = shortages
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Taken] = deque()  # the oldest first
        self._turn: asyncio.Handle | None = None  # in which some of them are begun
        self._look: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()  # that make the transports of connections
        self._logged_at = -math.inf  # seconds of the loop's clock
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self.accept)

    def accept(self) -> None:
        """Take connections from the system's queue."""
        self._take(MOST_TAKEN)
        if self._turn is None:
            self._begin_some()

    def close(self) -> None:
        """Stop listening. Begins all who have connected by now: closing the socket resets those who wait in the system's queue."""
        if self.listener.fileno() < 0:
            return
        self._loop.remove_reader(self.listener)
        if self._pause is not None:
            self._pause.cancel()  # else it would be forgotten where there is still no room
        self._take(math.inf)
        for handle in (self._pause, self._look, self._turn):
            if handle is not None:
                handle.cancel()
        self.listener.close()
        while self._waiting:
            self._begin(self._waiting.popleft())

    async def wait_closed(self) -> None:
        """Return at once: a closed acceptor has nothing under way but connections, for which the server waits."""

    def _take(self, most: float) -> None:
        while most > 0:
            try:
                connection, _ = self.listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in SHORTAGES:
                    self._rest(error)
                    return
            else:
                connection.setblocking(False)
                self._waiting.append(Taken(connection, self._loop.time()))
            most -= 1

    def _begin_some(self) -> None:
        """Begin the newest connections, and the oldest one: callers who came now still wait, and who is patient has a turn too."""
        self._turn = None
        for place in range(MOST_BEGUN):
            if not self._waiting:
                return
            self._begin(self._waiting.pop() if place else self._waiting.popleft())
        if self._waiting:
            self._turn = self._loop.call_soon(self._begin_some)
            if self._look is None:
                self._look = self._loop.call_later(LOOK_SECONDS, self._drop_leavers)

    def _begin(self, taken: Taken) -> None:
        task = self._loop.create_task(self._loop.connect_accepted_socket(self.make, taken.connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _drop_leavers(self) -> None:
        """Close the connections of those who left while they waited, and the oldest where too many wait."""
        self._look = None
        until = self._loop.time() - LOOK_SECONDS
        waiting: deque[Taken] = deque()
        for taken in self._waiting:
            if taken.since < until and taken.has_left():
                taken.connection.close()
            else:
                waiting.append(taken)
        while len(waiting) > MOST_WAITING:
            waiting.popleft().connection.close()
        self._waiting = waiting
        if waiting:
            self._look = self._loop.call_later(LOOK_SECONDS, self._drop_leavers)

    def _rest(self, error: OSError) -> None:
        """Try again after a pause: the system reports those who wait in each turn, and nothing changes so soon."""
        self.shortages.inc()
        now = self._loop.time()
        if now >= self._logged_at + SAME_SHORTAGE_SECONDS:
            self._logged_at = now
            log.error("connections_not_taken", reason=error.strerror)
        self._loop.remove_reader(self.listener)
        self._pause = self._loop.call_later(PAUSE_SECONDS, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self.listener, self.accept)
        self.accept()
