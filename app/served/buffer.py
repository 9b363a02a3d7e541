"""What waits to be written: filled by the event loop, emptied by one thread, bounded in memory."""

from __future__ import annotations

import threading
from collections import deque

from weights.served import ServedRanking

PLENTY = 8  # the thread does not gather beyond this fraction of the memory


class Queue:
    """`put` is for the event loop, `take` and `wait` for one thread, `close` for either."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._rows: deque[tuple[ServedRanking, int]] = deque()
        self._put_bytes = self._taken_bytes = 0  # since the start; each is written to by one thread only
        self._filled, self._plenty = threading.Event(), threading.Event()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, row: ServedRanking, size_bytes: int) -> bool:
        """Add a row that takes this much memory; return False where there is no room for it."""
        if self._put_bytes - self._taken_bytes + size_bytes > self.most_bytes:
            return False
        self._put_bytes += size_bytes
        self._rows.append((row, size_bytes))
        if not self._filled.is_set():
            self._filled.set()
        if self._put_bytes - self._taken_bytes > self.most_bytes // PLENTY and not self._plenty.is_set():
            self._plenty.set()
        return True

    def take(self, most: int) -> list[ServedRanking]:
        """Take the oldest rows, at most so many."""
        rows: list[ServedRanking] = []
        while self._rows and len(rows) < most:
            row, size_bytes = self._rows.popleft()
            self._taken_bytes += size_bytes
            rows.append(row)
        return rows

    def wait(self, seconds: float, gather_seconds: float) -> None:
        """Wait for a row, for at most `seconds`; then, for at most `gather_seconds`, until there are plenty. Return at once when it is
        closed."""
        self._filled.clear()
        self._plenty.clear()
        if self._rows:
            self._filled.set()
        if self.is_closed:
            return
        if self._filled.wait(seconds):
            self._plenty.wait(gather_seconds)

    def close(self) -> None:
        """End every wait from now on."""
        self.is_closed = True
        self._filled.set()
        self._plenty.set()
