"""Retrieval behind a link: the same posts and bits as without one, deadlines, cancellation, changes, swaps, what makes no sense."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.engine.loading import RetrievalLoader
from app.errors import CorpusNotLoaded, DeadlineExceeded, Draining, EngineDown
from app.fronts import wire
from app.fronts.remote import RemoteReloads, RemoteService
from app.http.application import create_app
from app.interface import Found, Retrieval
from app.service.retrieval import RetrievalService
from app.settings import Settings
from loadtest.soak.fake_engine import FakeEngine
from model.inputs import Context
from model.retrieval.inputs import Filters, PostChange, PostRows, Query
from tests.support import corpora
from tests.app.fakes import Gate, ended, until
from tests.app.fronts.linked import Linked, linked
from tests.app.serving import ask, chunk

pytestmark = pytest.mark.anyio

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
    return corpora.loader(tmp_path_factory.mktemp("retrieval"))


async def knows(front: RemoteService) -> None:
    """The front has been told what retrieves."""
    await until(lambda: front.state.corpus != 0)


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
    query(1), query(2, k=299), query(3, topics=("sport",)), query(4, topics=()), query(5, created_after=corpora.NOW - 7200),
    query(6, exclude=np.arange(1, 200, dtype=np.uint64)),
]  # fmt: skip


async def test_posts_are_the_same_bits_as_without_a_link(load: RetrievalLoader) -> None:
    async with linked(FakeEngine(), fronts=2, retrieval=load) as here:
        for front in here.fronts:
            await knows(front)
            for asked in ASKED:
                assert told(await found(front, asked)) == told(await found(here.service, asked))
        served, there = here.fronts[0].retrieval.served, here.service.retrieval.served
        assert (served.manifest, served.corpus) == (there.manifest, there.corpus)
        assert (served.hidden, served.duplicates, served.notes) == (there.hidden, there.duplicates, there.notes)


@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
async def test_a_reply_is_the_same_bytes_but_for_times(load: RetrievalLoader, path: str) -> None:
    body = json.dumps({"user_id": 7, "history": [{"post_id": 3, "author_id": 4}], "k": 30, "request_id": "a"}).encode()

    async def reply(settings: Settings, service: Any) -> dict[str, Any]:
        messages = await ask(create_app(settings, service), [chunk(body, False)], path=path)
        assert messages[0]["status"] == 200, messages
        content: dict[str, Any] = json.loads(messages[1]["body"])
        assert set(content.pop("timings_ms")) >= {"parse", "queue", "encode", "search"}
        return content

    async with linked(FakeEngine(), retrieval=load) as here:
        await knows(here.fronts[0])
        assert await reply(here.settings, here.fronts[0]) == await reply(here.settings, here.service)


def gated(here: Linked, gate: Any) -> None:
    """Searches wait for the gate from now on."""
    engine = here.service.retrieval._loaded.engine
    search = engine.retrieve
    vars(engine)["retrieve"] = lambda queries, users: (gate(queries), search(queries, users))[1]


async def test_a_search_that_nobody_waits_for_is_dropped(
    load: RetrievalLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.runners.SHORT_SEARCH_SECONDS", 0.0)
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


async def test_a_change_is_seen_by_the_next_search_of_every_front(load: RetrievalLoader) -> None:
    async with linked(FakeEngine(), fronts=2, retrieval=load) as here:
        one, other = here.fronts
        for front in here.fronts:
            await knows(front)
        best = (await found(other, query(1, k=3))).posts.post_ids
        new = np.array([10**6], np.uint64)
        rows = PostRows(new, new, np.array([corpora.NOW]), ["art"])
        changed = await one.retrieval.change(PostChange(best[:1].copy(), rows))
        assert (changed.posts, changed.changes, changed.deleted, changed.mark.sequence) == (299, 1, 1, 1)
        assert (await one.corpus()).mark == changed.mark
        posts = (await found(other, query(1, k=299))).posts
        assert best[0] not in posts.post_ids
        assert 10**6 in posts.post_ids
        compacted = await other.retrieval.compact()
        assert (compacted.posts, compacted.changes) == (299, 0)
        assert compacted.corpus == here.service.retrieval.served.corpus == other.retrieval.served.corpus
        assert told(await found(one, query(1, k=299)))[:4] == told(await found(here.service, query(1, k=299)))[:4]


async def test_a_change_whose_answer_is_lost_is_not_sent_again(load: RetrievalLoader) -> None:
    """It may have been made: only the caller knows whether making it twice is right."""
    async with linked(FakeEngine(), retrieval=load) as here:
        front, came = here.fronts[0], []
        await knows(front)
        change = wire.METHODS["change"].question
        here.host._take[change] = lambda front, asked: (came.append(asked.id), here.cut())
        nothing = PostRows(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64), [])
        asking = asyncio.create_task(front.retrieval.change(PostChange(np.array([3], np.uint64), nothing)))
        await until(lambda: bool(came))
        here.host._take[change] = lambda front, asked: came.append(asked.id)
        await until(lambda: not front.health().ready)
        await here.mend()
        await until(lambda: front.health().ready)
        await knows(front)
        await front.exposition()  # the engine process has read all that was sent before
        assert len(came) == 1
        with pytest.raises(EngineDown):
            await asyncio.wait_for(asking, 5)


async def test_a_search_that_was_sent_before_a_swap_ends_on_what_it_began_with(
    load: RetrievalLoader, tmp_path: Path
) -> None:
    async with linked(FakeEngine(), retrieval=load) as here:
        front, retrieval = here.fronts[0], here.service.retrieval
        await knows(front)
        old, expected = front.retrieval.served, told(await found(front, query(1)))
        await retrieval.swap(corpora.loader(tmp_path, seed=5, version="v2"))
        assert front.retrieval.served is old, "the front has not heard of it"
        assert told(await found(front, query(1))) == expected
        await until(lambda: front.retrieval.served.corpus.version == "v2")
        assert told(await found(front, query(1))) == told(await found(here.service, query(1))) != expected
        assert len(retrieval.versions.held) == 2
        del old
        await until(lambda: retrieval.versions.held == [retrieval.versions.current])
        lost = front.retrieval.served
        here.cut()
        await until(lambda: not front.health().ready)
        with pytest.raises(CorpusNotLoaded, match="was replaced") as refused:
            front.retrieval.retrieve(lost, query(1), front.clock() + SOON, None, lambda result: None)
        assert refused.value.retry_after_seconds == 0


async def test_the_old_corpus_is_freed_when_a_front_that_knew_it_is_gone(load: RetrievalLoader, tmp_path: Path) -> None:
    async with linked(FakeEngine(), retrieval=load) as here:
        service: RetrievalService = here.service.retrieval
        await knows(here.fronts[0])
        version = service.versions.current
        assert version.unfinished == 1, "kept for the front"
        front = next(iter(here.host._fronts.values()))
        front.link._transport.pause_reading()  # type: ignore[union-attr]  # it never says that it has left
        await service.swap(corpora.loader(tmp_path, seed=6, version="v3"))
        here.host._look()
        assert version in service.versions.held
        here.cut()
        await until(lambda: version not in service.versions.held)


async def test_what_retrieves_is_replaced_by_way_of_a_front(load: RetrievalLoader, tmp_path: Path) -> None:
    async with linked(FakeEngine(), retrieval=load) as here:
        front, asked = here.fronts[0], list[tuple[Path | None, Path | None]]()
        await knows(front)

        async def swapped(checkpoint: Path | None, corpus: Path | None) -> Any:
            asked.append((checkpoint, corpus))
            return await here.service.retrieval.swap(corpora.loader(tmp_path, seed=5, version="v2"))

        here.host.reloads.resolve = Path  # type: ignore[method-assign, assignment]
        here.host.reloads.reload_retrieval = swapped  # type: ignore[method-assign, assignment]
        served = await RemoteReloads(front).reload_retrieval(Path("towers"), Path("posts"))
        assert asked == [(Path("towers"), Path("posts"))]
        assert served is front.retrieval.served
        assert served.corpus.version == "v2"


async def test_a_search_is_refused_where_the_engine_process_takes_no_work(
    load: RetrievalLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front still takes work: it learns a moment later that the engine process does not."""

    def closed(key: str | None) -> None:
        raise Draining

    async with linked(FakeEngine(), retrieval=load) as here:
        await knows(here.fronts[0])
        monkeypatch.setattr(here.service, "check_open", closed)
        with pytest.raises(Draining):
            await found(here.fronts[0], query(1))
