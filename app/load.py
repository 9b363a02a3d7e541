"""The load of this process, in units of what it should carry: Ray Serve and Kubernetes count replicas by it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

BUSY = 0.6  # share of the time that engine or event loop may work; beyond it requests wait for one another
WAIT_SECONDS = 0.02  # a request may wait this long behind the running forward
MOST = 2.0  # a flooded process cannot tell how much more than twice its load is asked
TOLERANCE = 0.1
HALF_LIFE_SECONDS = 30.0


def load_of(busy: float, wait_seconds: float) -> float:
    """1 if a process has as much to do as it should: the larger of its busy time and a request's wait, each by its limit."""
    return min(MOST, max(busy / BUSY, wait_seconds / WAIT_SECONDS))


def replicas_for(running: int, loads: list[float]) -> int:
    """How many replicas would each have a load of 1, given those that run now. Kubernetes' formula: differences of a tenth are ignored."""
    mean = sum(loads) / max(1, len(loads))
    return running if abs(mean - 1) <= TOLERANCE else max(1, math.ceil(running * mean - 1e-9))


class Load:
    """Averages of the last half minute. `busy_seconds`: of all forwards so far; `wait_seconds`: of a request that comes now, behind the
    forward that runs. Belongs to the event loop, whose own time counts too."""

    def __init__(
        self, clock: Callable[[], float], busy_seconds: Callable[[], float], wait_seconds: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._busy_seconds = busy_seconds
        self._wait_seconds = wait_seconds
        self._before = clock(), 0.0, 0.0
        self._engine = self._loop = self._wait = 0.0

    @property
    def value(self) -> float:
        """As `load_of`."""
        return load_of(max(self._engine, self._loop), self._wait)

    def look(self) -> None:
        """Called every half second or so."""
        now = self._clock(), self._busy_seconds(), time.thread_time()
        seconds, engine, loop = (after - before for after, before in zip(now, self._before, strict=True))
        if seconds <= 0:
            return
        self._before = now
        keep = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        figures = engine / seconds, loop / seconds, self._wait_seconds()
        self._engine, self._loop, self._wait = (
            old * keep + new * (1 - keep)
            for old, new in zip((self._engine, self._loop, self._wait), figures, strict=True)
        )
