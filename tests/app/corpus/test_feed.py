"""Replicas that follow a real Redis stream: each change once, in order, whatever ends when; what they say of themselves, and never say."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from app.corpus.feed import FeedReader
from app.corpus.searches import Searches
from app.corpus.stream import Entry, FeedAway, FeedError, RedisStream, open_feed
from app.errors import ChangedByFeed, CorpusBehind
from app.interface import CorpusState
from app.settings import SettingsProblem
from app.telemetry.metrics import Metrics
from loadtest.machine import ROOT
from model.retrieval.inputs import Mark
from tests.app.corpus.serving import FAR, change, found, ids_of, posts_of, query, running, settings_of
from tests.support.rankers import until
from tests.support.redis import RedisServer
from weights.errors import NotStored, StorageFull

needs_redis = pytest.mark.skipif(not RedisServer.is_installed(), reason="Debian's redis-server is not installed")
pytestmark = pytest.mark.anyio

PASSWORD = "p@s/s#w:rd%1?[x]"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def stream_of(server: RedisServer, login: str = "") -> RedisStream:
    return open_feed(server.address().replace("redis://", f"redis://{login}"))


def write(server: RedisServer, *changes: object) -> str:
    """The position of the last one."""
    client, last = server.client(), ""
    for one in changes:
        body = one if isinstance(one, str) else json.dumps(one)
        last = client.xadd("posts", {"change": body}).decode()
    return last


def upsert(*posts: int, author: int = 3) -> dict[str, Any]:
    return {"upsert": [{"post_id": post, "author_id": author} for post in posts]}


def some(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {"delete": [draw.randrange(1, 60)]} if draw.random() < 0.3 else upsert(draw.randrange(1, 60), author=draw.randrange(1, 40))
        for _ in range(count)
    ]  # fmt: skip


async def at(searches: Searches, position: str) -> CorpusState:
    await until(lambda: searches.mark.position == position)
    await until(lambda: searches.present().mark.position == position)  # type: ignore[union-attr]
    state = searches.present()
    assert state is not None
    return state


# the stream


@needs_redis
def test_entries_come_in_order_behind_a_position(redis: RedisServer) -> None:
    client, stream = redis.client(), stream_of(redis)
    assert stream.after("", 10, 0.01) == [], "nobody has written yet"
    first, second, third = (write(redis, body) for body in "abc")
    entries = stream.after("", 2, 0.01)
    assert [(entry.position, entry.body) for entry in entries] == [(first, b"a"), (second, b"b")]
    assert abs(entries[0].unix_seconds - time.time()) < 60
    assert [entry.body for entry in stream.after(second, 10, 0.01)] == [b"c"]
    assert stream.after(third, 10, 0.01) == []
    assert stream.after(first, 1, 0.01)[0].position == second, "at most so many"
    client.xadd("posts", {"other": "d"})
    assert [entry.body for entry in stream.after(third, 10, 0.01)] == [None], "without its field"
    stream.close()


@needs_redis
def test_what_was_trimmed_or_deleted_behind_a_position_is_said(redis: RedisServer) -> None:
    client, stream = redis.client(), stream_of(redis)
    places = [write(redis, body) for body in "abcdef"]
    client.xtrim("posts", minid=places[2], approximate=False)
    assert [entry.body for entry in stream.after(places[2], 10, 0.01)] == [b"d", b"e", b"f"], "its own entry is there"
    with pytest.raises(FeedError, match=f"no longer holds {places[1]}"):
        stream.after(places[1], 10, 0.01)
    with pytest.raises(FeedError, match="holds 4 of the 6 entries"):
        stream.after("", 10, 0.01)
    client.xdel("posts", places[3])
    assert [entry.body for entry in stream.after(places[4], 10, 0.01)] == [b"f"], "what was read before is nobody's gap"
    with pytest.raises(FeedError, match=f"no longer holds {places[3]}, which was deleted after {places[2]}"):
        stream.after(places[2], 10, 0.01)
    client.xtrim("posts", maxlen=0, approximate=False)
    assert stream.after(places[-1], 10, 0.01) == [], "nothing came behind the last one"
    client.delete("posts")
    with pytest.raises(FeedError, match=f"read up to {places[-1]}, is gone"):
        stream.after(places[-1], 10, 0.01)
    client.xadd("posts", {"change": "a"}, id=places[0])
    with pytest.raises(FeedError, match=f"ends at {places[0]}"):
        stream.after(places[-1], 10, 0.01)


@needs_redis
def test_a_redis_that_is_full_is_read(redis: RedisServer) -> None:
    """It refuses whatever might take memory: XADD, and each command between MULTI and EXEC."""
    stream, first = stream_of(redis), write(redis, "a")
    write(redis, "b")
    redis.client().config_set("maxmemory", 1)
    (entry,) = stream.after(first, 10, 0.01)
    assert entry.body == b"b"
    assert stream.after(entry.position, 10, 0.01) == []
    with pytest.raises(FeedError, match="Redis is out of memory"):
        stream.bury(entry, "is no JSON")


@needs_redis
def test_an_unreadable_entry_is_kept_once_for_all_replicas(redis: RedisServer) -> None:
    client = redis.client()
    write(redis, "x", "y")
    for stream in (stream_of(redis), stream_of(redis)):
        for entry in stream.after("", 10, 0.01):
            stream.bury(entry, "is no JSON")
    kept = client.xrange("posts:unreadable")
    assert [fields for _, fields in kept] == [{b"change": body, b"reason": b"is no JSON"} for body in (b"x", b"y")]
    assert [name for name, _ in kept] == [name for name, _ in client.xrange("posts")]
    client.delete("posts:unreadable")
    client.xadd("posts:unreadable", {"note": "mine"})
    with pytest.raises(FeedError, match="has a later one already"):
        stream.bury(entry, "is no JSON")


@needs_redis
def test_a_user_with_the_documented_commands_is_enough(redis: RedisServer) -> None:
    rule = re.search(r"ACL SETUSER (.+)", (ROOT / "docs/deploy.md").read_text())
    assert rule is not None
    redis.client().execute_command("ACL", "SETUSER", *rule[1].replace(">PASSWORD", ">word").split())
    write(redis, "x")
    stream = stream_of(redis, "ranker:word@")
    (entry,) = stream.after("", 10, 0.01)
    stream.bury(entry, "is no JSON")
    stream_of(redis, "ranker:word@").bury(entry, "is no JSON")
    assert stream.after(entry.position, 10, 0.01) == []
    assert len(redis.client().xrange("posts:unreadable")) == 1
    redis.client().execute_command("SELECT", "2")
    numbered = redis.address("2/posts").replace("redis://", "redis://ranker:word@")
    with pytest.raises(FeedError, match="SELECT if the address names a database"):
        open_feed(numbered).after("", 10, 0.01)
    assert "add `+select`" in (ROOT / "docs/deploy.md").read_text()
    redis.client().execute_command("ACL", "SETUSER", "ranker", "+select")
    assert open_feed(numbered).after("", 10, 0.01) == []


class Redis6(socketserver.StreamRequestHandler):
    """Answers as a Redis 6 whose stream holds the first and the last of three entries."""

    def handle(self) -> None:
        entries = [[b"1-0", [b"change", b"a"]], [b"3-0", [b"change", b"c"]]]
        info = [b"length", 2, b"last-generated-id", b"3-0", b"first-entry", entries[0], b"last-entry", entries[1]]
        while line := self.rfile.readline():
            command = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            self.wfile.write(_encoded({b"XRANGE": entries, b"XINFO": info}.get(command[0].split()[0], "OK")))


def _encoded(reply: Any) -> bytes:
    """As the protocol of Redis has it."""
    match reply:
        case str():
            return b"+%b\r\n" % reply.encode()
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n%b" % (len(reply), b"".join(map(_encoded, reply)))


@pytest.mark.parametrize("position", ["", "1-0"])
def test_a_redis_that_does_not_say_what_was_deleted_is_refused(position: str) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), Redis6) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        stream = open_feed(f"redis://127.0.0.1:{server.server_address[1]}/posts?protocol=2")
        with pytest.raises(FeedError, match=r"This Redis is older than 7\.0 and cannot say what was deleted"):
            stream.after(position, 10, 0.01)
        stream.close()


@needs_redis
def test_changes_lost_by_a_failover_are_told_from_trimming(redis: RedisServer) -> None:
    client, stream = redis.client(), stream_of(redis)
    first, lost = write(redis, "a"), write(redis, "b")
    client.delete("posts")
    client.xadd("posts", {"change": "a"}, id=first)
    with pytest.raises(FeedError, match="Begin with an older snapshot"):
        stream.after(lost, 10, 0.01)
    write(redis, "c")
    with pytest.raises(FeedError, match="Begin with an older snapshot"):
        stream.after(lost, 10, 0.01)
    client.xtrim("posts", maxlen=1, approximate=False)
    with pytest.raises(FeedError, match="begin with a newer snapshot"):
        stream.after(lost, 10, 0.01)


@needs_redis
def test_a_replica_is_read_and_says_that_it_takes_no_entries(redis: RedisServer) -> None:
    stream = stream_of(redis)
    write(redis, "x")
    redis.client().execute_command("REPLICAOF", "127.0.0.1", "1")
    (entry,) = stream.after("", 10, 0.01)
    with pytest.raises(FeedError, match="is a replica, which takes no entries"):
        stream.bury(entry, "is no JSON")


# what is said of a failure

NOT_ALLOWED = (
    "Redis does not allow the feed's user to do this: it needs XRANGE, XREAD and XINFO on the stream, XADD and XRANGE on the one for "
    "unreadable entries, and SELECT if the address names a database."
)


@needs_redis
def test_no_failure_repeats_a_piece_of_the_address(tmp_path: Path) -> None:
    """Neither of its host, its stream nor its password: what is said is shown to anybody who asks /readyz."""
    with RedisServer(tmp_path, PASSWORD) as server:
        client, right = server.client(), server.address("posts")
        client.xadd("posts", {"change": "{}"})
        client.set("strings", "x")
        client.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~posts", "+@all", "-xinfo")
        assert len(open_feed(right).after("", 10, 0.01)) == 1, "odd characters are decoded"
        host = f"127.0.0.1:{server.port}"
        for address, said in (
            (right.replace("1%3F", "2%3F"), "Redis refuses the feed's user or password."),
            (f"redis://{host}/posts", "Redis refuses the feed's user or password."),
            (f"redis://reader:word@{host}/posts", NOT_ALLOWED),
            (right.replace("/posts", "/strings"), "The name of the feed belongs to something that is not a stream."),
            (right.replace("/posts", "/99/posts"), "Redis refuses the command."),
            (
                right.replace("127.0.0.1", "no-such-host.invalid"),
                "Redis cannot be reached: its host name is not known.",
            ),
            (right.replace("redis://", "rediss://") + "?socket_timeout=0.3", "Redis does not answer in time."),
            (
                right.replace("redis://", "rediss://") + "?ssl_ca_certs=/nowhere/ca.pem",
                "Redis cannot be reached: a file that the options name is not there.",
            ),
        ):
            with pytest.raises(FeedError) as refused:
                open_feed(address).after("", 10, 0.01)
            assert str(refused.value) == said
            assert refused.value.__suppress_context__, "a traceback in the log does not repeat it either"


@pytest.mark.parametrize("address", ["redis://:se@cret@host/posts", "redis://host/posts?socket_timeout=secret"])
def test_an_address_that_cannot_be_used_is_refused_at_the_start(address: str) -> None:
    with pytest.raises(SettingsProblem, match=r"RANKER_RETRIEVAL__FEED (must be redis://|has an option)") as refused:
        open_feed(address)
    assert "cret" not in str(refused.value)
    assert "sec" not in str(refused.value)


@needs_redis
def test_options_and_names_are_those_of_redis_py(redis: RedisServer) -> None:
    client = redis.client()
    client.xadd("posts", {"change": "a"})
    client.xadd("posts:eu", {"change": "b"})
    client.execute_command("SELECT", "3")
    other = type(client)(port=redis.port, db=3)
    other.xadd("posts", {"change": "c"})
    for address, body in (
        (redis.address("posts?socket_keepalive=true&health_check_interval=5"), b"a"),
        (redis.address("posts?decode_responses=true"), b"a"),
        (redis.address("posts?protocol=3"), b"a"),
        (redis.address("posts%3Aeu"), b"b"),
        (redis.address("posts:eu"), b"b"),
        (redis.address("3/posts"), b"c"),
        (redis.address("posts?db=3"), b"c"),
    ):
        (entry,) = open_feed(address).after("", 10, 0.01)
        assert entry.body == body


# replicas


@needs_redis
async def test_replicas_agree_whatever_the_batches_and_restarts(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reads all at once, one is stopped in between, one comes later: one sequence, one digest, and every post with the same bits."""
    one, other, third = (settings_of(tmp_path / name, feed=redis.address()) for name in "abc")
    async with running(one) as first:
        async with running(other) as second:
            last = write(redis, *some(40, 1))
            await at(first, last), await at(second, last)
        last = write(redis, *some(40, 2))
        state = await at(first, last)
        async with running(other) as second, running(third) as late:
            for each in (second, late):
                assert (await at(each, last)).mark == state.mark
                assert await posts_of(each) == await posts_of(first)
        assert state.mark.sequence == 80
    async with running(one) as again:
        assert again.mark == state.mark


@needs_redis
async def test_a_post_that_is_deleted_in_the_stream_is_found_nowhere(tmp_path: Path, redis: RedisServer) -> None:
    async with running(settings_of(tmp_path, feed=redis.address())) as searches:
        await at(searches, write(redis, upsert(900)))
        assert {1, 900} <= await ids_of(searches)
        last = write(redis, {"delete": ["1", 900]})
        await at(searches, last)
        assert not {1, 900} & await ids_of(searches)
        with pytest.raises(ChangedByFeed):
            await searches.change(change([2], []))
    async with running(settings_of(tmp_path, feed=redis.address())) as again:
        assert again.mark.position == last, "in the same transaction as the change"
        assert not {1, 900} & await ids_of(again)


@needs_redis
async def test_a_change_without_the_feed_leaves_its_position(tmp_path: Path, redis: RedisServer) -> None:
    """Else the whole stream would be read again, and posts that it deletes later would come back meanwhile."""
    async with running(settings_of(tmp_path, feed=redis.address())) as searches:
        last = write(redis, upsert(900), {"delete": [900]})
        await at(searches, last)
    async with running(settings_of(tmp_path)) as alone:
        state = await alone.change(change([2], []))
        assert (state.mark.sequence, state.mark.position) == (3, last)
    async with running(settings_of(tmp_path, feed=redis.address())) as again:
        state = await at(again, write(redis, upsert(901)))
        assert state.mark.sequence == 4, "each entry once"
        assert {901} == {2, 900, 901} & await ids_of(again)


@needs_redis
async def test_an_unreadable_entry_is_counted_saved_and_stops_nobody(tmp_path: Path, redis: RedisServer) -> None:
    bad = {
        "{": "truncated",
        "": "empty|truncated",
        '{"upsert": 3}': "upsert: ",
        '{"upsert": [{"post_id": 0, "author_id": 1}]}': "must not name the post 0",
        '{"upsert": [{"post_id": 5, "author_id": 1, "created_at": 1780000000000}]}': "Unix seconds.*milliseconds",
        '{"delete": [1], "more": 2}': "unknown field",
        "[]": "",
    }
    async with running(settings_of(tmp_path, feed=redis.address())) as searches:
        with structlog.testing.capture_logs() as logs:
            write(redis, upsert(900), *bad)
            redis.client().xadd("posts", {"body": "{}"})
            state = await at(searches, write(redis, upsert(901)))
            count = b'ranker_feed_entries_total{result="unreadable"} 8.0'
            await until(lambda: count in searches.metrics.render())
        assert (state.mark.sequence, state.posts) == (2, 299 + 2)
    said = [line["reason"] for line in logs if line["event"] == "feed_entry_unreadable"]
    assert said[-1] == "The entry has no field named change."
    assert len(said) == 8
    assert all(said)
    kept = redis.client().xrange("posts:unreadable")
    assert [fields[b"change"].decode() for _, fields in kept] == [*bad, ""]
    assert [fields[b"reason"].decode() for _, fields in kept] == said


@needs_redis
async def test_who_is_behind_serves_on_and_says_so(tmp_path: Path, redis: RedisServer) -> None:
    async with running(settings_of(tmp_path, feed=redis.address(), lag=1.0)) as searches:
        feed = searches.feed
        assert feed is not None
        await until(lambda: searches.problem == "")
        redis.kill()
        await until(lambda: "behind their feed" in searches.problem)
        assert searches.problem.endswith("Redis cannot be reached: it refuses the connection.")
        assert feed.reason == "Redis cannot be reached: it refuses the connection."
        assert len((await found(searches, query(1, 5))).posts) == 5
        assert (feed.lag_seconds or 0) > 1
        redis.start()
        await at(searches, write(redis, upsert(900)))
        await until(lambda: searches.problem == feed.reason == "")


@needs_redis
async def test_an_older_copy_of_the_corpus_is_unready_until_caught_up(tmp_path: Path, redis: RedisServer) -> None:
    async with running(settings_of(tmp_path, feed=redis.address())) as searches:
        shutil.copytree(tmp_path / "corpus-v1", tmp_path / "older")
        last = write(redis, {"delete": [1]}, {"delete": [2]})
        await at(searches, last)
        await until(lambda: not searches.problem)
        await searches.swap(tmp_path / "towers-v1", tmp_path / "corpus-v1")
        assert not searches.problem
        redis.client().xtrim("posts", minid=last, approximate=False)
        await searches.swap(tmp_path / "towers-v1", tmp_path / "older")
        assert "have not been read from their feed yet" in searches.problem
        await until(lambda: "begin with" in searches.problem)


@needs_redis
async def test_a_caller_sees_its_own_write_or_is_told(tmp_path: Path, redis: RedisServer) -> None:
    async with running(settings_of(tmp_path, feed=redis.address())) as searches:
        last = write(redis, upsert(900))
        await at(searches, last)
        beyond = f"{int(time.time() * 1000) + 60_000}-0"
        for wanted, is_there in (("0", True), ("1", True), ("2", False), (last, True), (beyond, False)):
            asked = query(at_least=wanted)
            if is_there:
                assert 900 in (await found(searches, asked)).posts.post_ids
            else:
                with pytest.raises(CorpusBehind) as raised:
                    await found(searches, asked)
                assert raised.value.retry_after_seconds == 1.0


@needs_redis
async def test_a_caller_waits_a_moment_for_its_own_write(tmp_path: Path, redis: RedisServer) -> None:
    async with running(settings_of(tmp_path, feed=redis.address())) as searches:
        begun, keys = time.monotonic(), ["a"] * 50 + ["b"]
        waiting = [asyncio.ensure_future(searches.reach("1", key, FAR)) for key in keys]
        await asyncio.sleep(0.02)
        refused = [each for each in waiting if each.done()]
        assert {type(each.exception()) for each in refused} == {CorpusBehind}
        assert len(refused) == 34, "a key holds half of the places"
        assert not waiting[-1].done(), "which leaves room for others"
        write(redis, upsert(900))
        await asyncio.gather(*(each for each in waiting if each not in refused))
        assert time.monotonic() - begun < 0.5, "the change wakes them"
        assert 900 in (await found(searches, query(at_least="1"))).posts.post_ids
        begun = time.monotonic()
        with pytest.raises(CorpusBehind):
            await searches.reach("2", None, time.monotonic() + 0.1)
        assert time.monotonic() - begun < 0.4, "not beyond its deadline"


# the reader, with a stream and a corpus of the test's


class Corpus:
    """Makes whatever it is given, at once, or raises what it has in `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.mark = Mark()
        self.error = error
        self.served: Any = type("Served", (), {"corpus": type("Manifest", (), {"ids": "uint64"})})

    async def follow(self, changes: Any, after: str, position: str) -> Any:
        if self.error is not None:
            raise self.error
        self.mark = Mark(self.mark.sequence + len(changes), "", position)
        return type("State", (), {"mark": self.mark})


class Entries:
    """A stream of these entries."""

    def __init__(self, *entries: Entry | Exception) -> None:
        self.entries = list(entries)
        self.asked: list[float] = []
        self.kept: list[str] = []
        self.is_closed = False

    def after(self, position: str, most: int, wait_seconds: float) -> list[Entry]:
        self.asked.append(time.monotonic())
        found = list[Entry]()
        for entry in self.entries:
            if isinstance(entry, Exception):
                if not found:
                    raise entry
                break
            if not Mark(position=position).reaches(entry.position) and len(found) < most:
                found.append(entry)
        return found

    def bury(self, entry: Entry, reason: str) -> None:
        self.kept.append(entry.position)
        raise FeedError("Redis is out of memory.")

    def close(self) -> None:
        self.is_closed = True


def entry(number: int, body: object = None, seconds: float = 0.0) -> Entry:
    said = body if isinstance(body, bytes) else json.dumps(body or {"delete": [number]}).encode()
    return Entry(f"{number}-0", said, seconds)


async def follow(stream: Entries, corpus: Corpus, seconds: float = 0.5, until_: Any = None) -> FeedReader:
    reader = FeedReader(stream, Metrics(), 300.0)
    running = asyncio.ensure_future(reader.run(corpus))
    if until_ is None:
        await asyncio.sleep(seconds)
    else:
        await until(lambda: until_(reader))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert stream.is_closed, "its connection ends with it"
    return reader


async def test_an_unreadable_entry_is_logged_once_however_often_tried() -> None:
    """Also where it cannot be kept: the entry itself stays in the stream."""
    stream = Entries(entry(1, b"{"), entry(2), entry(3, b"[]"))
    with structlog.testing.capture_logs() as logs:
        await follow(stream, Corpus(NotStored("planted")), 1.2)
    assert len(stream.asked) > 2
    said = [line for line in logs if line["event"] == "feed_entry_unreadable"]
    assert [line["position"] for line in said] == ["1-0", "3-0"]
    assert all(line["reason"].endswith("It could not be saved: Redis is out of memory.") for line in said)


async def test_changes_do_not_wait_for_what_is_put_aside() -> None:
    """The feed takes no entries, as in a failover: changes are made, also those that come later, and the entry is saved in the end."""
    stream, corpus, is_away = Entries(entry(1, b"{"), entry(2), entry(3, b"[")), Corpus(), True

    def bury(buried: Entry, reason: str) -> None:
        if is_away:
            raise FeedAway("Redis does not answer in time.")
        stream.kept.append(buried.position)

    stream.bury = bury  # type: ignore[method-assign]
    reader = FeedReader(stream, Metrics(), 300.0)
    running = asyncio.ensure_future(reader.run(corpus))
    with structlog.testing.capture_logs() as logs:
        await until(lambda: corpus.mark.position == "3-0")
        stream.entries.append(entry(4))
        await until(lambda: corpus.mark.position == "4-0")
        assert (corpus.mark.sequence, reader.reason, stream.kept) == (2, "", [])
        is_away = False
        await until(lambda: stream.kept == ["1-0", "3-0"])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not [line for line in logs if "saved" in line.get("reason", "")]


@pytest.mark.parametrize("length", [1, 100_000])
async def test_a_feed_of_unreadable_entries_stops_where_none_is_saved(length: int) -> None:
    """They are kept in memory until then."""
    bad = b"{".ljust(length)
    stream, corpus = Entries(*(entry(number, bad) for number in range(1, 9000))), Corpus()

    def bury(buried: Entry, reason: str) -> None:
        raise FeedAway("Redis does not answer in time.")

    stream.bury = bury  # type: ignore[method-assign]
    await follow(stream, corpus, until_=lambda reader: "unreadable" in reader.reason)
    assert corpus.mark.reaches("1-0")
    assert not corpus.mark.reaches("8000-0" if length == 1 else "800-0")


async def test_a_feed_that_ends_puts_nothing_more_aside() -> None:
    stream = Entries(*(entry(number, b"{") for number in range(1, 40)))
    begun = threading.Event()

    def bury(buried: Entry, reason: str) -> None:
        stream.kept.append(buried.position)
        begun.set()
        time.sleep(0.05)

    stream.bury = bury  # type: ignore[method-assign]
    with structlog.testing.capture_logs() as logs:
        await follow(stream, Corpus(), until_=lambda _: begun.is_set())
    ended = len(stream.kept)
    await asyncio.sleep(0.3)
    assert len(stream.kept) <= ended + 1 < 20
    said = [line for line in logs if line["event"] == "feed_entry_unreadable"]
    assert [line["position"] for line in said] == [f"{number}-0" for number in range(1, 40)], (
        "none is passed over in silence"
    )
    assert "the feed ends" in said[-1]["reason"]


async def test_long_entries_behind_short_ones_are_read_in_pieces() -> None:
    """A reply of over 3 MB does not come in time, and nobody knows how long the next entries are."""

    class Slow(Entries):
        longest = 0

        def after(self, position: str, most: int, wait_seconds: float) -> list[Entry]:
            found = super().after(position, most, wait_seconds)
            size = sum(len(each.body or b"") for each in found)
            self.longest = max(self.longest, size)
            if size > 3_000_000:
                raise FeedAway("Redis does not answer in time.")
            return found

    stream, corpus = Slow(*map(entry, range(1, 30))), Corpus()
    reader = FeedReader(stream, Metrics(), 300.0)
    running = asyncio.ensure_future(reader.run(corpus))
    await until(lambda: len(stream.asked) > 30)
    long = json.dumps({"delete": [5]}).encode().ljust(100_000)
    stream.entries.extend(entry(number, long) for number in range(30, 400))
    await until(lambda: corpus.mark.position == "399-0")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert corpus.mark.sequence == 399
    assert stream.longest < 8_000_000, "a short while ago, thousands of short ones came at once"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StorageFull("/srv/corpus"), "A change of the feed cannot be stored: no room on the disk, or it is read-only."),
        (NotStored("/srv/corpus"), "A change of the feed cannot be stored: it cannot be written now."),
        (RuntimeError("/srv/corpus"), "A change of the feed cannot be applied: RuntimeError."),
    ],
)
async def test_a_failed_change_is_retried_and_named_without_paths(error: Exception, said: str) -> None:
    corpus, stream = Corpus(error), Entries(entry(1, seconds=time.time() + 1e6))
    with structlog.testing.capture_logs() as logs:
        reader = FeedReader(stream, Metrics(), 300.0)
        running = asyncio.ensure_future(reader.run(corpus))
        await until(lambda: bool(reader.reason))
        assert reader.reason == said
        assert (
            reader.problem == f"The posts are {time.time():.0f} s behind their feed. {said}" or said in reader.problem
        )
        corpus.error = None
        await until(lambda: corpus.mark.position == "1-0" and not reader.reason)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [line.get("reason") for line in logs] == [said, None]


async def test_a_stream_that_fails_is_not_asked_as_fast_as_it_can() -> None:
    stream = Entries(FeedError("planted"))
    reader = await follow(stream, Corpus(), 1.7)
    assert reader.reason == "planted"
    assert np.all(np.diff(stream.asked)[:3] >= (0.2, 0.4, 0.8))


@pytest.mark.parametrize("hours", [-2, 2])
async def test_setting_the_clock_makes_no_replica_newer_or_older(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    reader = await follow(Entries(), Corpus(), until_=lambda reader: reader.lag_seconds is not None)
    real, ticks = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
    assert reader.problem == ""
    monkeypatch.setattr(time, "monotonic", lambda: ticks() + 301)  # the feed is out meanwhile
    assert reader.problem == "The posts are 301 s behind their feed." or "302 s" in reader.problem


async def test_a_backlog_is_as_old_as_its_oldest_pending_entry() -> None:
    """From before the machine started, too."""
    backlog = Entries(entry(1, seconds=time.time() - 1e9))
    reader = await follow(backlog, Corpus(NotStored("planted")), until_=lambda reader: bool(reader.reason))
    assert reader.lag_seconds == pytest.approx(1e9, abs=10)


class NoEntries(list[Entry]):
    """What a stream without new entries returns; `meanwhile` is called while somebody looks at it."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.meanwhile = meanwhile

    def __iter__(self) -> Iterator[Entry]:
        self.meanwhile()
        return super().__iter__()


async def test_an_older_corpus_that_comes_during_a_read_is_not_up_to_date() -> None:
    corpus, stream = Corpus(), Entries(FeedError("entries are missing"))
    corpus.mark = Mark(position="2-0")
    reader = FeedReader(stream, Metrics(), 300.0)

    def swap() -> None:
        corpus.mark = Mark()
        reader.serves(corpus.mark)

    def first(position: str, most: int, wait_seconds: float) -> list[Entry]:
        del stream.after  # type: ignore[attr-defined]  # the next read is that of `Entries`
        return NoEntries(swap)

    stream.after = first  # type: ignore[method-assign]
    running = asyncio.ensure_future(reader.run(corpus))
    await until(lambda: bool(reader.reason))
    assert reader.problem == "The posts have not been read from their feed yet. entries are missing"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_older_corpus_that_comes_during_a_change_is_not_up_to_date() -> None:
    corpus, stream = Corpus(), Entries(entry(3, seconds=time.time()), FeedError("entries are missing"))
    corpus.mark = Mark(position="2-0")
    reader = FeedReader(stream, Metrics(), 300.0)

    async def follow_another(changes: Any, after: str, position: str) -> Any:
        """As the real one does if another corpus serves by then: it makes no change."""
        del corpus.follow  # type: ignore[attr-defined]  # the next one is that of `Corpus`
        corpus.mark = Mark()
        reader.serves(corpus.mark)
        stream.entries = stream.entries[1:]

    corpus.follow = follow_another  # type: ignore[method-assign]
    running = asyncio.ensure_future(reader.run(corpus))
    await until(lambda: bool(reader.reason))
    assert reader.problem == "The posts have not been read from their feed yet. entries are missing"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
