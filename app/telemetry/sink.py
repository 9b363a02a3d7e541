"""Takes log lines from any thread and writes them from one of its own, so that a reader that stalls or dies stops nobody else."""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import structlog

from app.budgets import BUFFER_BYTES

BLOCK_BYTES = 4096  # POSIX' PIPE_BUF on Linux: a pipe takes such a write whole or not at all
LINE_OVERHEAD_BYTES = 64  # of a waiting line, beside its characters
GATHER_SECONDS = 0.02  # lines of this time are written in one turn of this thread, which holds up other threads
RETRY_SECONDS = 0.2
STALL_SECONDS = 1.0  # how long `drain` waits for a reader that takes nothing
DRAIN_SECONDS = 5.0  # and for one that is slow
DROPPABLE_SHARE = 0.75  # share of the buffer that droppable lines, of successes, may fill; the rest is for all others
SLOW, FAILED, STOPPED = REASONS = ("reader_slow", "write_failed", "stopped")


class Sink:
    """A text stream over a descriptor. Nothing here raises or blocks: beyond `max_bytes` of waiting lines, new ones are dropped.

    `dropped` counts dropped lines by reason. A log line reports them once half of the buffer is free again.
    """

    def __init__(self, descriptor: int, max_bytes: int = BUFFER_BYTES) -> None:
        self.max_bytes = max_bytes
        self.waiting_bytes = 0  # of lines not yet written, including those in a system call
        self.dropped = dict.fromkeys(REASONS, 0)
        self._descriptor = descriptor
        self._lines: deque[str] = deque()
        self._lock = threading.RLock()  # a finalizer or a signal's handler may log while this thread holds it
        self._wake = threading.Event()
        self._obstacle = SLOW
        self._written_bytes = 0
        self._told = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Take whole lines, as a text stream does."""
        self._put(text, self.max_bytes)
        return len(text)

    def write_droppable(self, text: str) -> int:
        """`write` for a line that is dropped first when room runs out."""
        self._put(text, int(self.max_bytes * DROPPABLE_SHARE))
        return len(text)

    def flush(self) -> None:
        """No-op, part of the stream interface; use `drain` to wait."""

    def drain(self) -> None:
        """Wait until all lines are written. What a stalled or slow reader leaves after a bounded time is dropped."""
        self._wake.set()
        end = time.monotonic() + DRAIN_SECONDS
        written, patience = self._written_bytes, time.monotonic() + STALL_SECONDS
        while self.waiting_bytes:
            if (now := time.monotonic()) > min(end, patience):
                with self._lock:
                    self.dropped[STOPPED] += len(self._lines)
                    self.waiting_bytes -= sum(map(_cost, self._lines))
                    self._lines.clear()
                return
            if written != self._written_bytes:
                written, patience = self._written_bytes, now + STALL_SECONDS
            time.sleep(0.001)

    def _put(self, text: str, limit: int) -> None:
        with self._lock:
            if self.waiting_bytes + _cost(text) > limit:
                self.dropped[self._obstacle] += 1
                return
            self.waiting_bytes += _cost(text)
            self._lines.append(text)
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        while self._wake.wait():
            time.sleep(GATHER_SECONDS)
            self._wake.clear()
            while lines := self._take():
                self._write("".join(lines).encode(errors="backslashreplace"))
                with self._lock:
                    self.waiting_bytes -= sum(map(_cost, lines))
                self._tell()

    def _take(self) -> list[str]:
        """The oldest lines that fit into a block, at least one if there is any."""
        block: list[str] = []
        size = 0
        with self._lock:
            while self._lines and (not block or size + len(self._lines[0]) <= BLOCK_BYTES):
                block.append(self._lines.popleft())
                size += len(block[-1])
        return block

    def _write(self, data: bytes) -> None:
        while data:
            try:
                count = os.write(self._descriptor, data)
            except BlockingIOError:  # another process that shares the descriptor made it non-blocking
                self._obstacle = SLOW
                time.sleep(GATHER_SECONDS)
            except OSError:  # no reader or no space: either may come back
                self._obstacle = FAILED
                time.sleep(RETRY_SECONDS)
            else:
                self._obstacle = SLOW
                self._written_bytes += count
                data = data[count:]

    def _tell(self) -> None:
        lost = sum(self.dropped.values()) - self._told
        if lost and self.waiting_bytes < self.max_bytes // 2:
            self._told += lost
            structlog.get_logger("app.telemetry.sink").error("log_lines_dropped", lines=lost)


def _cost(text: str) -> int:
    return len(text) + LINE_OVERHEAD_BYTES
