"""The queue of bodies that wait to be read: a bounded number of bytes in one turn of the event loop. Knows neither HTTP nor an engine.

Reading the body of a long request takes milliseconds. If every body that has come were read in one turn, a crowd of callers would keep
the loop for longer than they wait, and all of them would leave before their replies. So bodies wait here, in the order in which they
came, and the length of this queue is part of the forecast of a request's end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import NamedTuple

from app.errors import Overloaded

TURN_SECONDS = 0.002  # of reading in one turn; one body is read in any case
REQUEST_BYTES = 2048  # what a request costs besides its bytes, in bytes
MEMORY_SECONDS = 0.5  # of reading, for what a byte costs
SURE_TIMES = 1.5


class Waiting(NamedTuple):
    """A body that has come and is not read yet. `weight`: its bytes, and what its request costs besides."""

    turn: asyncio.Future[None]
    weight: int


class ReadQueue:
    """The bodies of one process that wait to be read. Used by the event loop only."""

    def __init__(self, longest_wait_seconds: float) -> None:
        """`longest_wait_seconds`: no body waits here for longer; 0 means no limit."""
        self._longest_wait_seconds = longest_wait_seconds
        self._queue: deque[Waiting] = deque()
        self._weight = 0  # of the bodies in the queue
        self._begun: float | None = None  # when the present turn began to read, in seconds of `time.perf_counter`
        self._read_weight = 0  # in this turn
        self._memory_seconds = self._memory_weight = 0.0  # of recent turns that read something

    def wait_seconds(self, size: int) -> float:
        """Predicted seconds until a body of so many bytes that comes now would be read; 0 before the first was."""
        return (self._weight + size + REQUEST_BYTES) * self._weight_seconds if self._queue else 0.0

    def check(self, size: int, leaves_in_seconds: float) -> None:
        """Raise Overloaded where a body of so many bytes would wait too long, or its caller leave before it is read."""
        wait, limit = self.wait_seconds(size), self._longest_wait_seconds
        if limit and wait > limit:
            raise Overloaded(
                "Refused on arrival: requests arrive faster than they can be read.", retry_after_seconds=wait - limit
            )
        own = (size + REQUEST_BYTES) * self._weight_seconds
        late = wait - max(leaves_in_seconds, SURE_TIMES * own)
        if late > 0:
            raise Overloaded("Refused on arrival: callers leave before such a wait is over.", retry_after_seconds=late)

    async def take(self, size: int) -> bool:
        """Return when a body of so many bytes may be read; whether it had to wait. What follows without an `await` is its turn."""
        weight = size + REQUEST_BYTES
        if not self._queue and self._has_time(weight):
            self._read(weight)
            return False
        waiting = Waiting(asyncio.get_running_loop().create_future(), weight)
        self._queue.append(waiting)
        self._weight += weight
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.cancelled():  # it is still in the queue, and its caller has left
                self._weight -= weight
            raise
        return True

    @property
    def _weight_seconds(self) -> float:
        return self._memory_seconds / self._memory_weight if self._memory_weight else 0.0

    def _has_time(self, weight: int) -> bool:
        """Whether this turn may read so much more."""
        return self._begun is None or (self._read_weight + weight) * self._weight_seconds <= TURN_SECONDS

    def _read(self, weight: int) -> None:
        if self._begun is None:
            self._begun = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._next)
        self._read_weight += weight

    def _next(self) -> None:
        """The next turn: note what the last one took, and let those who wait longest read."""
        assert self._begun is not None
        seconds = time.perf_counter() - self._begun
        fades = math.exp(-seconds / MEMORY_SECONDS)
        self._memory_seconds = self._memory_seconds * fades + seconds
        self._memory_weight = self._memory_weight * fades + self._read_weight
        self._begun, self._read_weight = None, 0
        while self._queue and (self._queue[0].turn.done() or self._has_time(self._queue[0].weight)):
            waiting = self._queue.popleft()
            if not waiting.turn.done():  # else its caller has left
                self._weight -= waiting.weight
                waiting.turn.set_result(None)
                self._read(waiting.weight)
