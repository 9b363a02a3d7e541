"""Follows a feed: reads the entries after the corpus's mark and has them applied in order, each once. Uses no feed's library."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from app.budgets import MAX_CHANGED
from app.errors import CorpusNotLoaded, ServiceError
from app.feeds.source import MAX_ENTRY_BYTES, Entry, FeedGap, NotKept, Source
from app.interface import Changed
from app.telemetry.metrics import Metrics
from model.retrieval.inputs import Mark, PostChange
from weights.errors import CheckpointError, NotStored

MOST_ENTRIES = 2000  # read at once
MOST_BYTES = 16 * 2**20  # read at once, if entries are as long as those before
WAIT_SECONDS = 0.2
ROUND_SECONDS = 0.05
MILESTONE = 2**16  # changes: replicas scraped a few seconds apart show their digests after the same change
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.2, 10.0  # after a failure, doubled each time

log = structlog.get_logger("app.service.feed")


class Follower(Protocol):
    """The corpus that the feed changes."""

    def mark(self) -> Mark:
        """Return the mark of the corpus that serves. Raises CorpusNotLoaded."""

    async def follow(self, changes: Sequence[PostChange], after: str, position: str) -> Changed:
        """Make these changes as one, from `after` up to `position`. Make none if the corpus is no longer at `after`."""


class FeedReader:
    """`read` turns an entry's body into a change, or raises a ServiceError. Used by the event loop only."""

    def __init__(
        self, source: Source, read: Callable[[bytes], PostChange], metrics: Metrics, most_lag_seconds: float
    ) -> None:
        self._source = source
        self._read = read
        self._metrics = metrics
        self._most_lag_seconds = most_lag_seconds
        self._as_of: float | None = None  # monotonic time up to which all changes were made
        self._reached = ""  # the position of the last one
        self.reason = ""  # why the feed cannot be read at present, empty if it can
        self._unreadable = ""  # the position of the last entry that could not be read
        self._longest = MOST_BYTES // 16  # bytes of the longest recent entry

    @property
    def lag_seconds(self) -> float | None:
        """Age of the newest state of the feed that the corpus is sure to have; None before the first."""
        return None if self._as_of is None else max(0.0, time.monotonic() - self._as_of)

    @property
    def problem(self) -> str:
        """A sentence saying why this process should get no requests, empty if its lag is within the limit."""
        lag = self.lag_seconds
        if lag is not None and lag <= self._most_lag_seconds:
            return ""
        said = "have not been read from their feed yet" if lag is None else f"are {lag:.0f} s behind their feed"
        return f"The posts {said}.{self.reason and ' '}{self.reason}"

    def serves(self, mark: Mark) -> None:
        """Another corpus, of this mark, serves now. If it is behind that before, it has not reached the feed yet."""
        if not mark.reaches(self._reached):
            self._as_of = None

    async def run(self, corpus: Follower) -> None:
        """Follow the feed until cancelled. Failures are retried; a gap in the feed is never skipped."""
        pause = 0.0
        try:
            while True:
                reason = ""
                try:
                    await self._follow(corpus)
                    pause = 0.0
                except Exception as error:
                    pause = min(MOST_PAUSE_SECONDS, max(LEAST_PAUSE_SECONDS, 2 * pause))
                    told = isinstance(error, (FeedGap, CheckpointError))
                    reason = str(error) if told else f"{type(error).__name__}: {error}"
                    if isinstance(error, CorpusNotLoaded) or type(error) is NotStored:
                        pause, self.reason = LEAST_PAUSE_SECONDS, reason  # another process may change it
                if reason != self.reason:
                    self.reason = reason
                    log.error("feed_stopped", reason=reason) if reason else log.info("feed_resumed")
                await asyncio.sleep(pause)
        finally:
            await asyncio.to_thread(self._source.close)  # which waits for a read that is under way

    async def _follow(self, corpus: Follower) -> None:
        """Make the changes that are there, or wait a moment for some."""
        began, mark = time.monotonic(), corpus.mark()
        self._reached = position = mark.position
        most = max(1, min(MOST_ENTRIES, MOST_BYTES // self._longest))
        entries = await asyncio.to_thread(self._source.after, position, most, WAIT_SECONDS)
        if corpus.mark().position != position:
            return  # another corpus serves now, or another process changes it
        self._longest = max(self._longest // 2, 1024, *(len(entry.body) for entry in entries))
        epoch = time.monotonic() - time.time()  # Unix time is looked at here only: somebody may set its clock
        if entries:
            self._has_all_before(epoch + entries[0].unix_seconds, began)
        for part, changes in await asyncio.to_thread(self._parts, entries, mark.sequence):
            changed = await corpus.follow(changes, position, part[-1].position)
            if changed.mark.position != part[-1].position:
                return  # another process has made some of them
            self._metrics.feed_entries.labels("made").inc(len(changes))
            self._reached = position = part[-1].position
            self._has_all_before(epoch + part[-1].unix_seconds, began)
        if len(entries) < most:
            self._as_of = began
            await asyncio.sleep(ROUND_SECONDS if entries else 0.0)  # a larger round costs little more

    def _has_all_before(self, written: float, now: float) -> None:
        """Everything written before this time, in monotonic seconds, has been made. An entry from the future tells nothing, nor one from
        before what is known: the clock of the feed is wrong, or its writer chose the position."""
        if written <= now and (self._as_of is None or written > self._as_of):
            self._as_of = written

    def _parts(self, entries: Sequence[Entry], sequence: int) -> list[tuple[list[Entry], list[PostChange]]]:
        """Return entries with their changes, split so that no part changes more posts than one request may, or crosses a milestone."""
        parts: list[tuple[list[Entry], list[PostChange]]] = []
        posts = 0
        for entry in entries:
            change = self._readable(entry)
            count = 0 if change is None else len(change.delete) + len(change.upsert.post_ids)
            if not parts or posts + count > MAX_CHANGED or (parts[-1][1] and not sequence % MILESTONE):
                parts.append(([], []))
                posts = 0
            posts += count
            parts[-1][0].append(entry)
            if change is not None:
                parts[-1][1].append(change)
                sequence += 1
        return parts

    def _readable(self, entry: Entry) -> PostChange | None:
        """Return the entry's change, or None if it cannot be read. That is counted and logged, and the feed goes on."""
        try:
            if len(entry.body) <= MAX_ENTRY_BYTES:
                return self._read(entry.body)
            reason = f"The entry is longer than {MAX_ENTRY_BYTES} bytes."
        except Exception as error:
            reason = error.detail if isinstance(error, ServiceError) else type(error).__name__
        if Mark(position=self._unreadable).reaches(entry.position):
            return None  # already logged; only the entries read with it are tried again
        try:
            self._source.bury(entry, reason)
        except NotKept as error:
            reason = f"{reason} It could not be saved: {error}"
        self._unreadable = entry.position
        self._metrics.feed_entries.labels("unreadable").inc()
        log.error("feed_entry_unreadable", position=entry.position, reason=reason)
        return None
