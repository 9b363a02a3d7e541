"""Follows a stream of changes: has them applied in order, each once, and says how far behind it is.

Each replica reads the whole stream from the position of the last change on its disk. An entry that cannot be read is put aside, and the
feed goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import structlog

from app.corpus.posts import MAX_POSTS, read_change
from app.corpus.stream import Entry, FeedAway, FeedError, Stream
from app.errors import CorpusNotLoaded, ServiceError
from app.interface import CorpusState, ServedCorpus
from app.telemetry.metrics import Metrics
from model.retrieval.inputs import Mark, PostChange
from weights.errors import CheckpointError, LogLost, NotStored, StorageFull
from weights.text_ids import IdKind

MAX_ENTRY_BYTES = 4 * 2**20  # of one change, as at the admin interface
MOST_ENTRIES = 2000  # made as one change
MOST_BYTES = 16 * 2**20  # of the entries made as one change; the last reply may bring more
REPLY_ENTRIES = 64  # of one reply of the stream, whose length nobody knows before
WAIT_SECONDS = 0.2
ROUND_SECONDS = 0.05
MILESTONE = 2**16  # changes: replicas scraped a few seconds apart show their digests after the same change
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.2, 10.0  # after a failure, doubled each time

log = structlog.get_logger("app.corpus.feed")


class Follower(Protocol):
    """The corpus that a feed changes."""

    @property
    def served(self) -> ServedCorpus:
        """What serves. Raises CorpusNotLoaded."""
        ...

    @property
    def mark(self) -> Mark:
        """The mark of the corpus that serves. Raises CorpusNotLoaded."""
        ...

    async def follow(self, changes: Sequence[PostChange], after: str, position: str) -> CorpusState:
        """Make these changes as one, from `after` up to `position`; none if the corpus is no longer at `after`."""
        ...


class FeedReader:
    """Has the entries of a stream applied in order, each once. Used by the event loop only."""

    def __init__(self, stream: Stream, metrics: Metrics, most_lag_seconds: float) -> None:
        self.reason = ""
        """A sentence that says why the feed cannot be read now, empty if it can."""
        self._stream = stream
        self._metrics = metrics
        self._most_lag_seconds = most_lag_seconds
        self._as_of: float | None = None  # monotonic time up to which all changes were made
        self._reached = ""  # the position of the last one
        self._unreadable = ""  # the position of the last entry that could not be read
        self._aside = deque[tuple[Entry, str]]()  # unreadable entries to be put aside, with their reasons
        self._has_aside = asyncio.Event()
        self._longest = MOST_BYTES // 16  # bytes of the longest recent entry

    @property
    def lag_seconds(self) -> float | None:
        """Age of the newest state of the feed that the corpus is sure to have; None before the first."""
        return None if self._as_of is None else max(0.0, time.monotonic() - self._as_of)

    @property
    def problem(self) -> str:
        """A sentence that says why this process should get no requests, empty if its lag is within the limit."""
        lag = self.lag_seconds
        if lag is not None and lag <= self._most_lag_seconds:
            return ""
        state = "have not been read from their feed yet" if lag is None else f"are {lag:.0f} s behind their feed"
        return f"The posts {state}.{self.reason and ' '}{self.reason}"

    def serves(self, mark: Mark) -> None:
        """Another corpus, of this mark, serves now. If it is behind that before, it has not reached the feed yet."""
        if not mark.reaches(self._reached):
            self._as_of = None

    async def run(self, corpus: Follower) -> None:
        """Follow the feed until cancelled. Failures are retried; nothing that is missing from the feed is passed over."""
        pause, saving = 0.0, asyncio.ensure_future(self._put_aside())
        try:
            while True:
                reason = ""
                try:
                    await self._follow(corpus)
                    pause = 0.0
                except CorpusNotLoaded:
                    pause, reason = LEAST_PAUSE_SECONDS, self.reason
                except Exception as error:
                    pause = min(MOST_PAUSE_SECONDS, max(LEAST_PAUSE_SECONDS, 2 * pause))
                    reason = _sentence_of(error)
                if reason != self.reason:
                    self.reason = reason
                    log.error("feed_stopped", reason=reason) if reason else log.info("feed_resumed")
                await asyncio.sleep(pause)
        finally:
            saving.cancel()
            for entry, reason in self._aside:
                self._tell(entry, f"{reason} It could not be saved: the feed ends.")
            await asyncio.to_thread(self._stream.close)  # which waits for a read that is under way

    async def _follow(self, corpus: Follower) -> None:
        """Make the changes that are there, or wait a moment for some."""
        kept = sum(len(entry.body or b"") for entry, _ in self._aside)
        if len(self._aside) >= MOST_ENTRIES or kept >= MOST_BYTES:
            raise FeedAway("Too many unreadable entries wait to be saved.")
        began, mark, ids = time.monotonic(), corpus.mark, corpus.served.corpus.ids
        self._reached = position = mark.position
        entries, is_end = await asyncio.to_thread(self._read, position)
        if corpus.mark.position != position:
            return  # another corpus serves now
        epoch = time.monotonic() - time.time()  # Unix time is looked at here only: somebody may set its clock
        if entries:
            self._has_all_before(epoch + entries[0].unix_seconds, began)
        parts = await asyncio.to_thread(self._parts, entries, ids, mark.sequence)
        if self._aside:
            self._has_aside.set()
        for part, changes in parts:
            await corpus.follow(changes, position, part[-1].position)
            if corpus.mark.position != part[-1].position:
                return  # another corpus serves now
            self._metrics.feed_entries.labels("made").inc(len(changes))
            self._reached = position = part[-1].position
            self._has_all_before(epoch + part[-1].unix_seconds, began)
        still_serves = corpus.mark.position == position  # another one may have come while the parts were made
        if still_serves and is_end:
            self._as_of = began
            await asyncio.sleep(ROUND_SECONDS if entries else 0.0)  # a larger round costs little more

    def _read(self, position: str) -> tuple[list[Entry], bool]:
        """Return entries after this position, or wait a moment for some, and whether the stream ended there. Called in a thread."""
        entries, size = list[Entry](), 0
        while len(entries) < MOST_ENTRIES and size < MOST_BYTES:
            most = max(1, min(REPLY_ENTRIES, MOST_BYTES // self._longest))
            try:
                more = self._stream.after(position, most, 0.0 if entries else WAIT_SECONDS)
            except FeedError:
                # the reply may have been too long to come in time
                self._longest = min(MOST_BYTES, 4 * MOST_BYTES // most)
                if entries:
                    break
                raise
            lengths = [len(entry.body or b"") for entry in more]
            self._longest = max(self._longest // 2, 1024, *lengths)
            entries += more
            size += sum(lengths)
            if len(more) < most:
                return entries, True
            position = more[-1].position
        return entries, False

    def _has_all_before(self, written: float, now: float) -> None:
        """Everything written before this time, in monotonic seconds, has been made. An entry from the future tells nothing, nor one from
        before what is known: the clock of the feed is wrong, or its writer chose the position."""
        if written <= now and (self._as_of is None or written > self._as_of):
            self._as_of = written

    def _parts(
        self, entries: Sequence[Entry], ids: IdKind, sequence: int
    ) -> list[tuple[list[Entry], list[PostChange]]]:
        """Return entries with their changes, split so that no part changes more posts than one request may, or crosses a milestone."""
        parts: list[tuple[list[Entry], list[PostChange]]] = []
        posts = 0
        for entry in entries:
            change = self._readable(entry, ids)
            count = 0 if change is None else len(change.delete) + len(change.upsert.post_ids)
            if not parts or posts + count > MAX_POSTS or (parts[-1][1] and not sequence % MILESTONE):
                parts.append(([], []))
                posts = 0
            posts += count
            parts[-1][0].append(entry)
            if change is not None:
                parts[-1][1].append(change)
                sequence += 1
        return parts

    def _readable(self, entry: Entry, ids: IdKind) -> PostChange | None:
        """Return the entry's change, or None if it cannot be read: then it will be put aside, unless it was so already."""
        if entry.body is None:
            reason = "The entry has no field named change."
        elif len(entry.body) > MAX_ENTRY_BYTES:
            reason = f"The change is longer than {MAX_ENTRY_BYTES} bytes."
        else:
            try:
                return read_change(entry.body, ids)
            except Exception as error:
                reason = error.detail if isinstance(error, ServiceError) else type(error).__name__
        if not Mark(position=self._unreadable).reaches(entry.position):
            self._unreadable = entry.position
            self._aside.append((entry, reason))
        return None

    async def _put_aside(self) -> None:
        """Save, count and log unreadable entries until cancelled; changes do not wait for it. Where the feed is away, it tries again."""
        pause = LEAST_PAUSE_SECONDS
        while await self._has_aside.wait():
            entry, reason = self._aside[0]
            try:
                await asyncio.to_thread(self._stream.bury, entry, reason)
            except FeedAway:
                await asyncio.sleep(pause)
                pause = min(MOST_PAUSE_SECONDS, 2 * pause)
                continue
            except FeedError as error:
                reason = f"{reason} It could not be saved: {error}"
            pause = LEAST_PAUSE_SECONDS
            self._aside.popleft()
            self._tell(entry, reason)
            if not self._aside:
                self._has_aside.clear()

    def _tell(self, entry: Entry, reason: str) -> None:
        self._metrics.feed_entries.labels("unreadable").inc()
        log.error("feed_entry_unreadable", position=entry.position, reason=reason)


def _sentence_of(error: Exception) -> str:
    """What `/readyz` and the log say, which name neither paths nor what a library says."""
    if isinstance(error, FeedError):
        return str(error)
    if isinstance(error, ServiceError):
        return error.detail
    reasons: dict[type[Exception], str] = {
        StorageFull: "no room on the disk, or it is read-only",
        LogLost: "the file of the corpus's changes was removed or replaced",
        NotStored: "it cannot be written now",
        CheckpointError: "the corpus is damaged",
    }
    for kind, reason in reasons.items():
        if isinstance(error, kind):
            return f"A change of the feed cannot be stored: {reason}."
    return f"A change of the feed cannot be applied: {type(error).__name__}."
