"""The queue of bodies that wait to be read: a bounded number of bytes in one turn of the event loop. Knows neither HTTP nor an engine.

Reading the body of a long request takes milliseconds. If every body that has come were read in one turn, a crowd of callers would keep
the loop for longer than they wait, and all of them would leave before their replies. So bodies wait here, and the length of this queue
is part of the forecast of a request's end. Those of one API key are read in the order in which they came. Keys take turns, so that each of
those that wait has as many bytes read as any other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from app.errors import DeadlineExceeded, Overloaded
from app.lateness import PAST_DEADLINE, TOO_LATE, late_seconds

TURN_SECONDS = 0.002  # of reading in one turn; one body is read in any case
REQUEST_BYTES = 2048  # what a request costs besides its bytes, in bytes
MEMORY_SECONDS = 0.5  # of reading, for what a byte costs


class Waiting(NamedTuple):
    """A body that has come and is not read yet. `weight`: its bytes, and what its request costs besides."""

    turn: asyncio.Future[None]
    weight: int


@dataclass(slots=True)
class Line:
    """The bodies of one API key that wait, the oldest first. `weight`: of all of them. `read`: the weight that was read of this key,
    counted on from that of the other keys when it began to wait."""

    read: int
    weight: int = 0
    bodies: deque[Waiting] = field(default_factory=deque)


class ReadQueue:
    """The bodies of one process that wait to be read. Used by the event loop only."""

    def __init__(self, longest_wait_seconds: float) -> None:
        """`longest_wait_seconds`: no body waits here for longer; 0 means no limit."""
        self._longest_wait_seconds = longest_wait_seconds
        self._lines: dict[str | None, Line] = {}  # of the keys that have waited since nothing waited last
        self._level = 0  # `Line.read` of the key that was read last, before that
        self._begun: float | None = None  # when the present turn began to read, in seconds of `time.perf_counter`
        self._read_weight = 0  # in this turn
        self._memory_seconds = self._memory_weight = 0.0  # of recent turns that read something

    def wait_seconds(self, size: int, key: str | None) -> float:
        """Predicted seconds until a body of so many bytes of this key that comes now would be read; 0 before the first was. Its key's
        bodies are read before it, and of each other key at most as many bytes."""
        if not self._lines:
            return 0.0
        own = size + REQUEST_BYTES + (self._lines[key].weight if key in self._lines else 0)
        others = sum(min(line.weight, own) for other, line in self._lines.items() if other != key)
        return (own + others) * self._weight_seconds

    def check(self, size: int, key: str | None, leaves_in_seconds: float, ends_in_seconds: float) -> None:
        """Raise Overloaded where a body of so many bytes of this key would wait too long, or its caller leave before it is read;
        DeadlineExceeded where its deadline would pass before that."""
        wait, limit = self.wait_seconds(size, key), self._longest_wait_seconds
        if limit and wait > limit:
            raise Overloaded(
                "Refused on arrival: requests arrive faster than they can be read.", retry_after_seconds=wait - limit
            )
        own = (size + REQUEST_BYTES) * self._weight_seconds
        late = late_seconds(wait, min(leaves_in_seconds, ends_in_seconds), own)
        if late > 0 and ends_in_seconds <= leaves_in_seconds:
            raise DeadlineExceeded(f"Refused on arrival: {PAST_DEADLINE}.", retry_after_seconds=late)
        if late > 0:
            raise Overloaded(f"Refused on arrival: {TOO_LATE}.", retry_after_seconds=late)

    async def take(self, size: int, key: str | None, seconds: float) -> bool:
        """Return when a body of so many bytes of this key may be read; whether it had to wait. What follows without an `await` is its turn.

        Raises DeadlineExceeded where that takes longer than so many seconds.
        """
        weight = size + REQUEST_BYTES
        if not self._lines and self._has_time(weight):
            self._read(weight)
            return False
        line = self._lines.setdefault(key, Line(self._level))
        if not line.bodies:
            line.read = max(line.read, self._level)
        waiting = Waiting(asyncio.get_running_loop().create_future(), weight)
        line.bodies.append(waiting)
        line.weight += weight
        try:
            async with asyncio.timeout(seconds):
                await waiting.turn
        except TimeoutError:
            raise DeadlineExceeded from None
        finally:
            if waiting.turn.cancelled():  # it is still in the queue, and nobody waits for it
                line.weight -= weight
        return True

    def add(self, size: int) -> None:
        """Count so many more bytes in this turn: what was read is longer than was said."""
        self._read(size)

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
        """The next turn: note what the last one took, and let those whose turn it is read."""
        assert self._begun is not None
        seconds = time.perf_counter() - self._begun
        fades = math.exp(-seconds / MEMORY_SECONDS)
        self._memory_seconds = self._memory_seconds * fades + seconds
        self._memory_weight = self._memory_weight * fades + self._read_weight
        self._begun, self._read_weight = None, 0
        while waiting := [line for line in self._lines.values() if line.bodies]:
            line = min(waiting, key=lambda each: each.read)
            turn, weight = line.bodies[0]
            if not turn.done():  # else nobody waits for it
                if not self._has_time(weight):
                    return
                turn.set_result(None)
                self._read(weight)
                self._level = line.read
                line.read += weight
                line.weight -= weight
            line.bodies.popleft()
        self._lines.clear()
