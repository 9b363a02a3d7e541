"""A stream of changes in Redis: each entry has one in its field `change`, as `POST /admin/posts` takes it, and its id is its position.

Readers use no consumer group. `XTRIM STREAM MINID POSITION` may drop what comes before the position of every replica and snapshot; that
entry itself stays, which is how a reader knows that nothing behind it is missing. An entry that cannot be read is copied to the stream
`STREAM:unreadable`.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

from app.corpus.address import FeedAddress
from app.settings import SettingsProblem

CONNECT_SECONDS = 5.0
UNREADABLE = ":unreadable"  # behind the stream's name


class Entry(NamedTuple):
    """One entry. `position`: two numbers and a dash, which grow; `body`: its field `change`, None without one; `unix_seconds`: when it was
    written."""

    position: str
    body: bytes | None
    unix_seconds: float


class FeedError(Exception):
    """The feed cannot be read, or an entry not be put aside. The text is a sentence of ours, without addresses and names."""


class FeedAway(FeedError):
    """The feed does not answer now; a later try may do."""


class Stream(Protocol):
    """What a feed is read from. One thread reads while another may put aside; every method may wait for the network, and raises
    FeedError."""

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
        with _in_our_words():
            # in this order, so that whatever is deleted before the first is seen by the second; a Redis that is full refuses MULTI
            with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.xrange(self._stream, position or "-", "+", most + bool(position))
                pipeline.xinfo_stream(self._stream)
                entries, info = pipeline.execute(raise_on_error=False)
            if isinstance(entries, Exception):
                raise entries
            is_there = bool(position and entries and entries[0][0].decode() == position)
            self._check_whole(position, info, is_there=is_there, is_empty=not entries)
            entries = entries[is_there:]
            if not entries:
                wait = max(1, round(1000 * wait_seconds))
                self._redis.xread({self._stream: position or "0-0"}, count=1, block=wait)
        return [
            Entry(name.decode(), (fields or {}).get(b"change"), int(name.partition(b"-")[0]) / 1000)
            for name, fields in entries
        ]

    def _check_whole(self, position: str, info: Any, *, is_there: bool, is_empty: bool) -> None:
        """Raises FeedError unless the entries behind this position are all there; its own may be there, too."""
        if isinstance(info, Exception):
            if "no such key" not in str(info):
                raise info
            if position:
                raise FeedError(f"The stream, which was read up to {position}, is gone.")
            return  # nobody has written yet
        if not {"max-deleted-entry-id", "entries-added"} <= info.keys():
            raise FeedError("This Redis is older than 7.0 and cannot say what was deleted from the stream.")
        last, length = info["last-generated-id"].decode(), info["length"]
        deleted = info["max-deleted-entry-id"].decode()  # by XDEL
        if position and _numbers(deleted) > _numbers(position):
            raise FeedError(
                f"The stream no longer holds {deleted}, which was deleted after {position}, the last one that was read: begin with a newer "
                "snapshot of the corpus."
            )
        first = (info.get("first-entry") or [b"0-0"])[0].decode()
        if (
            position
            and not is_there
            and (_numbers(last) < _numbers(position) or (first != "0-0" and _numbers(first) < _numbers(position)))
        ):
            raise FeedError(
                f"The stream never had {position}, the last one that was read, or has lost it, as a failover of Redis can; it ends at "
                f"{last}. Begin with an older snapshot of the corpus, whose position is in the stream, and write the lost changes again."
            )
        if position and not is_there and not (is_empty and last == position):
            raise FeedError(
                f"The stream no longer holds {position}, the last one that was read, and ends at {last}: begin with a newer snapshot "
                "of the corpus, or restore the stream."
            )
        if not position and info["entries-added"] != length:
            raise FeedError(
                f"The stream holds {length} of the {info['entries-added']} entries that were ever written: begin with a corpus that names "
                "its position in it."
            )

    def bury(self, entry: Entry, reason: str) -> None:
        """See `Stream.bury`: under its own id in the stream `STREAM:unreadable`, once for all replicas."""
        from redis.exceptions import NoPermissionError, ResponseError

        stream, fields = self._stream + UNREADABLE, {"change": entry.body or b"", "reason": reason}
        with _in_our_words():
            try:
                self._redis.xadd(stream, fields, id=entry.position)
            except ResponseError as error:
                if "equal or smaller" in str(error):
                    with suppress(NoPermissionError):  # who may write there may perhaps not read
                        if self._redis.xrange(stream, entry.position, entry.position):
                            return  # another replica has already put it there
                    raise FeedError("The stream for unreadable entries has a later one already.") from None
                raise

    def close(self) -> None:
        """See `Stream.close`."""
        self._redis.close()


@contextmanager
def _in_our_words() -> Iterator[None]:
    """Raise a FeedError in place of an error of redis-py, which may quote the address, a password or a path."""
    from redis import exceptions

    passing: dict[type[Exception], str] = {
        exceptions.BusyLoadingError: "Redis is still loading its data.",
        exceptions.MasterDownError: "This Redis is a replica that has lost its primary.",
        exceptions.ClusterDownError: "The Redis Cluster does not serve the stream now.",
        exceptions.TimeoutError: "Redis does not answer in time.",
    }
    lasting: dict[type[Exception], str] = {
        exceptions.AuthenticationError: "Redis refuses the feed's user or password.",
        exceptions.NoPermissionError: "Redis does not allow the feed's user to do this: it needs XRANGE, XREAD and XINFO on the stream, "
        "XADD and XRANGE on the one for unreadable entries, and SELECT if the address names a database.",
        exceptions.MovedError: "This node of a Redis Cluster does not hold the stream: name the node that does.",
        exceptions.ReadOnlyError: "This Redis is a replica, which takes no entries: name the primary.",
        exceptions.OutOfMemoryError: "Redis is out of memory.",
    }
    try:
        yield
    except FeedError:
        raise
    except Exception as error:
        for kind, reason in (passing | lasting).items():
            if isinstance(error, kind):
                raise (FeedAway if kind in passing else FeedError)(reason) from None
        if isinstance(error, exceptions.ResponseError):
            is_other = str(error).startswith("WRONGTYPE")
            raise FeedError(
                "The name of the feed belongs to something that is not a stream."
                if is_other
                else "Redis refuses the command."
            ) from None
        raise FeedAway(f"Redis cannot be reached: {_cause_of(error)}.") from None


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


def _numbers(position: str) -> tuple[int, ...]:
    return tuple(map(int, position.split("-")))
