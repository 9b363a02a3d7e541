"""Replicas that follow a real Redis stream: each change once, in order, whatever ends when; and what they say of themselves."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from app.engine.loading import retrieval_loader
from app.errors import ChangedByFeed, CorpusBehind
from app.feeds.adapters import open_feed
from app.interface import Changed
from app.request.posts import read_change
from app.service import feed as reader
from app.service.feed import FeedReader
from app.service.retrieval import RetrievalService
from app.settings import Settings
from app.telemetry.metrics import Metrics
from loadtest.servers.stream import RedisServer
from tests.app import retrieving
from tests.app.fakes import FakeClock, until
from tests.app.service.test_retrieval import DEADLINE, everything, found, query
from tests.app.serving import value_of
from weights.errors import NotStored

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not RedisServer.is_installed(), reason="Debian's redis-server is not installed"),
]

read = partial(read_change, ids="uint64")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def paths_of(root: Path) -> tuple[Path, Path]:
    return (root / "towers-v1", root / "corpus-v1") if root.exists() else retrieving.written(root)


@asynccontextmanager
async def replica(redis: RedisServer, root: Path, lag_seconds: float = 300.0) -> AsyncIterator[RetrievalService]:
    """One with a directory of its own, which is there already after the first time."""
    paths = paths_of(root)
    service = RetrievalService(retrieval_loader(*paths, Settings(threads=1)), Settings(), Metrics(), FakeClock())
    service.feed = FeedReader(open_feed(redis.url("posts")), read, service.metrics, lag_seconds)
    await service.load()
    try:
        yield service
    finally:
        await service.stop(5.0)


async def at(service: RetrievalService, position: str) -> Changed:
    await until(lambda: service.state().mark.position == position)  # type: ignore[union-attr]
    return service.state()  # type: ignore[return-value]


def write(redis: RedisServer, *changes: object) -> str:
    """The position of the last one."""
    client, last = redis.client(), ""
    for change in changes:
        body = change if isinstance(change, str) else json.dumps(change)
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


async def test_replicas_agree_whatever_the_batches_and_restarts(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One takes one entry at a time, one many; one is stopped and compacted in between: one sequence, digest and answer."""
    monkeypatch.setattr("app.service.retrieval.COMPACT_ROWS", 30)
    async with replica(redis, tmp_path / "a") as one:
        monkeypatch.setattr(reader, "MOST_ENTRIES", 1)
        async with replica(redis, tmp_path / "b") as other:
            last = write(redis, *some(40, 1))
            await at(one, last), await at(other, last)
        monkeypatch.setattr(reader, "MOST_ENTRIES", 2000)
        last = write(redis, *some(40, 2))
        async with replica(redis, tmp_path / "b") as other:
            first, second = await at(one, last), await at(other, last)
            assert first.mark == second.mark
            assert (first.mark.sequence, first.posts) == (80, second.posts)
            ours, theirs = [await found(each, query(1, 500), DEADLINE) for each in (one, other)]
            assert everything(ours) == everything(theirs)
            assert ours.posts.mark == first.mark
    async with replica(redis, tmp_path / "c") as third:
        assert (await at(third, last)).mark == first.mark


async def test_a_change_that_was_recorded_and_not_made_is_made_once(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine fails after the disk has it: the log is read again, and the feed goes on behind it."""
    async with replica(redis, tmp_path / "a") as service:
        await at(service, write(redis, upsert(900)))
        engine = service._loaded.engine
        monkeypatch.setattr(engine, "change", lambda change: (_ for _ in ()).throw(RuntimeError("planted")))
        last = write(redis, upsert(901), {"delete": [900]})
        state = await at(service, last)
        assert (state.mark.sequence, state.posts) == (3, 299 + 1)
        assert service._loaded.engine is not engine


async def test_what_cannot_be_read_is_counted_said_and_kept_and_stops_nobody(
    tmp_path: Path, redis: RedisServer
) -> None:
    bad = [
        "{",
        "",
        '{"upsert": 3}',
        '{"upsert": [{"post_id": 0, "author_id": 1}]}',
        json.dumps({"delete": [1], "more": 2}),
    ]
    async with replica(redis, tmp_path / "a") as service:
        with structlog.testing.capture_logs() as logs:
            last = write(redis, upsert(900), *bad, upsert(901), "[]")
            state = await at(service, last)
        assert (state.mark.sequence, state.posts) == (2, 299 + 2)
        counted = service.metrics.feed_entries
        await until(lambda: counted.labels("made")._value.get() == 2)
        assert counted.labels("unreadable")._value.get() == 6
        said = [line for line in logs if line["event"] == "feed_entry_unreadable"]
        assert len(said) == 6
        assert all(line["reason"] and line["position"] for line in said)
    buried = redis.client().xrange("posts:unreadable")
    assert [fields[b"change"].decode() for _, fields in buried] == [*bad, "[]"]


async def test_what_cannot_be_read_is_said_once_however_often_it_is_tried(redis: RedisServer) -> None:
    """Also where it cannot be copied: the entry itself stays in the stream."""
    client = redis.client()
    client.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~posts", "+@all")
    source = open_feed(redis.url("posts").replace("redis://", "redis://reader:word@"))
    feed, last = FeedReader(source, read, Metrics(), 300.0), write(redis, "{", upsert(900), "[]")

    class Full(Corpus):
        async def follow(self, changes: object, after: str, position: str) -> Any:
            raise NotStored("planted")

    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(NotStored):
                await feed._follow(Full())
        await feed._follow(Corpus())
    assert feed._metrics.feed_entries.labels("unreadable")._value.get() == 2
    assert [line["position"] == last for line in logs] == [False, True]
    assert all("It could not be saved" in line["reason"] for line in logs)
    source.close()


async def test_who_is_behind_serves_on_and_says_so(tmp_path: Path, redis: RedisServer) -> None:
    async with replica(redis, tmp_path / "a", lag_seconds=1.0) as service:
        assert service.feed is not None
        assert service.problem == "The posts have not been read from their feed yet."
        await until(lambda: service.problem == "")
        redis.kill()
        await until(lambda: "behind their feed" in service.problem)
        assert "Connection" in service.problem
        assert len((await found(service, query(1), DEADLINE)).posts) == 5
        assert (service.feed.lag_seconds or 0) > 1
        redis.start()
        last = write(redis, upsert(900))
        await at(service, last)
        await until(lambda: service.problem == "")


async def test_a_gap_is_no_silence(tmp_path: Path, redis: RedisServer) -> None:
    async with replica(redis, tmp_path / "a") as service:
        await at(service, write(redis, upsert(900)))
    write(redis, upsert(901), upsert(902))
    redis.client().xtrim("posts", maxlen=1, approximate=False)
    async with replica(redis, tmp_path / "a", lag_seconds=0.1) as service:
        await until(lambda: "no longer holds" in service.problem)
        assert service.state().mark.sequence == 1


async def test_a_corpus_that_has_not_reached_the_feed_is_not_ready_although_that_before_it_had(
    tmp_path: Path, redis: RedisServer
) -> None:
    """An older copy is loaded, and the entries behind it are gone. The present one, read again, stays ready."""
    async with replica(redis, tmp_path / "a") as service:
        shutil.copytree(tmp_path / "a" / "corpus-v1", tmp_path / "older")
        last = write(redis, {"delete": [1]}, {"delete": [2]})
        await at(service, last)
        await until(lambda: not service.problem)
        await service.swap(service._loaded.again)
        assert not service.problem
        redis.client().xtrim("posts", minid=last, approximate=False)
        older = retrieval_loader(tmp_path / "a" / "towers-v1", tmp_path / "older", Settings(threads=1))
        await service.swap(older)
        assert "have not been read from their feed yet" in service.problem
        assert service.feed is not None
        await until(lambda: "begin with" in service.problem)
        assert service.feed.lag_seconds is None


async def test_two_processes_on_one_directory_make_each_change_once(tmp_path: Path, redis: RedisServer) -> None:
    async with replica(redis, tmp_path / "a", 2.0) as first, replica(redis, tmp_path / "a", 2.0) as second:
        last = write(redis, *some(30, 3))
        assert (await at(first, last)).mark == (await at(second, last)).mark
        assert first.state().mark.sequence == 30
        await until(lambda: first.problem == second.problem == "")


async def test_a_caller_sees_its_own_write_or_is_told(tmp_path: Path, redis: RedisServer) -> None:
    async with replica(redis, tmp_path / "a") as service:
        last = write(redis, upsert(900))
        await at(service, last)
        beyond = f"{int(time.time() * 1000) + 60_000}-0"
        for wanted, is_there in (("0", True), ("1", True), ("2", False), (last, True), (beyond, False)):
            asked = query(1, 500)
            asked.at_least = wanted
            if is_there:
                assert 900 in (await found(service, asked, DEADLINE)).posts.post_ids
            else:
                with pytest.raises(CorpusBehind) as raised:
                    await found(service, asked, DEADLINE)
                assert raised.value.retry_after_seconds == 1.0
        with pytest.raises(ChangedByFeed):
            await service.change(read(json.dumps(upsert(1)).encode()))


async def test_a_milestone_is_shown_exactly(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that are scraped at different moments show their digests after the same change."""
    monkeypatch.setattr(reader, "MILESTONE", 8)
    monkeypatch.setattr("app.service.retrieval.MILESTONE", 8)
    changes = some(30, 4)
    last = write(redis, *changes)
    async with replica(redis, tmp_path / "a") as one:
        await at(one, last)
        assert one.milestone.sequence == 24
        monkeypatch.setattr(reader, "MOST_ENTRIES", 5)
        async with replica(redis, tmp_path / "b") as other:
            await at(other, last)
            assert other.milestone == one.milestone


class Nothing:
    """Of a feed: what no test looks at."""

    def bury(self, entry: object, reason: str) -> None: ...
    def close(self) -> None: ...


class Corpus:
    """Makes whatever it is given, at once."""

    def mark(self) -> Any:
        return reader.Mark()

    async def follow(self, changes: object, after: str, position: str) -> Any:
        return SimpleNamespace(mark=reader.Mark(0, "", position))


async def test_long_entries_are_read_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held of the feed is bounded by bytes, as far as entries are like those before."""
    asked: list[int] = []

    class Source(Nothing):
        def after(self, position: str, most: int, wait_seconds: float) -> list[Any]:
            asked.append(most)
            return [reader.Entry(f"{len(asked)}-0", b" " * 2**20, 0.0)] if len(asked) < 3 else []

    each = FeedReader(Source(), read, Metrics(), 1.0)
    for _ in range(4):
        await each._follow(Corpus())
    assert asked[0] == 16
    assert asked[1:3] == [16, 16]
    assert asked[3] > 16
    assert np.all(np.array(asked) <= reader.MOST_ENTRIES)


@pytest.mark.parametrize("others", [False, True])
def test_what_another_process_has_made_is_not_counted_and_read_again(others: bool) -> None:
    """Only the corpus knows how far it is: where it is elsewhere than this part ends, the next look begins there."""
    body = json.dumps({"delete": ["1"]}).encode()

    class Source(Nothing):
        def after(self, position: str, most: int, wait_seconds: float) -> list[Any]:
            return [reader.Entry(f"{number}-0", body, 5.0) for number in (1, 2)]

    class Ahead(Corpus):
        async def follow(self, changes: object, after: str, position: str) -> Any:
            return await super().follow(changes, after, "9-0" if others else position)

    metrics = Metrics()
    asyncio.run(FeedReader(Source(), read, metrics, 1.0)._follow(Ahead()))
    assert value_of(metrics.render().decode(), 'ranker_feed_entries_total{result="made"}') == (0 if others else 2)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_what_was_read_for_another_corpus_tells_nothing_of_this_one(is_swapped: bool) -> None:
    """Another one takes its place while the feed is asked, and the feed has nothing new for that which went."""
    corpus = Corpus()

    class Source(Nothing):
        def after(self, position: str, most: int, wait_seconds: float) -> list[Any]:
            if is_swapped:
                corpus.mark = lambda: reader.Mark()  # type: ignore[method-assign]
                each.serves(corpus.mark())
            return []

    corpus.mark = lambda: reader.Mark(0, "", "5-0")  # type: ignore[method-assign]
    each = FeedReader(Source(), read, Metrics(), 1.0)
    asyncio.run(each._follow(corpus))
    assert (each.lag_seconds is None) == is_swapped


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_that_is_set_makes_no_replica_look_newer_or_older(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    class Source(Nothing):
        def after(self, position: str, most: int, wait_seconds: float) -> list[Any]:
            return []

    each = FeedReader(Source(), read, Metrics(), 300.0)
    asyncio.run(each._follow(Corpus()))
    real, ticks = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
    assert each.problem == ""
    monkeypatch.setattr(time, "monotonic", lambda: ticks() + 301)  # the feed is out meanwhile
    assert each.problem == "The posts are 301 s behind their feed."


def test_what_is_read_at_once_is_made_in_parts_that_one_request_might_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """And while a part is being made, the replica knows how old what it serves is: as old as the oldest entry that is not made."""
    monkeypatch.setattr(reader, "MAX_CHANGED", 5)
    now, made = time.time(), list[tuple[int, float | None]]()
    bodies = [json.dumps(change).encode() for change in (upsert(1, 2), {"delete": ["3", "4"]}, upsert(5, 6), upsert(7))]

    class Source(Nothing):
        def after(self, position: str, most: int, wait_seconds: float) -> list[Any]:
            return [reader.Entry(f"{number}-0", body, now - 60 + number) for number, body in enumerate(bodies)]

    class Noting(Corpus):
        async def follow(self, changes: Any, after: str, position: str) -> Any:
            made.append((sum(len(change.delete) + len(change.upsert.post_ids) for change in changes), each.lag_seconds))
            return await super().follow(changes, after, position)

    each = FeedReader(Source(), read, Metrics(), 1.0)
    asyncio.run(each._follow(Noting()))
    assert [posts for posts, _ in made] == [4, 3]
    assert made[0][1] == pytest.approx(60, abs=2)
    assert made[1][1] == pytest.approx(59, abs=2)


def test_a_backlog_from_before_the_machine_started_is_as_old_as_it_is() -> None:
    class Source(Nothing):
        def after(self, position: str, most: int, wait_seconds: float) -> list[Any]:
            return [reader.Entry("1-0", b"{}", time.time() - 1e9)]

    class Full(Corpus):
        async def follow(self, changes: object, after: str, position: str) -> Any:
            raise NotStored("planted")

    each = FeedReader(Source(), read, Metrics(), 300.0)
    with pytest.raises(NotStored):
        asyncio.run(each._follow(Full()))
    assert each.lag_seconds == pytest.approx(1e9, abs=10)


@pytest.mark.parametrize("of_the_first", [0.005, 1e11])
def test_a_wrong_clock_of_the_feed_makes_a_replica_neither_late_nor_in_time_for_ever(of_the_first: float) -> None:
    """A replica that was at the end and is a moment behind says so, and one that can no longer make the changes becomes late."""
    entries = [[], [reader.Entry("1-0", b"{}", of_the_first)]]
    lags = list[float | None]()

    class Source(Nothing):
        def after(self, position: str, most: int, wait_seconds: float) -> list[Any]:
            return entries.pop(0)

    class Full(Corpus):
        async def follow(self, changes: object, after: str, position: str) -> Any:
            lags.append(each.lag_seconds)
            raise NotStored("planted")

    each = FeedReader(Source(), read, Metrics(), 1.0)
    asyncio.run(each._follow(Full()))
    time.sleep(0.05)
    with pytest.raises(NotStored):
        asyncio.run(each._follow(Full()))
    lags.append(each.lag_seconds)
    assert all(0.05 <= (lag or 0) < 5 for lag in lags)


def test_a_feed_that_fails_or_has_little_is_not_asked_as_fast_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LEAST_PAUSE_SECONDS", 0.05)
    asked, closed = list[float](), list[bool]()

    class Source(Nothing):
        def after(self, position: str, most: int, wait_seconds: float) -> list[Any]:
            asked.append(time.monotonic())
            if len(asked) < 3:
                return [reader.Entry("1-0", b"{}", 0.0)]
            raise OSError("planted")

        def close(self) -> None:
            time.sleep(0.3)  # as Kafka's does while a read waits for its broker
            closed.append(True)

    async def scenario() -> None:
        running = asyncio.ensure_future(FeedReader(Source(), read, Metrics(), 1.0).run(Corpus()))  # type: ignore[arg-type]
        await until(lambda: len(asked) == 6)
        assert not closed
        running.cancel()
        await asyncio.sleep(0.05)
        assert not closed, "requests are answered meanwhile"
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    assert np.all(np.diff(asked)[:5] >= (reader.ROUND_SECONDS, reader.ROUND_SECONDS, 0.05, 0.1, 0.2))
    assert closed, "its connections end with it"
