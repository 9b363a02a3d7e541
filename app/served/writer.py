"""The thread that writes the log of what was served: takes batches of rows, fills parts, closes them, and removes old ones."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import structlog

from app.served.parts import Part, make_directory, remove_old
from app.settings import Served
from app.telemetry.logs import of_exception
from app.telemetry.metrics import Metrics
from weights.served import RowBatch, ServedRanking

THREAD = "served"
LOOK_SECONDS = 1.0  # while a part is open
CLEAN_SECONDS = 3600.0  # between two removals of old parts
COMPLAIN_SECONDS = 60.0  # between two lines about a disk that does not take parts
MOST_OPEN = 4  # parts at once: of two models while one replaces the other, and of two days at midnight
MOST_SPARE = 4  # batches whose memory is kept for others

Key = tuple[int, tuple[str, str, str]]
"""What all rows of a part share: the day since 1970, and the model."""

log = structlog.get_logger("app.served")


class Writer:
    """`start`, `new_batch`, `put`, `waiting_bytes` and `close` are for the event loop; everything else runs in the thread."""

    def __init__(self, settings: Served, directory: Path, metrics: Metrics) -> None:
        self._settings = settings
        self._directory = directory
        self._metrics = metrics
        # with day and bytes; None is the end
        self._batches: SimpleQueue[tuple[RowBatch, int, int] | None] = SimpleQueue()
        self._put_bytes = self._written_bytes = 0  # since the start; each is written to by one thread only
        # written batches: fresh memory would cost the event loop more
        self._spare: deque[RowBatch] = deque(maxlen=MOST_SPARE)
        self._open: dict[Key, Part] = {}  # the oldest first
        self._complained = self._cleaned = float("-inf")  # seconds of the monotonic clock
        self._thread = threading.Thread(target=self._main, name=THREAD, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, batch: RowBatch, day: int, size_bytes: int) -> None:
        """Have a batch written that takes this much memory. `day`: the UTC day of its rows, counted since 1970."""
        self._put_bytes += size_bytes
        self._batches.put((batch, day, size_bytes))

    def new_batch(self, first: ServedRanking) -> RowBatch:
        """An empty batch for rows of the model of `first`, in memory that was used before if there is some."""
        try:
            batch = self._spare.pop()
        except IndexError:
            return RowBatch(first)
        batch.begin(first)
        return batch

    @property
    def waiting_bytes(self) -> int:
        """Memory of the batches that were put and are not written yet."""
        return self._put_bytes - self._written_bytes

    def close(self, seconds: float) -> bool:
        """Write everything that was put, close the open parts and end the thread. Return False if it takes longer than this."""
        self._batches.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while True:
            self._clean()
            try:
                taken = self._batches.get(timeout=LOOK_SECONDS if self._open else CLEAN_SECONDS)
            except Empty:
                self._close_old()
                continue
            if taken is None:
                break
            batch, day, size_bytes = taken
            self._write((day, batch.model), batch)
            self._written_bytes += size_bytes
            self._close_old()
        for key in list(self._open):
            self._close(key)

    def _write(self, key: Key, batch: RowBatch) -> None:
        """Add rows to the open part of their day and model. They are dropped where that cannot be done."""
        part = self._open.get(key)
        try:
            if part is None:
                part = self._open[key] = Part(self._directory, key[0], batch.schema(), time.time(), self._spare.append)
        except Exception as error:
            self._lose(key, batch.rows, error)
            return
        try:
            part.add(batch)
        except Exception as error:  # a fault of ours: the part is as it was
            self._metrics.served_dropped.labels("fault").inc(batch.rows)
            log.error("fault", **of_exception(error))
            return
        try:
            part.flush()
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
            else:
                with suppress(OSError):  # closing the part will say what is wrong
                    part.touch(now)

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

    def _clean(self) -> None:
        """Remove what is too old, once in a while."""
        now = time.monotonic()
        if now < self._cleaned + CLEAN_SECONDS:
            return
        self._cleaned = now
        try:
            make_directory(self._directory)
            removed = remove_old(self._directory, self._settings.keep_days, time.time())
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
