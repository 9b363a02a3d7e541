"""A real Redis stream as the feed: nothing is passed over in silence, whatever was trimmed, lost or restored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import NoPermissionError

from app.feeds.adapters import open_feed
from app.feeds.redis import RedisFeed
from app.feeds.source import FeedGap, NotKept
from loadtest.servers.stream import RedisServer

pytestmark = pytest.mark.skipif(not RedisServer.is_installed(), reason="Debian's redis-server is not installed")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def write(client: Any, *bodies: str) -> list[str]:
    return [client.xadd("posts", {"change": body}).decode() for body in bodies]


def test_entries_come_in_order_behind_a_position(redis: RedisServer) -> None:
    client, feed = redis.client(), open_feed(redis.url("posts"))
    assert feed.after("", 10, 0.01) == [], "nobody has written yet"
    first, second, third = write(client, "a", "b", "c")
    found = feed.after("", 2, 0.01)
    assert [(entry.position, entry.body) for entry in found] == [(first, b"a"), (second, b"b")]
    assert abs(found[0].unix_seconds - time.time()) < 60
    assert [entry.body for entry in feed.after(second, 10, 0.01)] == [b"c"]
    assert feed.after(third, 10, 0.01) == []
    assert feed.after(first, 1, 0.01)[0].position == second, "at most so many"
    client.xadd("posts", {"other": "d"})
    assert [entry.body for entry in feed.after(third, 10, 0.01)] == [b""], "without its field"
    feed.close()


def test_a_wait_ends_as_soon_as_somebody_writes(redis: RedisServer) -> None:
    client, feed = redis.client(), RedisFeed(f"redis://127.0.0.1:{redis.port}", "posts")
    (last,) = write(client, "a")
    began = time.monotonic()
    assert feed.after(last, 10, 0.3) == []
    assert 0.2 < time.monotonic() - began < 2


def test_what_was_trimmed_behind_a_position_is_a_gap(redis: RedisServer) -> None:
    client, feed = redis.client(), open_feed(redis.url("posts"))
    places = write(client, *"abcdef")
    client.xtrim("posts", minid=places[2], approximate=False)
    assert [entry.body for entry in feed.after(places[2], 10, 0.01)] == [b"d", b"e", b"f"], "its own entry is there"
    with pytest.raises(FeedGap, match=f"no longer holds {places[1]}"):
        feed.after(places[1], 10, 0.01)
    with pytest.raises(FeedGap, match="holds 4 of the 6 entries"):
        feed.after("", 10, 0.01)
    client.xtrim("posts", maxlen=0, approximate=False)
    assert feed.after(places[-1], 10, 0.01) == [], "nothing came behind the last one"
    with pytest.raises(FeedGap):
        feed.after(places[2], 10, 0.01)


def test_what_was_deleted_behind_a_position_is_a_gap(redis: RedisServer) -> None:
    client, feed = redis.client(), open_feed(redis.url("posts"))
    places = write(client, *"abcd")
    client.xdel("posts", places[1])
    assert [entry.body for entry in feed.after(places[2], 10, 0.01)] == [b"d"], "what was read before is nobody's gap"
    with pytest.raises(FeedGap, match=f"no longer holds {places[1]}, which was deleted behind {places[0]}"):
        feed.after(places[0], 10, 0.01)
    client.xdel("posts", places[3])
    with pytest.raises(FeedGap, match=f"no longer holds {places[3]}"):
        feed.after(places[2], 10, 0.01)


def test_who_may_not_ask_is_told_so_and_not_of_a_gap(redis: RedisServer) -> None:
    client = redis.client()
    (last,) = write(client, "a")
    client.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~posts", "+@all", "-xinfo")
    feed = open_feed(redis.url("posts").replace("redis://", "redis://reader:word@"))
    for position in ("", last, "1-0"):
        with pytest.raises(NoPermissionError):
            feed.after(position, 10, 0.01)
    client.execute_command("ACL", "SETUSER", "reader", "+xinfo")
    (entry,) = feed.after("", 10, 0.01)
    with pytest.raises(NotKept, match="key"):
        feed.bury(entry, "is no JSON")


def test_a_redis_that_is_full_is_read(redis: RedisServer) -> None:
    """It refuses whatever might take memory: XADD, and each command between MULTI and EXEC."""
    client, feed = redis.client(), open_feed(redis.url("posts"))
    first, _ = write(client, "a", "b")
    client.config_set("maxmemory", 1)
    (entry,) = feed.after(first, 10, 0.01)
    assert entry.body == b"b"
    assert feed.after(entry.position, 10, 0.01) == []
    with pytest.raises(NotKept, match="maxmemory"):
        feed.bury(entry, "is no JSON")


def test_a_stream_that_is_gone_or_older_is_a_gap(redis: RedisServer) -> None:
    client, feed = redis.client(), open_feed(redis.url("posts"))
    first, last = write(client, "a", "b")
    client.xtrim("posts", minid=last, approximate=False)
    client.delete("posts")
    with pytest.raises(FeedGap, match=f"read up to {last}, is gone"):
        feed.after(last, 10, 0.01)
    client.xadd("posts", {"change": "a"}, id=first)
    with pytest.raises(FeedGap, match=f"ends at {first}"):
        feed.after(last, 10, 0.01)


def test_an_unreadable_entry_is_buried_once_for_all_replicas(redis: RedisServer) -> None:
    client = redis.client()
    one, other = (open_feed(redis.url("posts")) for _ in range(2))
    write(client, "x", "y")
    for feed in (one, other):
        for entry in feed.after("", 10, 0.01):
            feed.bury(entry, "is no JSON")
    dead = client.xrange("posts:unreadable")
    assert [fields for _, fields in dead] == [{b"change": body, b"reason": b"is no JSON"} for body in (b"x", b"y")]
    assert [name for name, _ in dead] == [name for name, _ in client.xrange("posts")]


def test_an_unreadable_entry_that_comes_too_late_to_be_buried_is_not_kept(redis: RedisServer) -> None:
    """A stranger wrote to that stream, or another replica could not bury this entry and buried a later one."""
    client, feed = redis.client(), open_feed(redis.url("posts"))
    (place,) = write(client, "x")
    client.xadd("posts:unreadable", {"note": "mine"}, id=f"{int(place.partition('-')[0]) + 1}-0")
    (entry,) = feed.after("", 10, 0.01)
    with pytest.raises(NotKept, match="equal or smaller"):
        feed.bury(entry, "is no JSON")
    client.execute_command("ACL", "SETUSER", "writer", "on", ">word", "~*", "+xadd")
    with pytest.raises(NotKept, match="equal or smaller"):
        open_feed(redis.url("posts").replace("redis://", "redis://writer:word@")).bury(entry, "is no JSON")


def test_what_was_acknowledged_outlives_a_kill_of_redis(redis: RedisServer) -> None:
    feed = open_feed(redis.url("posts"))
    places = write(redis.client(), *map(str, range(50)))
    redis.kill()
    with pytest.raises(Exception, match="refused"):
        feed.after(places[0], 10, 0.01)
    redis.start()
    assert [entry.position for entry in feed.after(places[0], 100, 0.01)] == places[1:]
