"""Checks now and then that engines, searches and the event loop make progress, and collects garbage between two requests."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable

from app.queue.job import RankJob, SearchJob
from app.queue.versions import Versions
from app.settings import Queue
from model.device import collecting

WATCHDOG_SECONDS = 0.5
COLLECT_OBJECTS = 10_000
COLLECT_TIMES = 10  # collections of a generation before the next older one is collected


class Watchdog:
    """Used by the event loop only, except the thread that watches the loop."""

    def __init__(self, queue: Queue, versions: Versions[RankJob], searches: Versions[SearchJob]) -> None:
        self._queue = queue
        self._versions = versions
        self._searches = searches
        self._looks: int | None = None  # checks made by `hang`; None before and after it

    async def hang(self) -> str:
        """Wait until something has hung too long to recover; return a sentence about it.

        Two checks in a row must find it: after a pause of the process the first may run before the event loop has handled the forwards
        that finished.
        """
        self._looks = 0
        before = silence = ""
        try:
            while not (before and silence):  # nothing to wait for but time
                await asyncio.sleep(WATCHDOG_SECONDS)
                self._looks += 1
                collect_garbage()
                before, silence = silence, self._silence(self._queue.stall_exit_seconds)
        finally:
            self._looks = None
        return silence

    def stall(self) -> str:
        """A sentence if work waits and nothing finishes, or if a file that is served from was written to; else empty."""
        serving = [
            scheduler.loaded for scheduler in (self._versions.current, self._searches.current) if scheduler is not None
        ]
        changed = (model.changed_file() for model in serving)
        return self._silence(self._queue.stall_seconds) or next(filter(None, changed), "")

    def watch_loop(self, hung: Callable[[str], None]) -> None:
        """From now on, call `hung` with a sentence if the event loop hangs, as in a short forward or search that it computes itself:
        nothing in the loop could report that. It is called in a thread of its own, and should end the process."""
        threading.Thread(target=self._watch_loop, args=(hung,), name="loop-watch", daemon=True).start()

    def _watch_loop(self, hung: Callable[[str], None]) -> None:
        """Count rounds rather than time: a process that was stopped for a while is not stuck. One round alone tells nothing: this thread
        and the loop look equally often, so now and then it finds no new look."""
        seen, still = self._looks, 0
        while still < 2 or still * WATCHDOG_SECONDS <= self._queue.stall_exit_seconds:
            time.sleep(WATCHDOG_SECONDS)
            still = 0 if self._looks is None or self._looks != seen else still + 1
            seen = self._looks
        hung(f"The event loop has hung for {still * WATCHDOG_SECONDS:.1f} s.")

    def _silence(self, seconds: float) -> str:
        """A sentence if no forward or no search has finished for longer than this, else empty."""
        if (silent := self._versions.silent_seconds()) > seconds:
            return f"The engine has work and has finished no forward for {silent:.1f} s."
        if (silent := self._searches.silent_seconds()) > seconds:
            return f"A search has not finished for {silent:.1f} s."
        return ""


def collect_garbage() -> None:
    """Collect cycles if enough objects were made to hold some, as Python does by itself, but between two requests, and not while a CUDA
    graph is recorded."""
    young, middle, old = gc.get_count()
    if young > COLLECT_OBJECTS and collecting.acquire(blocking=False):
        try:
            gc.collect(2 if old > COLLECT_TIMES else 1 if middle > COLLECT_TIMES else 0)
        finally:
            collecting.release()
