"""A Redis stream as the feed: field `change` of each entry, whose id is its position. Needs the extra `redis`.

Each replica reads the whole stream, without a consumer group. `XTRIM STREAM MINID POSITION` may drop what comes before the position of
the oldest snapshot; that entry itself stays, which is how a reader knows that nothing behind it is missing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from app.feeds.source import Entry, FeedGap, NotKept

CONNECT_SECONDS = 5.0
UNREADABLE = ":unreadable"  # behind the stream's name: the stream of entries that nobody can read


class RedisFeed:
    """As `Source`."""

    def __init__(self, url: str, stream: str) -> None:
        self.stream = stream
        self._redis: Any = redis.Redis.from_url(
            url, socket_connect_timeout=CONNECT_SECONDS, socket_timeout=CONNECT_SECONDS, retry=Retry(NoBackoff(), 0)
        )

    def after(self, position: str, most: int, wait_seconds: float) -> list[Entry]:
        """As `Source.after`."""
        # in this order, so that whatever is deleted before the first is seen by the second; a Redis that is full refuses MULTI
        with self._redis.pipeline(transaction=False) as asked:
            asked.xrange(self.stream, position or "-", "+", most + bool(position))
            asked.xinfo_stream(self.stream)
            found, info = asked.execute(raise_on_error=False)
        if isinstance(found, RedisError):
            raise found
        is_there = bool(position and found and found[0][0].decode() == position)
        self._check_whole(position, info, is_there=is_there, is_empty=not found)
        found = found[is_there:]
        if not found:
            self._redis.xread({self.stream: position or "0-0"}, count=1, block=max(1, round(1000 * wait_seconds)))
        return [
            Entry(name.decode(), (fields or {}).get(b"change", b""), int(name.partition(b"-")[0]) / 1000)
            for name, fields in found
        ]

    def _check_whole(self, position: str, info: Any, *, is_there: bool, is_empty: bool) -> None:
        """Raises FeedGap unless the entries behind this position are all there; its own may be there, too."""
        if isinstance(info, RedisError):
            if "no such key" not in str(info):
                raise info
            if position:
                raise FeedGap(f"The stream {self.stream}, which was read up to {position}, is gone.")
            return  # nobody has written yet
        last, length = info["last-generated-id"].decode(), info["length"]
        deleted = info.get("max-deleted-entry-id", b"0-0").decode()  # by XDEL; Redis 7 says it
        if position and _numbers(deleted) > _numbers(position):
            raise FeedGap(
                f"The stream {self.stream} no longer holds {deleted}, which was deleted behind {position}, which was read last: begin "
                "with a newer snapshot of the corpus."
            )
        if position and not is_there and not (is_empty and last == position):
            raise FeedGap(
                f"The stream {self.stream} no longer holds {position}, which was read last, and ends at {last}: begin with a newer "
                "snapshot of the corpus, or restore the stream."
            )
        if not position and info.get("entries-added", length) != length:
            raise FeedGap(
                f"The stream {self.stream} holds {length} of the {info['entries-added']} entries that were ever written: begin with a "
                "corpus that names its position in it."
            )

    def bury(self, entry: Entry, reason: str) -> None:
        """As `Source.bury`: under its own id in the stream `STREAM:unreadable`, once for all replicas."""
        kept = self.stream + UNREADABLE
        try:
            self._redis.xadd(kept, {"change": entry.body, "reason": reason}, id=entry.position)
        except ResponseError as error:
            with suppress(ResponseError):  # who may write there may perhaps not read
                if "equal or smaller" in str(error) and self._redis.xrange(kept, entry.position, entry.position):
                    return  # another replica has already put it there
            raise NotKept(str(error)) from error

    def close(self) -> None:
        """As `Source.close`."""
        self._redis.close()


def _numbers(position: str) -> tuple[int, ...]:
    return tuple(map(int, position.split("-")))
