"""Follows a Redis stream of changes: each entry has one in its field `change`, as `POST /admin/posts` takes it, and its id is its position.

Each replica reads the whole stream, without a consumer group, from the position of the last change on its disk. `XTRIM STREAM MINID
POSITION` may drop what comes before the position of every replica and snapshot; that entry itself stays, which is how a reader knows that
nothing behind it is missing. An entry that cannot be read goes to the stream `STREAM:unreadable`, and the feed goes on.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import structlog

from app.corpus.address import FeedAddress
from app.corpus.posts import MAX_POSTS, read_change
from app.errors import CorpusNotLoaded, ServiceError
from app.interface import CorpusState, ServedCorpus
from app.settings import SettingsProblem
from app.telemetry.metrics import Metrics
from model.retrieval.inputs import Mark, PostChange
from weights.errors import CheckpointError, LogLost, NotStored, StorageFull
from weights.text_ids import IdKind

MAX_ENTRY_BYTES = 4 * 2**20  # of one change, as at the admin interface
MOST_ENTRIES = 2000  # read at once
MOST_BYTES = 16 * 2**20  # read at once, if entries are as long as those before
WAIT_SECONDS = 0.2
ROUND_SECONDS = 0.05
MILESTONE = 2**16  # changes: replicas scraped a few seconds apart show their digests after the same change
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.2, 10.0  # after a failure, doubled each time
CONNECT_SECONDS = 5.0
UNREADABLE = ":unreadable"  # behind the stream's name

log = structlog.get_logger("app.corpus.feed")


class Entry(NamedTuple):
    """One entry. `position`: two numbers and a dash, which grow; `body`: its field `change`, None without one; `unix_seconds`: when it was
    written."""

    position: str
    body: bytes | None
    unix_seconds: float


class FeedError(Exception):
    """The feed cannot be read, or an entry not be put aside. The text is a sentence of ours, without addresses and names."""


class Stream(Protocol):
    """What a feed is read from. Used by one thread at a time; every method may wait for the network, and raises FeedError."""

    def after(self, position: str, most: int, wait_seconds: float) -> list[Entry]:
        """Return at most this many entries after this position, or from the beginning if it is "". Fewer mean that the stream ended there.

        Raises FeedError also where entries are missing: to go on there would leave changes out.
        """
        ...

    def bury(self, entry: Entry, reason: str) -> None:
        """Put an unreadable entry, with the reason, where people find it."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


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


def open_feed(address: str) -> RedisStream:
    """Return the stream at this address; it connects when it is first read. Raises SettingsProblem."""
    try:
        return RedisStream(FeedAddress.of(address))
    except ImportError as error:
        raise SettingsProblem(
            "RANKER_RETRIEVAL__FEED needs the extra `redis`: pip install 'phoenix-ranking-server[redis]'"
        ) from error
    except ValueError as error:
        raise SettingsProblem(f"RANKER_RETRIEVAL__FEED {error}") from None


class RedisStream:
    """A `Stream` in Redis. Raises ValueError for an option that redis-py does not know, ImportError without redis-py."""

    def __init__(self, address: FeedAddress) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._stream = address.stream
        seconds = {"socket_connect_timeout": CONNECT_SECONDS, "socket_timeout": CONNECT_SECONDS}
        try:
            pool = redis.ConnectionPool.from_url(address.url, **seconds, retry=Retry(NoBackoff(), 0))
            pool.connection_kwargs["decode_responses"] = False
            pool.make_connection()  # makes the object alone; redis-py looks at the options here
        except Exception:  # what it says repeats values
            raise ValueError("has an option that redis-py does not know, or a value that does not fit one") from None
        self._redis: Any = redis.Redis(connection_pool=pool)

    def after(self, position: str, most: int, wait_seconds: float) -> list[Entry]:
        """See `Stream.after`."""
        with _told():
            # in this order, so that whatever is deleted before the first is seen by the second; a Redis that is full refuses MULTI
            with self._redis.pipeline(transaction=False) as asked:
                asked.xrange(self._stream, position or "-", "+", most + bool(position))
                asked.xinfo_stream(self._stream)
                found, info = asked.execute(raise_on_error=False)
            if isinstance(found, Exception):
                raise found
            is_there = bool(position and found and found[0][0].decode() == position)
            self._check_whole(position, info, is_there=is_there, is_empty=not found)
            found = found[is_there:]
            if not found:
                wait = max(1, round(1000 * wait_seconds))
                self._redis.xread({self._stream: position or "0-0"}, count=1, block=wait)
        return [
            Entry(name.decode(), (fields or {}).get(b"change"), int(name.partition(b"-")[0]) / 1000)
            for name, fields in found
        ]

    def _check_whole(self, position: str, info: Any, *, is_there: bool, is_empty: bool) -> None:
        """Raises FeedError unless the entries behind this position are all there; its own may be there, too."""
        if isinstance(info, Exception):
            if "no such key" not in str(info):
                raise info
            if position:
                raise FeedError(f"The stream, which was read up to {position}, is gone.")
            return  # nobody has written yet
        last, length = info["last-generated-id"].decode(), info["length"]
        deleted = info.get("max-deleted-entry-id", b"0-0").decode()  # by XDEL; Redis 7 says it
        if position and _numbers(deleted) > _numbers(position):
            raise FeedError(
                f"The stream no longer holds {deleted}, which was deleted behind {position}, which was read last: begin with a newer "
                "snapshot of the corpus."
            )
        if position and not is_there and not (is_empty and last == position):
            raise FeedError(
                f"The stream no longer holds {position}, which was read last, and ends at {last}: begin with a newer snapshot of the "
                "corpus, or restore the stream."
            )
        if not position and info.get("entries-added", length) != length:
            raise FeedError(
                f"The stream holds {length} of the {info['entries-added']} entries that were ever written: begin with a corpus that names "
                "its position in it."
            )

    def bury(self, entry: Entry, reason: str) -> None:
        """See `Stream.bury`: under its own id in the stream `STREAM:unreadable`, once for all replicas."""
        kept, said = self._stream + UNREADABLE, {"change": entry.body or b"", "reason": reason}
        with _told():
            try:
                self._redis.xadd(kept, said, id=entry.position)
            except Exception as error:
                if "equal or smaller" in str(error):
                    with suppress(Exception):  # who may write there may perhaps not read
                        if self._redis.xrange(kept, entry.position, entry.position):
                            return  # another replica has already put it there
                    raise FeedError("The stream for unreadable entries has a later one already.") from None
                raise

    def close(self) -> None:
        """See `Stream.close`."""
        self._redis.close()


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
        said = "have not been read from their feed yet" if lag is None else f"are {lag:.0f} s behind their feed"
        return f"The posts {said}.{self.reason and ' '}{self.reason}"

    def serves(self, mark: Mark) -> None:
        """Another corpus, of this mark, serves now. If it is behind that before, it has not reached the feed yet."""
        if not mark.reaches(self._reached):
            self._as_of = None

    async def run(self, corpus: Follower) -> None:
        """Follow the feed until cancelled. Failures are retried; nothing that is missing from the feed is passed over."""
        pause = 0.0
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
            await asyncio.to_thread(self._stream.close)  # which waits for a read that is under way

    async def _follow(self, corpus: Follower) -> None:
        """Make the changes that are there, or wait a moment for some."""
        began, mark, ids = time.monotonic(), corpus.mark, corpus.served.corpus.ids
        self._reached = position = mark.position
        most = max(1, min(MOST_ENTRIES, MOST_BYTES // self._longest))
        entries = await asyncio.to_thread(self._stream.after, position, most, WAIT_SECONDS)
        if corpus.mark.position != position:
            return  # another corpus serves now
        self._longest = max(self._longest // 2, 1024, *(len(entry.body or b"") for entry in entries))
        epoch = time.monotonic() - time.time()  # Unix time is looked at here only: somebody may set its clock
        if entries:
            self._has_all_before(epoch + entries[0].unix_seconds, began)
        for part, changes in await asyncio.to_thread(self._parts, entries, ids, mark.sequence):
            state = await corpus.follow(changes, position, part[-1].position)
            if state.mark.position != part[-1].position:
                return  # another corpus serves now
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
        """Return the entry's change, or None if it cannot be read. That is counted and logged, and the feed goes on."""
        if entry.body is None:
            reason = "The entry has no field named change."
        elif len(entry.body) > MAX_ENTRY_BYTES:
            reason = f"The change is longer than {MAX_ENTRY_BYTES} bytes."
        else:
            try:
                return read_change(entry.body, ids)
            except Exception as error:
                reason = error.detail if isinstance(error, ServiceError) else type(error).__name__
        if Mark(position=self._unreadable).reaches(entry.position):
            return None  # already logged; only the entries read with it are tried again
        try:
            self._stream.bury(entry, reason)
        except FeedError as error:
            reason = f"{reason} It could not be saved: {error}"
        self._unreadable = entry.position
        self._metrics.feed_entries.labels("unreadable").inc()
        log.error("feed_entry_unreadable", position=entry.position, reason=reason)
        return None


@contextmanager
def _told() -> Iterator[None]:
    """Raise a FeedError in place of an error of redis-py, which may quote the address, a password or a path."""
    from redis import exceptions

    reasons: dict[type[Exception], str] = {
        exceptions.AuthenticationError: "Redis refuses the feed's user or password.",
        exceptions.BusyLoadingError: "Redis is still loading its data.",
        exceptions.NoPermissionError: "Redis does not allow the feed's user to do this.",
        exceptions.OutOfMemoryError: "Redis is out of memory.",
        exceptions.TimeoutError: "Redis does not answer in time.",
    }
    try:
        yield
    except FeedError:
        raise
    except Exception as error:
        for kind, reason in reasons.items():
            if isinstance(error, kind):
                raise FeedError(reason) from None
        if isinstance(error, exceptions.ResponseError):
            is_other = str(error).startswith("WRONGTYPE")
            raise FeedError(
                "The feed's name is that of something other than a stream."
                if is_other
                else "Redis refuses the command."
            ) from None
        raise FeedError(f"Redis cannot be reached: {_cause_of(error)}.") from None


def _cause_of(error: BaseException) -> str:
    """Why a connection failed, in our words."""
    causes = {
        socket.gaierror: "its host name is not known",
        ConnectionRefusedError: "it refuses the connection",
        ssl.SSLError: "TLS with it fails",
        TimeoutError: "it does not answer in time",
        FileNotFoundError: "a file that the options name is not there",
    }
    at: BaseException | None = error
    while at is not None:
        for kind, reason in causes.items():
            if isinstance(at, kind):
                return reason
        at = at.__cause__ or at.__context__
    return "the connection ended"


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


def _numbers(position: str) -> tuple[int, ...]:
    return tuple(map(int, position.split("-")))
