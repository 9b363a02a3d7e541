"""Searches over real small towers: shared scans, failures, deadlines, overload, swaps, the end."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from app.engine.loading import LoadedRetrieval, RetrievalLoader, retrieval_loader
from app.errors import CorpusNotLoaded, DeadlineExceeded, EngineDown, Overloaded
from app.interface import Found, ReloadInProgress, ServedRetrieval
from app.request.posts import read_change
from app.service.feed import FeedReader
from app.service.retrieval import RetrievalService
from app.settings import Queue, Settings
from app.telemetry.metrics import Metrics
from model.engine import CacheStats
from model.inputs import Context
from model.retrieval.engine import RetrievalEngine, Users
from model.retrieval.inputs import Answers, Filters, PostChange, PostRows, Query
from tests.app import retrieving
from tests.app.bounds import fix
from tests.app.fakes import FakeClock, Gate, ended, until
from tests.app.serving import value_of
from weights.corpus import compaction
from weights.corpus.changes import ChangeLog
from weights.corpus.compaction import Compaction
from weights.corpus.store import load_corpus_manifest
from weights.errors import CheckpointError, NotStored
from weights.text_ids import IdKind

pytestmark = pytest.mark.anyio

NO_IDS = np.empty(0, np.uint64)
DEADLINE = 1000.0


def query(user: int, k: int = 5) -> Query:
    history = np.empty(0, np.int64)
    context = Context(user, NO_IDS, NO_IDS, np.zeros((0, 3), np.float32), history, np.zeros(0, np.float32))
    return Query(context, k, Filters(NO_IDS))


@pytest.fixture(autouse=True)
def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate would stop the event loop: no search is computed in it."""
    monkeypatch.setattr("app.engine.runners.SHORT_SEARCH_SECONDS", 0.0)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> RetrievalLoader:
    return retrieving.loader(tmp_path_factory.mktemp("retrieval"))


class Watched:
    """An engine that says which users shared a scan; `before` runs first and may wait or raise."""

    def __init__(self, loaded: LoadedRetrieval, before: Callable[[Any], None]) -> None:
        self._engine, self._before = loaded.engine, before
        self.scans: list[list[int]] = []
        self.closed = threading.Event()

    def look_up(self, queries: Sequence[Query]) -> Users:
        return self._engine.look_up(queries)

    def retrieve(self, queries: Sequence[Query], users: Users) -> Answers:
        self.scans.append([query.context.user_id for query in queries])
        self._before(queries)
        return self._engine.retrieve(queries, users)

    def cache_stats(self) -> CacheStats:
        return self._engine.cache_stats()

    def close(self) -> None:
        self._engine.close()
        self.closed.set()


def watched(load: RetrievalLoader, before: Callable[[Any], None] = lambda queries: None) -> tuple[RetrievalLoader, Any]:
    """A loader of a watched engine, and a list that it is put into."""
    engines: list[Watched] = []

    def wrapped() -> LoadedRetrieval:
        loaded = load()
        engines.append(Watched(loaded, before))
        return replace(loaded, engine=engines[-1])  # type: ignore[arg-type]

    return wrapped, engines


@asynccontextmanager
async def running(load: RetrievalLoader, clock: FakeClock, **groups: Any) -> AsyncIterator[RetrievalService]:
    service = RetrievalService(load, Settings(**groups), Metrics(), clock)
    await service.load()
    try:
        yield service
    finally:
        await service.stop(5.0)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[RetrievalService]:
    """Of a corpus of its own, `corpus-v1` in the test's directory."""
    async with running(retrieving.loader(tmp_path), FakeClock()) as service:
        yield service


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[list[RetrievalService]]:
    """Two processes' services on one corpus, not loaded yet."""
    load = retrieving.loader(tmp_path)
    services = [RetrievalService(load, Settings(), Metrics(), FakeClock()) for _ in range(2)]
    yield services
    for each in services:
        await each.stop(5.0)


async def found(
    service: RetrievalService, asked: Query, deadline: float, served: ServedRetrieval | None = None
) -> Found:
    return await ended(service.retrieve, served or service.served, asked, deadline, None)


def search(service: RetrievalService, user: int, deadline: float = DEADLINE) -> asyncio.Task[Found]:
    return asyncio.get_running_loop().create_task(found(service, query(user), deadline))


async def test_those_who_wait_share_the_next_scan(load: RetrievalLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    fix(monkeypatch, SCAN_REQUESTS=3)
    gate = Gate()
    wrapped, engines = watched(load, gate)
    async with running(wrapped, FakeClock()) as service:
        first = search(service, 1)
        await gate.reached()
        others = [search(service, user) for user in range(2, 7)]
        await asyncio.sleep(0)
        gate.opened.set()
        found = await asyncio.gather(first, *others)
        assert engines[0].scans == [[1], [2, 3, 4], [5, 6]]
        alone = [await search(service, user) for user in range(1, 7)]
        for shared, by_itself in zip(found, alone, strict=True):
            assert shared.posts.scores.tobytes() == by_itself.posts.scores.tobytes()
            assert shared.posts.post_ids.tobytes() == by_itself.posts.post_ids.tobytes()


@pytest.mark.usefixtures("no_collector")
async def test_what_is_replaced_goes_at_once(load: RetrievalLoader) -> None:
    wrapped, engines = watched(load)
    async with running(wrapped, FakeClock()) as service:
        await search(service, 1)
        old = weakref.ref(engines.pop())
        await service.swap(wrapped)
        await search(service, 2)
        await until(lambda: old() is None)


async def test_what_nobody_waits_for_is_not_searched(load: RetrievalLoader) -> None:
    gate, clock = Gate(), FakeClock()
    wrapped, engines = watched(load, gate)
    async with running(wrapped, clock) as service:
        first = search(service, 1)
        await gate.reached()
        gone, late, patient = search(service, 2), search(service, 3, clock.now + 0.01), search(service, 4)
        await asyncio.sleep(0)
        gone.cancel()
        clock.advance(1.0)
        with pytest.raises(DeadlineExceeded):
            await late
        gate.opened.set()
        await asyncio.gather(first, patient)
        assert engines[0].scans == [[1], [4]]
        assert service.metrics.cancelled.labels("queue")._value.get() == 1


async def test_a_full_queue_and_a_long_wait_are_refused(load: RetrievalLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    fix(monkeypatch, SCAN_REQUESTS=1)
    gate, clock = Gate(), FakeClock()
    wrapped, _ = watched(load, gate)
    limits = {"queue": Queue(max_requests=12, max_wait_seconds=3.0)}
    async with running(wrapped, clock, **limits) as service:
        first = search(service, 1)
        await gate.reached()
        with pytest.raises(DeadlineExceeded, match="the deadline had passed on arrival"):
            await found(service, query(9), clock.now)
        clock.advance(2.0)  # so long takes one scan
        gate.opened.set()
        await first
        gate.opened.clear()
        gate.entered.clear()
        tasks = [search(service, 2)]
        await gate.reached()
        with pytest.raises(DeadlineExceeded, match="the predicted wait is longer than the deadline"):
            await found(service, query(9), clock.now + 3.9)
        tasks.append(search(service, 3))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="the predicted wait is over the limit"):
            await found(service, query(9), DEADLINE)
        service.queue.admission.queue = service.queue.admission.queue.model_copy(update={"max_wait_seconds": 0.0})
        tasks += [search(service, user) for user in (4, 5)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="the queue is full"):
            await found(service, query(9), DEADLINE)
        gate.opened.set()
        await asyncio.gather(*tasks)


async def test_a_swap_changes_towers_and_corpus_between_two_searches(load: RetrievalLoader, tmp_path: Path) -> None:
    gate = Gate()
    wrapped, engines = watched(load, gate)
    async with running(wrapped, FakeClock()) as service:
        old = service.served
        begun, waits = search(service, 1), search(service, 1)
        await gate.reached()
        another, others = watched(retrieving.loader(tmp_path, seed=5, version="v2"))
        new = await service.swap(another)
        assert (service.served, new.manifest.version, new.corpus.version) == (new, "v2", "v2")
        after = search(service, 1)
        late = asyncio.ensure_future(found(service, query(1), DEADLINE, old))
        await asyncio.sleep(0)
        assert [worker.model.served for worker in service.versions.held] == [old, new]
        assert not engines[0].closed.is_set()
        gate.opened.set()
        first, second, third = await asyncio.gather(begun, waits, after)
        assert first.posts.scores.tobytes() == second.posts.scores.tobytes() != third.posts.scores.tobytes()
        assert (await late).posts.scores.tobytes() == first.posts.scores.tobytes(), "for it was still held"
        assert (engines[0].scans, others[0].scans) == ([[1, 1], [1]], [[1]])
        await asyncio.to_thread(engines[0].closed.wait, 5)
        assert engines[0].closed.is_set()
        assert [worker.model.served for worker in service.versions.held] == [new]
        with pytest.raises(CorpusNotLoaded, match="was replaced") as refused:
            await found(service, query(1), DEADLINE, old)
        assert refused.value.retry_after_seconds == 0, "another corpus serves"


def change(delete: list[int], new: list[int]) -> PostChange:
    ids = np.array(new, np.uint64)
    rows = PostRows(ids, ids % np.uint64(40) + np.uint64(1), np.zeros(len(new), np.int64), ["news"] * len(new))
    return PostChange(np.array(delete, np.uint64), rows)


@pytest.fixture
def held_writing(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A compaction waits where it writes."""
    gate, real = Gate(), Compaction.write

    def write(self: Compaction, *arguments: Any) -> Any:
        gate(None)
        return real(self, *arguments)

    monkeypatch.setattr(Compaction, "write", write)
    return gate


def everything(found: Found) -> list[tuple[int, float]]:
    return list(zip(found.posts.post_ids.tolist(), found.posts.scores.tolist(), strict=True))


async def test_a_compaction_beside_searches_and_changes(tmp_path: Path, held_writing: Gate) -> None:
    async with running(retrieving.loader(tmp_path), FakeClock()) as service:
        old, all_posts = service.served, query(1, 500)
        await service.change(change([1], [900, 901]))
        compaction = asyncio.get_running_loop().create_task(service.compact())
        await held_writing.reached()
        changed = await service.change(change([900, 2], [902]))
        assert (changed.corpus.version, changed.posts, changed.changes) == ("v1", 299, 2)
        before = await found(service, all_posts, DEADLINE, old)
        with pytest.raises(ReloadInProgress):
            await service.compact()
        held_writing.opened.set()
        state = await compaction
        assert (state.corpus.version, state.posts, state.changes) == ("v1+1", 299, 1)
        assert service.served.corpus.version == "v1+1"
        after = await found(service, all_posts, DEADLINE)
        assert everything(after) == everything(before)
        assert {1, 2, 900}.isdisjoint(after.posts.post_ids.tolist())
        assert (await service.change(change([901], []))).changes == 2
        assert service.metrics.compactions.labels("success")._value.get() == 1
        last = await found(service, all_posts, DEADLINE)
    paths = tmp_path / "towers-v1", tmp_path / "corpus-v1"
    async with running(retrieval_loader(*paths, Settings(threads=1)), FakeClock()) as again:
        assert everything(await found(again, all_posts, DEADLINE)) == everything(last)


async def test_a_swap_waits_for_a_compaction(service: RetrievalService, tmp_path: Path, held_writing: Gate) -> None:
    loop = asyncio.get_running_loop()
    await service.change(change([1], []))
    compaction = loop.create_task(service.compact())
    await held_writing.reached()
    swap = loop.create_task(service.swap(retrieving.loader(tmp_path, seed=5, version="v2")))
    await asyncio.sleep(0.05)
    assert not swap.done()
    held_writing.opened.set()
    assert (await compaction).corpus.version == "v1+1"
    assert (await swap).corpus.version == "v2" == service.served.corpus.version


async def test_many_changes_begin_a_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fix(monkeypatch, COMPACT_ROWS=10)
    async with running(retrieving.loader(tmp_path), FakeClock()) as service:
        for post in range(1, 10):
            await service.change(change([post], []))
        assert service.served.corpus.version == "v1"
        await service.change(change([20], []))
        async with asyncio.timeout(20):
            while service.served.corpus.version == "v1":  # noqa: ASYNC110  # nobody is told
                await asyncio.sleep(0.01)
        assert service.served.corpus.version == "v1+10"


async def test_each_search_has_waited_once(service: RetrievalService) -> None:
    for user in range(1, 5):
        await search(service, user)
        assert value_of(service.metrics.render().decode(), 'ranker_stage_duration_seconds_count{stage="queue"}') == user


async def test_changes_that_come_together_are_all_made(service: RetrievalService) -> None:
    posts, sequence = service.state().posts, 0  # type: ignore[union-attr]
    for count in (1, 2, 3):
        state = await service.follow([change([post], []) for post in range(10 * count, 11 * count)], "", "")
        posts, sequence = posts - count, sequence + count
        assert (state.posts, state.mark.sequence) == (posts, sequence)


async def test_a_compaction_that_nobody_waits_for_and_that_fails_is_logged_once(
    service: RetrievalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weights.corpus.compaction.write_files", full)
    monkeypatch.setattr("app.service.retrieval.COMPACT_ROWS", 1)
    told = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    service._compact_at = 1
    with structlog.testing.capture_logs() as said:
        await service.change(change([1], [900]))
        await until(lambda: service._compaction is not None and service._compaction.done())
        service._compaction = None
        gc.collect()
        await asyncio.sleep(0)
    assert [line["event"] for line in said if line["log_level"] == "error"] == ["compaction_failed"]
    assert told == [], "asyncio tells of exceptions that nobody has asked for"


async def test_a_compaction_that_fails_changes_nothing(
    service: RetrievalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    served, lines, usual = service.served, list[Any](), service._compact_at
    await service.change(change([1], [900]))
    for name in ("write_files", "write_file"):
        with monkeypatch.context() as patch, structlog.testing.capture_logs() as said:
            patch.setattr(f"weights.corpus.compaction.{name}", full)
            with pytest.raises(CheckpointError, match="No space left on device"):
                await service.compact()
            lines += said
    assert service.served is served
    assert service.metrics.compactions.labels("failure")._value.get() == 2
    told = [line for line in lines if line["event"] == "compaction_failed" and line["log_level"] == "error"]
    assert ["No space left on device" in line["reason"] for line in told] == [True, True]
    assert service._compact_at == usual + 2, "the next begins later"
    assert (service._since, service._changes) == (None, set())
    assert (await service.change(change([2], []))).changes == 2
    assert (await service.compact()).corpus.version == "v1+2"
    assert service._compact_at == usual
    assert (service._since, service._changes) == (None, set())


async def test_a_log_that_a_failing_disk_has_ended_is_read_again_by_itself(
    service: RetrievalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written and could be neither kept nor cut off is there then, as its refusal has said."""
    sync, failures = os.fsync, iter([True, True])

    def failing(descriptor: int) -> None:
        if next(failures, False):
            raise OSError(5, "Input/output error")
        sync(descriptor)

    await service.change(change([1], []))
    monkeypatch.setattr("weights.corpus.changes.AGAIN_SECONDS", 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        patch.setattr(os, "ftruncate", lambda *_: failing(-1))
        with pytest.raises(NotStored, match=r"Input/output error\. It could not be cut off again"):
            await service.change(change([2], []))
    with pytest.raises(NotStored, match="could not be written before; read the corpus again"):
        await service.change(change([3], []))
    served = service.served
    await until(lambda: service.served is not served)
    assert (await service.change(change([3], []))).changes == 3


async def test_more_changes_at_once_than_the_budget_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, record = Gate(), LoadedRetrieval.record

    def held(loaded: LoadedRetrieval, *asked: Any) -> Any:
        gate(asked)
        return record(loaded, *asked)

    monkeypatch.setattr(LoadedRetrieval, "record", held)
    fix(monkeypatch, CHANGES=2)
    async with running(retrieving.loader(tmp_path), FakeClock()) as service:
        begun = [asyncio.ensure_future(service.change(change([post], []))) for post in (1, 2)]
        await gate.reached()
        with pytest.raises(Overloaded, match="Too many changes") as refused:
            await service.change(change([3], []))
        assert refused.value.retry_after_seconds
        gate.opened.set()
        assert [changed.changes for changed in await asyncio.gather(*begun)] == [1, 2]
        assert (await service.change(change([3], []))).changes == 3, "the room of what has ended is free"


async def posts_of(service: RetrievalService) -> set[int]:
    return set((await found(service, query(1, 500), DEADLINE)).posts.post_ids.tolist())


async def test_searches_go_on_while_new_posts_are_indexed(
    service: RetrievalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = Gate(), RetrievalEngine.prepare
    monkeypatch.setattr(RetrievalEngine, "prepare", lambda *arguments: (gate(None), real(*arguments))[1])
    changing = asyncio.ensure_future(service.change(change([1], [900])))
    await gate.reached()
    assert {1, 900} & await posts_of(service) == {1}
    gate.opened.set()
    await changing
    assert {1, 900} & await posts_of(service) == {900}


async def test_what_another_process_changes_is_followed(two: list[RetrievalService]) -> None:
    """Changes, a compaction, changes after it; and when that process is gone this one goes on."""
    first, second = two
    await first.load(), await second.load()
    await first.change(change([1], [900]))
    while {1} & (there := await posts_of(second)) or 900 not in there:  # noqa: ASYNC110  # nobody is told
        await asyncio.sleep(0.02)
    with pytest.raises(NotStored, match="is being written by another process"):
        await second.change(change([2], []))
    with pytest.raises(NotStored):
        await second.compact()
    assert (await first.compact()).corpus.version == "v1+1"
    await first.change(change([3], []))
    while second.served.corpus.version == "v1" or 3 in await posts_of(second):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await first.change(change([4], []))
    assert await first.stop(5.0)
    assert (await second.change(change([5], []))).changes == 3, "with those that it had not followed yet"
    assert not {1, 3, 4, 5} & await posts_of(second)
    assert second.problem == ""


async def test_two_services_on_one_directory_lose_and_undo_nothing(two: list[RetrievalService], tmp_path: Path) -> None:
    """One holds the log; what is refused to the other deletes no file, and at last both serve the same posts."""
    corpus = tmp_path / "corpus-v1"
    one, other = two
    await one.load(), await other.load()
    for post in range(1, 41):
        before = sorted(corpus.glob("*.safetensors"))
        await one.change(change([post], []))
        for refused in (other.change(change([200 + post], [])), other.compact()):
            with suppress(NotStored):
                await refused
        assert sorted(corpus.glob("*.safetensors")) == before
    await one.compact()
    await until(lambda: other.served.corpus.version == "v1+40", 20)
    assert await posts_of(one) == await posts_of(other)


async def test_a_compaction_has_the_changes_that_were_not_followed_yet(
    two: list[RetrievalService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.service.retrieval.FOLLOW_SECONDS", 1000.0)
    first, second = two
    await first.load()
    await first.change(change([1], []))
    await second.load()
    await first.change(change([2], []))
    assert await first.stop(5.0)
    assert (await second.compact()).corpus.version == "v1+2"
    assert not {1, 2} & await posts_of(second)


@pytest.mark.parametrize(("of", "step"), [(ChangeLog, "follow"), (RetrievalEngine, "parts")])
async def test_a_change_waits_for_what_is_being_read(
    two: list[RetrievalService], monkeypatch: pytest.MonkeyPatch, of: Any, step: str
) -> None:
    """It is made after what another process has changed, and a compaction that begins does not miss it."""
    gate, real = Gate(), getattr(of, step)

    def held(asked: Any) -> Any:
        if found := real(asked):
            gate(None)
        return found

    monkeypatch.setattr(of, step, held)
    first, second = two
    await first.load()
    if of is ChangeLog:
        await second.load()
    await first.change(change([], [900]))
    await first.stop(5.0)
    begun = []
    if of is RetrievalEngine:
        await second.load()
        begun = [asyncio.ensure_future(second.compact())]
    await gate.reached()
    changing = asyncio.ensure_future(second.change(change([900], [])))
    await asyncio.wait([changing], timeout=0.1)
    assert not changing.done()
    gate.opened.set()
    assert (await changing).mark.sequence == 2
    await asyncio.gather(*begun)
    assert 900 not in await posts_of(second)


async def test_a_change_of_the_feed_that_another_process_has_made_is_not_made_again(
    two: list[RetrievalService],
) -> None:
    first, second = two
    await first.load(), await second.load()
    first.feed = second.feed = FeedReader(None, None, Metrics(), 1.0)  # type: ignore[arg-type]  # which nobody asks
    await first.follow([change([1], [])], "", "1-0")
    await first.stop(5.0)
    marks = [(await second.follow([change([1], [])], "", "1-0")).mark for _ in range(2)]
    assert [(mark.sequence, mark.position) for mark in marks] == [(1, "1-0")] * 2
    assert (await second.follow([change([2], [])], "1-0", "2-0")).mark.sequence == 2, "what comes behind it is made"


async def test_a_journal_that_is_removed_costs_readiness_until_the_corpus_is_read_again(
    service: RetrievalService, tmp_path: Path
) -> None:
    await service.change(change([1], []))
    (log,) = (tmp_path / "corpus-v1").glob("changes-*.log")
    log.unlink()
    for _ in range(2):
        with pytest.raises(NotStored, match="was deleted, cut or replaced"):
            await service.change(change([2], []))
    await until(lambda: "was deleted, cut or replaced" in service.problem)
    assert service._load is not None
    await service.swap(service._load)
    await until(lambda: service.problem == "")
    assert (await service.change(change([2], []))).changes == 1


async def test_a_change_on_the_disk_that_fails_here_is_read_again(
    service: RetrievalService, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fails(*_: Any) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RetrievalEngine, "change", fails)
        with pytest.raises(EngineDown, match="is on the disk and not served yet") as late:
            await service.change(change([1], []))
        assert late.value.retry_after_seconds == 5.0
    while 1 in await posts_of(service):  # noqa: ASYNC110  # nobody is told
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("by", ["another change", "a compaction"])
async def test_a_change_that_is_not_served_yet_is_not_passed_by(
    two: list[RetrievalService], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr("app.service.retrieval.FOLLOW_SECONDS", 1000.0)
    service, _ = two
    await service.load()
    await service.change(change([3], []))
    with monkeypatch.context() as patch:
        patch.setattr(RetrievalEngine, "change", lambda *_: (_ for _ in ()).throw(RuntimeError("planted")))
        with pytest.raises(EngineDown):
            await service.change(change([1], []))
    with pytest.raises(EngineDown, match="not served yet"):
        await (service.compact() if by == "a compaction" else service.change(change([2], [])))
    assert service.mark().sequence == 2, "on the disk"
    assert service._loaded.engine.mark.sequence == 1, "of what is served"
    assert await service._catch_up() is False
    await service.swap(service._loaded.again)
    assert (await service.compact()).mark.sequence == 2
    assert not {1, 3} & await posts_of(service)


@pytest.mark.parametrize("by", ["swap", "compaction"])
async def test_the_log_of_what_was_replaced_is_free(service: RetrievalService, tmp_path: Path, by: str) -> None:
    await service.change(change([1], []))
    log = service._loaded.log
    assert log.is_held
    if by == "swap":
        await service.swap(retrieving.loader(tmp_path, seed=5, version="v2"))
        other = ChangeLog(log.path.parent, load_corpus_manifest(log.path.parent))
        assert len(other.read()) == 1
        other.hold()
        other.close()
    else:
        await service.compact()
    assert not log.is_held


@pytest.mark.parametrize("write", ["zeros", "touch", "cut"])
async def test_writing_into_files_that_are_mapped_costs_all_answers(
    two: list[RetrievalService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """Until what is there is right again and read again. What is written into the corpus meanwhile comes to nothing."""
    monkeypatch.setattr("weights.format.reader.COPIED_BYTES", 0)
    service, _ = two
    await service.load()
    await service.change(change([1], [900]))
    vectors = tmp_path / "corpus-v1" / "vectors.safetensors"
    raw = vectors.read_bytes()
    if write == "cut":
        os.truncate(vectors, len(raw) - 1)  # not so far that a page goes, which ends the process
    elif write == "zeros":
        with vectors.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(8192))
    else:
        os.utime(vectors)
    with pytest.raises(EngineDown):
        await found(service, query(1), DEADLINE)
    assert "was written to while it was served" in service._loaded.changed_file()
    with pytest.raises(NotStored, match="was written to while it was served"):
        await service.change(change([2], []))
    with pytest.raises(NotStored, match="was written to while it was served"):
        await service.compact()
    vectors.write_bytes(raw)
    assert service._load is not None
    await service.swap(service._load)
    assert service._loaded.changed_file() == ""
    assert (await service.change(change([2], []))).changes == 2


async def test_short_files_are_not_mapped_and_may_be_written_to(service: RetrievalService, tmp_path: Path) -> None:
    before = everything(await found(service, query(1, 500), DEADLINE))
    for path in (*(tmp_path / "corpus-v1").glob("*.safetensors"), *(tmp_path / "towers-v1").glob("*.safetensors")):
        os.truncate(path, 0)
    assert everything(await found(service, query(1, 500), DEADLINE)) == before


def test_the_end_does_not_wait_for_a_compaction(tmp_path: Path, held_writing: Gate) -> None:
    async def scenario() -> None:
        service = RetrievalService(retrieving.loader(tmp_path), Settings(), Metrics(), FakeClock())
        await service.load()
        assert (await service.compact()).corpus.version == "v1", "nothing has changed"
        await service.change(change([1], []))
        compaction = asyncio.get_running_loop().create_task(service.compact())
        await held_writing.reached()
        assert await service.stop(5.0)
        with pytest.raises(asyncio.CancelledError):
            await compaction

    asyncio.run(scenario())
    assert not held_writing.left.is_set(), "nor does the event loop"
    held_writing.opened.set()


async def test_the_end_waits_for_a_change_though_it_fails(
    service: RetrievalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    def full(*asked: Any) -> None:
        gate(asked)
        raise NotStored("planted")

    monkeypatch.setattr(LoadedRetrieval, "record", full)
    changing = asyncio.ensure_future(service.change(change([1], [])))
    await gate.reached()
    stopping = asyncio.ensure_future(service.stop(5.0))
    await asyncio.wait([stopping], timeout=0.1)
    assert not stopping.done()
    gate.opened.set()
    assert await stopping
    with pytest.raises(NotStored, match="planted"):
        await changing


def test_the_end_does_not_wait_for_a_load() -> None:
    gate = Gate()

    def load() -> LoadedRetrieval:
        gate(None)
        raise CheckpointError("planted")

    async def scenario() -> None:
        service = RetrievalService(load, Settings(), Metrics(), FakeClock())
        loading = asyncio.get_running_loop().create_task(service.load())
        await gate.reached()
        assert await service.stop(0.1)
        loading.cancel()

    asyncio.run(scenario())
    assert not gate.left.is_set()
    gate.opened.set()


def test_a_change_beside_the_end_of_a_compaction_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process stops while the new corpus is put in force: what is acknowledged meanwhile is there at the next start."""
    gate, real = Gate(), compaction.write_file

    def write_file(*arguments: Any) -> None:
        gate(None)
        real(*arguments)

    monkeypatch.setattr(compaction, "write_file", write_file)

    async def scenario() -> list[int]:
        loop = asyncio.get_running_loop()
        service = RetrievalService(retrieving.loader(tmp_path), Settings(), Metrics(), FakeClock())
        await service.load()
        await service.change(change([1], []))
        compacting = loop.create_task(service.compact())
        await gate.reached()
        changing = loop.create_task(service.change(change([2], [])))
        await asyncio.sleep(0)
        stopping = loop.create_task(service.stop(5.0))
        await asyncio.wait([changing], timeout=0.3)
        gate.opened.set()
        _, compacted = await asyncio.gather(stopping, compacting)
        assert compacted.corpus.version == "v1+1", "the end waits for what is being put in force"
        kept = [1]
        with suppress(CheckpointError, CorpusNotLoaded, asyncio.CancelledError):
            await changing
            kept.append(2)
        return kept

    kept = asyncio.run(scenario())
    again = retrieval_loader(tmp_path / "towers-v1", tmp_path / "corpus-v1", Settings(threads=1))()
    posts = again.engine.retrieve([query(1, 500)]).retrieved[0].post_ids.tolist()
    assert not {*kept} & {*posts}
    again.engine.close()


async def test_a_change_beside_a_swap_is_made_in_what_the_swap_serves(
    service: RetrievalService, tmp_path: Path
) -> None:
    gate = Gate()
    second = retrieving.loader(tmp_path, seed=5, version="v2")

    def slow() -> LoadedRetrieval:
        loaded = second()
        gate(None)
        return loaded

    swapping = asyncio.ensure_future(service.swap(slow))
    await gate.reached()
    changing = asyncio.ensure_future(service.change(change([1], [])))
    await asyncio.wait([changing], timeout=0.1)
    assert not changing.done()
    gate.opened.set()
    await swapping
    assert (await changing).corpus.version == "v2"
    assert 1 not in (await found(service, query(1, 500), DEADLINE)).posts.post_ids


@pytest.mark.parametrize("kinds", [("uint64", "text"), ("text", "uint64")])
async def test_a_change_that_was_read_before_a_swap_to_other_ids_is_refused(
    tmp_path: Path, kinds: tuple[IdKind, IdKind]
) -> None:
    """In the other log it would be a record that no start can read."""
    gate, (before, after) = Gate(), kinds
    second = retrieving.loader(tmp_path, seed=5, version="v2", ids=after)

    def slow() -> LoadedRetrieval:
        loaded = second()
        gate(None)
        return loaded

    bodies = {
        "uint64": b'{"upsert": [{"post_id": 900, "author_id": 5}], "delete": [1]}',
        "text": b'{"upsert": [{"post_id": "post:900", "author_id": "author:5"}], "delete": ["post:1"]}',
    }
    async with running(retrieving.loader(tmp_path, ids=before), FakeClock()) as service:
        asked = [read_change(bodies[kind], kind) for kind in (before, after)]
        swapping = asyncio.ensure_future(service.swap(slow))
        await gate.reached()
        changing = asyncio.ensure_future(service.change(asked[0]))
        await asyncio.wait([changing], timeout=0.1)
        gate.opened.set()
        await swapping
        with pytest.raises(NotStored, match="another kind of ids"):
            await changing
        assert (await service.change(asked[1])).mark.sequence == 1
    assert retrieval_loader(tmp_path / "towers-v2", tmp_path / "corpus-v2", Settings(threads=1))().engine.changes == 1


async def test_a_swap_that_fails_changes_nothing(load: RetrievalLoader) -> None:
    def broken() -> LoadedRetrieval:
        raise ValueError("planted")

    async with running(load, FakeClock()) as service:
        served = service.served
        with pytest.raises(ValueError, match="planted"):
            await service.swap(broken)
        assert service.served is served
        both = await asyncio.gather(service.swap(load), service.swap(load), return_exceptions=True)
        assert [isinstance(one, ReloadInProgress) for one in both] == [False, True]


async def test_the_end_waits_for_what_was_begun(load: RetrievalLoader) -> None:
    gate = Gate()
    wrapped, engines = watched(load, gate)
    service = RetrievalService(wrapped, Settings(), Metrics(), FakeClock())
    with pytest.raises(CorpusNotLoaded, match="is being loaded") as early:
        _ = service.served
    assert early.value.retry_after_seconds == 2.0
    await service.load()
    begun = search(service, 1)
    await gate.reached()
    ended = asyncio.get_running_loop().create_task(service.stop(10.0))
    await asyncio.sleep(0.01)
    assert not ended.done()
    gate.opened.set()
    assert len((await begun).posts) == 5
    assert await ended
    await asyncio.to_thread(engines[0].closed.wait, 5)
    with pytest.raises(CorpusNotLoaded):
        _ = service.served


async def test_without_a_loader_there_is_nothing() -> None:
    service = RetrievalService(None, Settings(), Metrics(), FakeClock())
    await service.load()
    with pytest.raises(CorpusNotLoaded, match="serves no corpus") as none:
        _ = service.served
    assert none.value.retry_after_seconds is None
    assert await service.stop(1.0)


async def test_searches_after_the_loss_of_their_engine_are_refused_until_another_corpus_is_loaded(
    load: RetrievalLoader,
) -> None:
    async with running(load, FakeClock()) as service:
        served = service.served
        with structlog.testing.capture_logs() as lines:
            service.engine_lost("planted")
        assert lines == [{"event": "retrieval_lost", "reason": "planted", "log_level": "error"}]
        assert service.state() is None
        for ask in (lambda: service.served, lambda: service.retrieve(served, query(1), DEADLINE, None, print)):
            with pytest.raises(CorpusNotLoaded) as refused:
                ask()
            assert refused.value.retry_after_seconds is not None
        await service.swap(load)
        assert (await search(service, 1)).posts.post_ids.size == 5


async def test_after_the_end_nobody_waits_and_no_thread_is_to_be_had(load: RetrievalLoader) -> None:
    gate = Gate()
    service = RetrievalService(watched(load, gate)[0], Settings(), Metrics(), FakeClock())
    await service.load()
    begun = search(service, 1)
    await gate.reached()
    assert not await service.stop(0.05)
    with pytest.raises(EngineDown, match="The process stops") as refused:
        await begun
    assert refused.value.retry_after_seconds is not None
    with pytest.raises(RuntimeError, match="shutdown"):
        service._slow.submit(print)
    await until(lambda: all(follower.cancelled() for follower in service._followers))
    assert service._followers, "who looks at the disk and at a feed looks no longer"
    gate.opened.set()
