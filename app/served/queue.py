"""What waits to be written: filled by the event loop, emptied by one thread, bounded in memory."""

from __future__ import annotations

import threading
from collections import deque

from weights.served import ServedRanking


class Queue:
    """`put` is for the event loop, `take` and `wait` for one thread, `close` for either."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._rows: deque[tuple[ServedRanking, int]] = deque()
        self._put_bytes = self._taken_bytes = 0  # since the start; each is written to by one thread only
        self._filled, self._closed = threading.Event(), threading.Event()

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
        """Wait for a row, for at most `seconds`; then for a while more, so that others can join it. Return at once when it is closed."""
        self._filled.clear()
        if self._rows or self._closed.is_set():
            self._filled.set()
        self._filled.wait(seconds)
        self._closed.wait(gather_seconds)

    def close(self) -> None:
        """End every wait from now on."""
        self._closed.set()
        self._filled.set()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()
