"""Searches on their engine: turns of keys, shares of the room, what is computed at once, what runs between two batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from app.engine.admission import Admission
from app.engine.forecast import Clock
from app.engine.job import SearchJob
from app.engine.places import Places
from app.engine.runners import RETRIEVAL_THREAD, EngineThread, SearchForwards
from app.engine.versions import Versions
from app.errors import EngineDown
from app.interface import Found
from app.settings import Batching, Queue
from app.telemetry.metrics import Metrics
from model.cache import ContextKey
from model.engine import CacheStats, EngineError
from model.inputs import Context
from model.retrieval.engine import Users
from model.retrieval.inputs import Answers, Filters, Mark, Query, Retrieved
from tests.support.fakes import FakeClock, Gate

pytestmark = pytest.mark.anyio

NO_IDS = np.empty(0, np.uint64)
NOTHING = Retrieved(NO_IDS, NO_IDS, np.empty(0, np.float32), np.empty(0, np.int64), [], 0, 0, False, 0, 0, Mark())


class FakeRetrieval:
    """Takes as long as it says, on paper, longer for a user who is `unknown`, and finds nothing. `before` may wait."""

    def __init__(
        self,
        clock: FakeClock,
        seconds: float = 0.0,
        before: Any = lambda queries: None,
        *,
        unknown: Collection[int] = (),
        encode_seconds: float = 0.0,
    ) -> None:
        self.clock, self.seconds, self.before = clock, seconds, before
        self.unknown, self.encode_seconds = unknown, encode_seconds
        self.batches: list[list[int]] = []
        self.threads: list[str] = []

    def look_up(self, queries: Sequence[Query]) -> Users:
        keys = [ContextKey(query.context.user_id, ()) for query in queries]
        unknown = {key: query.context for key, query in zip(keys, queries, strict=True) if key.user_id in self.unknown}
        return Users(keys, {}, unknown, sum(1 + len(each) for each in unknown.values()), 0.0)

    def retrieve(self, queries: Sequence[Query], users: Users) -> Answers:
        self.batches.append([query.context.user_id for query in queries])
        self.threads.append(threading.current_thread().name.partition("_")[0])
        self.before(queries)
        encode_seconds = self.encode_seconds if users.unknown else 0.0
        self.clock.advance(encode_seconds + self.seconds)
        found = [replace(NOTHING, cached=key not in users.unknown) for key in users.keys]
        return Answers(found, encode_seconds, self.seconds)

    def cache_stats(self) -> CacheStats:
        return CacheStats()

    def close(self) -> None: ...

    def __repr__(self) -> str:
        raise AssertionError("what holds a corpus is never written out")


@dataclass
class LoadedFake:
    """What a load returns."""

    engine: FakeRetrieval
    served: object

    def changed_file(self) -> str:
        return ""


class Bench:
    """A queue of searches before a fake engine. `ask` begins a search, after `begin`."""

    def __init__(self, engine: FakeRetrieval, queue: Queue | None = None, batch_requests: int = 32) -> None:
        metrics, batching = Metrics(), Batching(max_candidates=batch_requests)
        self.engine = engine
        self.places: Places[SearchJob] = Places(
            Admission(queue or Queue(), batching, engine.clock), metrics, metrics.record_waits
        )

        def runner(thread: EngineThread, loop: asyncio.AbstractEventLoop, clock: Clock) -> SearchForwards:
            return SearchForwards(thread, thread.ready.result().engine, loop, clock, metrics)

        self.versions: Versions[SearchJob] = Versions(
            batching, self.places.batch_done, engine.clock, 60.0, runner, RETRIEVAL_THREAD
        )

    async def begin(self) -> None:
        self.versions.install(await self.versions.load(lambda steps: LoadedFake(self.engine, object())))

    def ask(self, user: int, key: str | None = None, seconds: float = 100.0) -> asyncio.Task[Found]:
        return asyncio.get_running_loop().create_task(self._search(user, key, self.engine.clock.now + seconds))

    async def _search(self, user: int, key: str | None, deadline: float) -> Found:
        context = Context(
            user, NO_IDS, NO_IDS, np.zeros((0, 3), np.float32), NO_IDS.view(np.int64), np.zeros(0, np.float32)
        )
        future: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        query = Query(context, 5, Filters(NO_IDS))
        job = SearchJob(candidates=1, context_tokens=0, deadline=deadline, key=key, future=future, query=query)
        worker = self.versions.current
        assert worker is not None
        with self.places.take(job, worker):
            found: Found = await self.places.compute(job)
            return found


async def entered(gate: Gate) -> None:
    """Return when the engine is in its batch."""
    assert await asyncio.to_thread(gate.entered.wait, 10)


async def test_keys_take_turns() -> None:
    """One that has sent sixty at once takes one place of two in each batch, and the other is never behind all of them."""
    gate = Gate()
    bench = Bench(FakeRetrieval(FakeClock(), before=gate), batch_requests=4)
    await bench.begin()
    tasks = [bench.ask(0)]
    await entered(gate)
    tasks += [bench.ask(user, "greedy") for user in range(100, 160)]
    await asyncio.sleep(0)
    tasks += [bench.ask(user, "modest") for user in range(1, 6)]
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(*tasks)
    assert bench.engine.batches[1:5] == [[100, 1, 101, 2], [102, 3, 103, 4], [104, 5, 105, 106], [107, 108, 109, 110]]
    assert bench.versions.waiting == 0


@pytest.mark.parametrize(("seconds", "thread"), [(0.9e-3, "MainThread"), (1.1e-3, RETRIEVAL_THREAD)])
async def test_a_short_search_is_computed_at_once(seconds: float, thread: str) -> None:
    bench = Bench(FakeRetrieval(FakeClock(), seconds))
    await bench.begin()
    for user in range(4):
        await bench.ask(user)
    assert bench.engine.threads == [RETRIEVAL_THREAD, thread, thread, thread], "the first is not foreseen"


async def test_a_long_encoding_is_no_reason_to_hand_over_the_search_of_a_known_user() -> None:
    bench = Bench(FakeRetrieval(FakeClock(), 0.5e-3, unknown={1, 3}, encode_seconds=2e-3))
    await bench.begin()
    for user in range(1, 5):
        await bench.ask(user)
    assert bench.engine.threads == [RETRIEVAL_THREAD, "MainThread", RETRIEVAL_THREAD, "MainThread"]


async def test_a_user_who_cannot_be_looked_up_fails_alone() -> None:
    bench = Bench(FakeRetrieval(FakeClock()))
    await bench.begin()
    look_up = bench.engine.look_up

    def fail(queries: Sequence[Query]) -> Users:
        if any(query.context.user_id == 3 for query in queries):
            raise RuntimeError("planted")
        return look_up(queries)

    vars(bench.engine)["look_up"] = fail
    results = await asyncio.gather(*(bench.ask(user) for user in (2, 3, 4)), return_exceptions=True)
    assert [isinstance(one, EngineDown) for one in results] == [False, True, False]


@pytest.mark.parametrize(("seconds", "thread"), [(1e-4, "MainThread"), (1.0, RETRIEVAL_THREAD)])
async def test_a_search_that_raises_fails_alone_wherever_it_is_computed(seconds: float, thread: str) -> None:
    def fail(queries: Sequence[Query]) -> None:
        if any(query.context.user_id == 3 for query in queries):
            raise RuntimeError("planted")

    bench = Bench(FakeRetrieval(FakeClock(), seconds, fail))
    await bench.begin()
    await bench.ask(0)
    results = await asyncio.gather(*(bench.ask(user) for user in (1, 2, 3, 4)), return_exceptions=True)
    assert [isinstance(one, EngineDown) for one in results] == [False, False, True, False]
    assert bench.engine.batches[1:] == [[1, 2, 3, 4], [1], [2], [3], [4]]
    assert set(bench.engine.threads[1:]) == {thread}


async def test_what_waits_after_a_split_batch_is_answered_at_the_end() -> None:
    gate = Gate()

    def fail_together(queries: Sequence[Query]) -> None:
        if len(queries) > 1:
            raise RuntimeError("planted")
        gate(queries)

    bench = Bench(FakeRetrieval(FakeClock(), before=fail_together))
    await bench.begin()
    tasks = [bench.ask(user) for user in (1, 2, 3)]
    await entered(gate)  # the first is tried by itself, and the others wait for that
    bench.versions.fail_all(lambda: EngineDown("gone"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["gone"] * 3
    gate.opened.set()


async def test_nothing_runs_beside_a_call_between_searches() -> None:
    gate = Gate()
    bench = Bench(FakeRetrieval(FakeClock(), 1e-4))
    await bench.begin()
    await bench.ask(0)
    worker = bench.versions.current
    assert worker is not None
    call = asyncio.ensure_future(worker.between(lambda: gate(())))
    await entered(gate)
    waits = bench.ask(1)
    await asyncio.sleep(0.01)
    assert (bench.engine.batches, waits.done()) == ([[0]], False)
    gate.opened.set()
    await asyncio.gather(call, waits)
    with pytest.raises(ZeroDivisionError):
        await worker.between(lambda: 1 // 0)
    assert not worker.has_work
    worker.close()
    with pytest.raises(EngineError, match="closed"):
        await worker.between(lambda: 1)
