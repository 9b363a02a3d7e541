"""The thread that writes the log of what was served: takes rows from the queue, fills parts, closes them, and removes old ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import structlog

from app.served.buffer import Queue
from app.served.parts import DAY_SECONDS, Part, make_directory, remove_old
from app.settings import Served
from app.telemetry.logs import of_exception
from app.telemetry.metrics import Metrics
from weights.served import ServedRanking

THREAD = "served"
GATHER_SECONDS = 1.0
"""Rows of this time are encoded together: of a few at once, each takes several times as long."""
ROWS_AT_ONCE = 1024
TURN_SECONDS, GIVE_WAY_SECONDS = (
    0.5e-3,
    50e-6,
)  # how long the thread may keep the interpreter, and how long it then leaves it to others
LOOK_SECONDS = 1.0  # while a part is open
CLEAN_SECONDS = 3600.0  # between two removals of old parts
COMPLAIN_SECONDS = 60.0  # between two lines about a disk that does not take parts
MOST_OPEN = 4  # parts at once: of two models while one replaces the other, and of two days at midnight

Key = tuple[int, str, str, str]
"""What all rows of a part share: the day since 1970, and the model's name, version and digest."""

log = structlog.get_logger("app.served")


class Writer:
    """Everything but `start` and `join` runs in its thread."""

    def __init__(self, settings: Served, directory: Path, metrics: Metrics, queue: Queue) -> None:
        self._settings = settings
        self._directory = directory
        self._metrics = metrics
        self._queue = queue
        self._open: dict[Key, Part] = {}  # the oldest first
        self._complained = self._cleaned = float("-inf")  # seconds of the monotonic clock
        self._gave_way = 0.0  # seconds of the performance counter
        self._thread = threading.Thread(target=self._main, name=THREAD, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait until the thread has written everything, once its queue is closed. Return False if it takes longer."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while not self._queue.is_closed:
            self._clean()
            self._write_waiting()
            self._close_old()
            self._queue.wait(LOOK_SECONDS if self._open else CLEAN_SECONDS, GATHER_SECONDS)
        self._write_waiting()
        for key in list(self._open):
            self._close(key)

    def _write_waiting(self) -> None:
        while rows := self._queue.take(ROWS_AT_ONCE):
            for key, same in groupby(rows, _key_of):
                self._write(key, [*same])

    def _write(self, key: Key, rows: Sequence[ServedRanking]) -> None:
        """Add rows to the open part of their day and model. They are dropped where that cannot be done."""
        part = self._open.get(key)
        try:
            if part is None:
                part = self._open[key] = Part(self._directory, key[0], rows[0], time.time())
        except Exception as error:
            self._lose(key, len(rows), error)
            return
        try:
            batch = part.encode(rows, self._give_way)
        except Exception as error:  # a fault of ours: the part is as it was
            self._metrics.served_dropped.labels("fault").inc(len(rows))
            log.error("fault", **of_exception(error))
            return
        try:
            part.add(batch)
        except Exception as error:
            self._lose(key, part.rows, error)
            return
        if part.size_bytes >= self._settings.part_bytes:
            self._close(key)
        while len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))

    def _close_old(self) -> None:
        now = time.time()
        for key, part in list(self._open.items()):
            if not 0 <= now - part.opened < self._settings.part_seconds:  # also where the clock was set back
                self._close(key)

    def _close(self, key: Key) -> None:
        part = self._open[key]
        try:
            size_bytes = part.close()
        except Exception as error:
            self._lose(key, part.rows, error)
            return
        del self._open[key]
        self._metrics.served_rankings.inc(part.rows)
        self._metrics.served_bytes.inc(size_bytes)

    def _lose(self, key: Key, rows: int, error: Exception) -> None:
        """Give up a part and count its rows as dropped. Say why, but not for each part."""
        if (part := self._open.pop(key, None)) is not None:
            part.abandon()
        self._metrics.served_dropped.labels("not_written").inc(rows)
        self._complain("served_not_written", error, rankings=rows)

    def _give_way(self) -> None:
        """Let the event loop run if this thread has had its turn."""
        if time.perf_counter() - self._gave_way > TURN_SECONDS:
            time.sleep(GIVE_WAY_SECONDS)
            self._gave_way = time.perf_counter()

    def _clean(self) -> None:
        """Remove what is too old, once in a while."""
        now = time.monotonic()
        if now < self._cleaned + CLEAN_SECONDS:
            return
        self._cleaned = now
        try:
            make_directory(self._directory)
            removed = remove_old(self._directory, self._settings.keep_days, self._settings.part_seconds, time.time())
        except Exception as error:
            self._complain("served_not_cleaned", error)
            return
        if removed:
            log.info("served_removed", files=removed, keep_days=self._settings.keep_days)

    def _complain(self, event: str, error: Exception, **fields: int) -> None:
        now = time.monotonic()
        if now >= self._complained + COMPLAIN_SECONDS:
            self._complained = now
            log.error(event, error=type(error).__name__, reason=str(error), **fields)


def _key_of(row: ServedRanking) -> Key:
    return row.served_us // (DAY_SECONDS * 1_000_000), row.model_name, row.model_version, row.model_digest
