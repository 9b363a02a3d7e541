"""Retrieval behind a link: the same posts and bits as without one, deadlines, cancellation, changes, swaps, what makes no sense."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from app.engine.loading import RetrievalLoader
from app.errors import CorpusNotLoaded, DeadlineExceeded, EngineDown
from app.fronts import frames
from app.fronts.remote import RemoteService
from app.fronts.retrieval import change_of, found_of, posts_frame, query_of, search_frame
from app.http.application import create_app
from app.interface import Found, Retrieval
from app.service.retrieval import RetrievalService
from app.settings import Settings
from loadtest.soak.fake_engine import CONFIG, FakeEngine
from model.inputs import Context
from model.retrieval.inputs import Filters, PostChange, PostRows, Query, Retrieved
from tests.app import retrieving
from tests.app.fakes import Gate, ended, run, until
from tests.app.fronts.linked import Linked, linked
from tests.app.serving import ask, chunk

ACTIONS = 3
SOON = 30.0


def query(user: int, k: int = 20, **filters: Any) -> Query:
    draw = np.random.default_rng(user)
    history = user % 7
    ids = draw.integers(1, 300, (2, history)).astype(np.uint64)
    context = Context(
        user, ids[0], ids[1], draw.random((history, ACTIONS), np.float32), np.zeros(history, np.int64),
        draw.random(history, np.float32),
    )  # fmt: skip
    return Query(context, k, Filters(filters.pop("exclude", np.empty(0, np.uint64)), **filters), -0.5)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> RetrievalLoader:
    return retrieving.loader(tmp_path_factory.mktemp("retrieval"))


async def knows(front: RemoteService) -> None:
    """The front has been told what retrieves."""
    await until(lambda: front.retrieval._served is not None)


async def found(service: Any, asked: Query, seconds: float = SOON) -> Found:
    retrieval: Retrieval = service.retrieval
    return await ended(retrieval.retrieve, retrieval.served, asked, service.clock() + seconds, None)  # type: ignore[no-any-return]


def told(answer: Found) -> list[Any]:
    """All that a reply says of the posts, but for whether the vector was cached."""
    posts = answer.posts
    columns = posts.post_ids, posts.author_ids, posts.scores, posts.created_at
    return [
        *((str(one.dtype), one.tobytes()) for one in columns),
        posts.topics,
        posts.visible,
        posts.posts,
        posts.changes,
    ]


ASKED = [
    query(1), query(2, k=299), query(3, topics=("sport",)), query(4, topics=()), query(5, created_after=retrieving.NOW - 7200),
    query(6, exclude=np.arange(1, 200, dtype=np.uint64)),
]  # fmt: skip


def test_posts_are_the_same_bits_as_without_a_link(load: RetrievalLoader) -> None:
    async def main() -> None:
        async with linked(FakeEngine(), fronts=2, retrieval=load) as here:
            for front in here.fronts:
                await knows(front)
                for asked in ASKED:
                    assert told(await found(front, asked)) == told(await found(here.service, asked))
            served, there = here.fronts[0].retrieval.served, here.service.retrieval.served
            assert (served.manifest, served.corpus) == (there.manifest, there.corpus)
            assert (served.hidden, served.duplicates, served.notes) == (there.hidden, there.duplicates, there.notes)

    run(main())


@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
def test_a_reply_is_the_same_bytes_but_for_times(load: RetrievalLoader, path: str) -> None:
    body = json.dumps({"user_id": 7, "history": [{"post_id": 3, "author_id": 4}], "k": 30, "request_id": "a"}).encode()

    async def reply(settings: Settings, service: Any) -> dict[str, Any]:
        messages = await ask(create_app(settings, service), [chunk(body, False)], path=path)
        assert messages[0]["status"] == 200, messages
        content: dict[str, Any] = json.loads(messages[1]["body"])
        assert set(content.pop("timings_ms")) >= {"parse", "queue", "encode", "search"}
        return content

    async def main() -> None:
        async with linked(FakeEngine(), retrieval=load) as here:
            await knows(here.fronts[0])
            assert await reply(here.settings, here.fronts[0]) == await reply(here.settings, here.service)

    run(main())


def gated(here: Linked, gate: Any) -> None:
    """Searches wait for the gate from now on."""
    engine = here.service.retrieval._loaded.engine
    search = engine.retrieve
    vars(engine)["retrieve"] = lambda queries, users: (gate(queries), search(queries, users))[1]


def test_a_search_that_nobody_waits_for_is_dropped(load: RetrievalLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.engine.runners.SHORT_SEARCH_SECONDS", 0.0)

    async def main() -> None:
        async with linked(FakeEngine(), retrieval=load) as here:
            front, searches, gate = here.fronts[0], here.service.retrieval.versions, Gate()
            await knows(front)
            gated(here, gate)
            first = asyncio.create_task(found(front, query(1)))
            await gate.reached()
            gone, late = asyncio.create_task(found(front, query(2))), asyncio.create_task(found(front, query(3), 0.1))
            await until(lambda: searches.waiting == 2)
            gone.cancel()
            with pytest.raises(DeadlineExceeded):
                await late
            await until(lambda: searches.waiting == 0)
            gate.opened.set()
            await first
            assert here.service.metrics.cancelled.labels("queue")._value.get() == 1
            assert not front.uplink.asked

    run(main())


def test_a_change_is_seen_by_the_next_search_of_every_front(load: RetrievalLoader) -> None:
    async def main() -> None:
        async with linked(FakeEngine(), fronts=2, retrieval=load) as here:
            one, other = here.fronts
            for front in here.fronts:
                await knows(front)
            best = (await found(other, query(1, k=3))).posts.post_ids
            new = np.array([10**6], np.uint64)
            rows = PostRows(new, new, np.array([retrieving.NOW]), ["art"])
            changed = await one.retrieval.change(PostChange(best[:1].copy(), rows))
            assert (changed.posts, changed.changes, changed.deleted) == (299, 1, 1)
            posts = (await found(other, query(1, k=299))).posts
            assert best[0] not in posts.post_ids
            assert 10**6 in posts.post_ids
            compacted = await other.retrieval.compact()
            assert (compacted.posts, compacted.changes) == (299, 0)
            assert compacted.corpus == here.service.retrieval.served.corpus == other.retrieval.served.corpus
            assert told(await found(one, query(1, k=299)))[:4] == told(await found(here.service, query(1, k=299)))[:4]

    run(main())


def test_a_change_whose_answer_is_lost_is_not_sent_again(load: RetrievalLoader) -> None:
    """It may have been made: only the caller knows whether making it twice is right."""

    async def main() -> None:
        async with linked(FakeEngine(), retrieval=load) as here:
            front, came = here.fronts[0], []
            await knows(front)
            here.host._take[frames.Change] = lambda front, frame: (came.append(frame.id), here.cut())
            nothing = PostRows(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64), [])
            asking = asyncio.create_task(front.retrieval.change(PostChange(np.array([3], np.uint64), nothing)))
            await until(lambda: bool(came))
            here.host._take[frames.Change] = lambda front, frame: came.append(frame.id)
            await until(lambda: not front.health().ready)
            await here.mend()
            await until(lambda: front.health().ready)
            await knows(front)
            await front.exposition()  # the engine process has read all that was sent before
            assert len(came) == 1
            with pytest.raises(EngineDown):
                await asyncio.wait_for(asking, 5)

    run(main())


def test_a_search_that_was_sent_before_a_swap_ends_on_what_it_began_with(load: RetrievalLoader, tmp_path: Path) -> None:
    async def main() -> None:
        async with linked(FakeEngine(), retrieval=load) as here:
            front, retrieval = here.fronts[0], here.service.retrieval
            await knows(front)
            old, expected = front.retrieval.served, told(await found(front, query(1)))
            await retrieval.swap(retrieving.loader(tmp_path, seed=5, version="v2"))
            assert front.retrieval.served is old, "the front has not heard of it"
            assert told(await found(front, query(1))) == expected
            await until(lambda: front.retrieval.served is not old)
            assert front.retrieval.served.corpus.version == "v2"
            assert told(await found(front, query(1))) == told(await found(here.service, query(1))) != expected
            await until(lambda: retrieval.versions.held == [retrieval.versions.current])
            with pytest.raises(CorpusNotLoaded, match="was replaced"):
                front.retrieval.retrieve(old, query(1), front.clock() + SOON, None, lambda result: None)

    run(main())


def test_the_old_corpus_is_freed_when_a_front_that_knew_it_is_gone(load: RetrievalLoader, tmp_path: Path) -> None:
    async def main() -> None:
        async with linked(FakeEngine(), retrieval=load) as here:
            service: RetrievalService = here.service.retrieval
            await knows(here.fronts[0])
            version = service.versions.current
            assert version is not None
            assert version.unfinished == 1, "kept for the front"
            front = next(iter(here.host._fronts.values()))
            front.link._transport.pause_reading()  # type: ignore[union-attr]  # it never says that it has left
            await service.swap(retrieving.loader(tmp_path, seed=6, version="v3"))
            here.host._look()
            assert version in service.versions.held
            here.cut()
            await until(lambda: version not in service.versions.held)

    run(main())


# frames


def test_a_search_and_its_answer_arrive_as_they_were_sent() -> None:
    for asked in ASKED:
        frame = frames.from_front.decode(frames.encode(search_frame(7, 2, asked, 12.5, "feed"))[4:])
        assert isinstance(frame, frames.Search)
        assert (frame.id, frame.corpus, frame.deadline, frame.key) == (7, 2, 12.5, "feed")
        came = query_of(frame, CONFIG)
        assert (came.k, came.least, came.filters.topics) == (asked.k, asked.least, asked.filters.topics)
        assert came.filters.created_after == asked.filters.created_after
        assert came.filters.exclude.tobytes() == asked.filters.exclude.tobytes()
        for name in ("post_ids", "author_ids", "actions", "surfaces", "dwell_seconds"):
            sent, read = getattr(asked.context, name), getattr(came.context, name)
            assert (read.dtype, read.shape, read.tobytes()) == (sent.dtype, sent.shape, sent.tobytes()), name
    for count in (0, 1, 9):
        ids = np.arange(2**63, 2**63 + count, dtype=np.uint64)
        scores, topics = np.random.default_rng(1).random(count, np.float32), [None, "art"] * 5
        posts = Retrieved(ids, ids + np.uint64(1), scores, ids.view(np.int64), topics[:count], 8, 7, True, 6, 5)
        answer = frames.from_engine.decode(frames.encode(posts_frame(3, Found(posts, 0.1, 0.2, 0.3)))[4:])
        assert isinstance(answer, frames.Posts)
        assert told(found_of(answer)) == told(Found(posts, 0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    "change", [{"words": b"1234567"}, {"history": 3}, {"floats": b""}, {"exclude": b"12"}, {"least": float("nan")}]
)
def test_a_search_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # numpy has many words for it
        query_of(msgspec.structs.replace(search_frame(7, 2, query(2), 12.5, None), **change), CONFIG)


def test_columns_of_different_lengths_are_refused() -> None:
    posts = frames.Posts(1, 0.0, 0.0, 0.0, b"\0" * 24, b"\0" * 8, [None], 1, 1, False, 1, 0)
    for wrong in (posts, msgspec.structs.replace(posts, scores=b"\0" * 4, topics=[])):
        with pytest.raises(ValueError, match="length"):
            found_of(wrong)
    with pytest.raises(ValueError, match="length"):
        change_of(frames.Change(1, b"", b"\0" * 24, []))


@pytest.mark.parametrize(
    "change", [{"created_after": 2**70}, {"k": 0}, {"k": 2**40}, {"history": -1}, {"user_id": -1}], ids=str
)
def test_a_number_that_no_front_sends_is_no_search(change: dict[str, Any]) -> None:
    sent = msgspec.structs.replace(search_frame(7, 2, query(2), 12.5, None), **change)
    with pytest.raises((msgspec.MsgspecError, OverflowError)):  # the second: no such number can be written at all
        frames.from_front.decode(frames.encode(sent)[4:])


@pytest.mark.parametrize(
    ("posts", "gone", "time"), [((1, 1), (), 0), ((1,), (1,), 0), ((0,), (), 0), ((), (), 0), ((1,), (), -1)]
)
def test_a_change_that_no_body_could_ask_for_is_refused(
    posts: tuple[int, ...], gone: tuple[int, ...], time: int
) -> None:
    ids = np.array(posts, np.uint64)
    words = frames.joined((ids, ids, np.full(len(ids), time, np.int64)))
    with pytest.raises(ValueError, match="no change"):
        change_of(frames.Change(1, np.array(gone, np.uint64).tobytes(), words, [None] * len(ids)))
    some = np.array([5, 6], np.uint64)  # the negative control
    assert (
        len(
            change_of(frames.Change(1, b"", frames.joined((some, some, some.view(np.int64))), [None] * 2)).upsert.topics
        )
        == 2
    )
