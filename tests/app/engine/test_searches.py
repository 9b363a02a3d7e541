"""The queue of searches: turns of keys, shares of the room, what is computed at once, what an answer costs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.engine import searches
from app.engine.searches import Searches, Version
from app.errors import DeadlineExceeded, EngineDown, Overloaded
from app.interface import Found
from app.settings import Queue, Retrieval, Settings
from app.telemetry.metrics import Metrics
from model.cache import ContextKey
from model.inputs import Context
from model.retrieval.engine import Users
from model.retrieval.inputs import Answers, Filters, Query, Retrieved
from tests.app.fakes import FakeClock, Gate, ended

NO_IDS = np.empty(0, np.uint64)
NOTHING = Retrieved(NO_IDS, NO_IDS, np.empty(0, np.float32), np.empty(0, np.int64), [], 0, 0, False, 0, 0)


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
        return Users(keys, {}, unknown, 0.0)

    def retrieve(self, queries: Sequence[Query], users: Users) -> Answers:
        self.batches.append([query.context.user_id for query in queries])
        self.threads.append(threading.current_thread().name.partition("_")[0])
        self.before(queries)
        encode_seconds = self.encode_seconds if users.unknown else 0.0
        self.clock.advance(encode_seconds + self.seconds)
        found = [replace(NOTHING, cached=key not in users.unknown) for key in users.keys]
        return Answers(found, encode_seconds, self.seconds)

    def close(self) -> None: ...

    def __repr__(self) -> str:
        raise AssertionError("what holds a corpus is never written out")


class Bench:
    """A queue around a fake engine. `ask` begins a search."""

    def __init__(self, engine: FakeRetrieval, **limits: Any) -> None:
        self.engine = engine
        self.queue = Searches(Settings(retrieval=Retrieval(**limits)), Metrics(), engine.clock)
        self.version = Version(SimpleNamespace(engine=engine))  # type: ignore[arg-type]
        self.queue.versions.append(self.version)

    def ask(
        self, user: int, key: str | None = None, version: Version | None = None, seconds: float = 100.0
    ) -> asyncio.Task[Found]:
        history = np.empty(0, np.int64)
        context = Context(user, NO_IDS, NO_IDS, np.zeros((0, 3), np.float32), history, np.zeros(0, np.float32))
        query = Query(context, 5, Filters(NO_IDS))
        find = ended(self.queue.find, version or self.version, query, self.engine.clock.now + seconds, key)
        return asyncio.get_running_loop().create_task(find)


def test_keys_take_turns() -> None:
    """One that has sent sixty at once takes one place of two in each batch, and the other is never behind all of them."""

    async def scenario() -> None:
        gate = Gate()
        bench = Bench(FakeRetrieval(FakeClock(), before=gate), batch_requests=4)
        tasks = [bench.ask(0)]
        await gate.reached()
        tasks += [bench.ask(user, "greedy") for user in range(100, 160)]
        await asyncio.sleep(0)
        tasks += [bench.ask(user, "modest") for user in range(1, 6)]
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(*tasks)
        assert bench.engine.batches[1:5] == [
            [100, 1, 101, 2], [102, 3, 103, 4], [104, 5, 105, 106], [107, 108, 109, 110],
        ]  # fmt: skip
        assert bench.queue.waiting == 0

    asyncio.run(scenario())


def test_more_keys_than_places_take_turns_too() -> None:
    async def scenario() -> None:
        gate = Gate()
        bench = Bench(FakeRetrieval(FakeClock(), before=gate), batch_requests=2)
        tasks = [bench.ask(0)]
        await gate.reached()
        tasks += [bench.ask(10 * key + turn, f"key {key}") for key in (1, 2, 3) for turn in (0, 1)]
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(*tasks)
        assert bench.engine.batches[1:] == [[10, 20], [30, 11], [21, 31]]

    asyncio.run(scenario())


def test_a_key_holds_its_share_of_the_room() -> None:
    async def scenario() -> None:
        gate = Gate()
        bench = Bench(FakeRetrieval(FakeClock(), before=gate), max_waiting=30)
        tasks = [bench.ask(0)]
        await gate.reached()
        tasks += [bench.ask(user, "greedy") for user in range(30)]
        await asyncio.sleep(0)
        refused = [task for task in tasks if task.done()]
        assert len(refused) == 15, "half of what is there"
        with pytest.raises(Overloaded, match="15 searches of this key wait already"):
            refused[0].result()
        others = [bench.ask(user, f"key {user % 4}") for user in range(16)]
        await asyncio.sleep(0)
        taken = [sum(not task.done() for task in others[key::4]) for key in range(4)]
        assert min(taken) >= 2, "every newcomer finds room"
        gate.opened.set()
        await asyncio.gather(*tasks, *others, return_exceptions=True)

    asyncio.run(scenario())


def test_a_newcomer_waits_for_the_present_search_and_one_of_each_other_key() -> None:
    async def scenario() -> None:
        gate = Gate()
        gate.opened.set()
        bench = Bench(FakeRetrieval(FakeClock(), 20.0, gate), batch_requests=1)
        bench.queue.settings = bench.queue.settings.model_copy(update={"queue": Queue(max_wait_seconds=0)})
        await bench.ask(0)  # from now on it is known how long one takes
        gate.opened.clear()
        gate.entered.clear()
        tasks = [bench.ask(1)]
        await gate.reached()
        tasks += [bench.ask(user, key, seconds=1000.0) for key in ("a", "b") for user in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match="would begin after the deadline"):
            await bench.ask(9, "c", seconds=60.0)
        newcomer = bench.ask(9, "c", seconds=61.0)
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(newcomer, *tasks)

    asyncio.run(scenario())


@pytest.mark.parametrize(("seconds", "thread"), [(0.9e-3, "MainThread"), (1.1e-3, searches.RETRIEVAL_THREAD)])
def test_a_short_search_is_computed_at_once(seconds: float, thread: str) -> None:
    async def scenario() -> None:
        bench = Bench(FakeRetrieval(FakeClock(), seconds))
        for user in range(4):
            await bench.ask(user)
        assert bench.engine.threads == [searches.RETRIEVAL_THREAD, thread, thread, thread], "the first is not foreseen"
        bench.queue.close()

    asyncio.run(scenario())


def test_a_long_encoding_is_no_reason_to_hand_over_the_search_of_a_known_user() -> None:
    async def scenario() -> None:
        bench = Bench(FakeRetrieval(FakeClock(), 0.5e-3, unknown={1, 3}, encode_seconds=2e-3))
        for user in range(1, 5):
            await bench.ask(user)
        thread = searches.RETRIEVAL_THREAD
        assert bench.engine.threads == [thread, "MainThread", thread, "MainThread"]
        bench.queue.close()

    asyncio.run(scenario())


def test_a_user_who_cannot_be_looked_up_fails_alone() -> None:
    async def scenario() -> None:
        bench = Bench(FakeRetrieval(FakeClock()))
        look_up = bench.engine.look_up

        def fail(queries: Sequence[Query]) -> Users:
            if any(query.context.user_id == 3 for query in queries):
                raise RuntimeError("planted")
            return look_up(queries)

        vars(bench.engine)["look_up"] = fail
        ended = await asyncio.gather(*(bench.ask(user) for user in (2, 3, 4)), return_exceptions=True)
        assert [isinstance(one, EngineDown) for one in ended] == [False, True, False]
        bench.queue.close()

    asyncio.run(scenario())


def test_a_short_search_that_raises_fails_alone() -> None:
    def fail(queries: Sequence[Query]) -> None:
        if any(query.context.user_id == 3 for query in queries):
            raise RuntimeError("planted")

    async def scenario() -> None:
        bench = Bench(FakeRetrieval(FakeClock(), 1e-4, fail))
        await bench.ask(0)
        ended = await asyncio.gather(*(bench.ask(user) for user in (1, 2, 3, 4)), return_exceptions=True)
        assert [isinstance(one, EngineDown) for one in ended] == [False, False, True, False]
        assert bench.engine.batches[1:] == [[1, 2, 3, 4], [1], [2], [3], [4]]

    asyncio.run(scenario())


def test_nothing_runs_beside_what_is_done_between_searches() -> None:
    async def scenario() -> None:
        gate = Gate()
        bench = Bench(FakeRetrieval(FakeClock(), 1e-4))
        await bench.ask(0)
        call = asyncio.get_running_loop().create_task(bench.queue.between(lambda: gate([])))
        await gate.reached()
        waits = bench.ask(1)
        await asyncio.sleep(0.01)
        assert (bench.engine.batches, waits.done()) == ([[0]], False)
        gate.opened.set()
        await asyncio.gather(call, waits)
        with pytest.raises(ZeroDivisionError):
            await bench.queue.between(lambda: 1 // 0)
        await asyncio.wait_for(bench.queue.idle.wait(), 1)

    asyncio.run(scenario())


def test_silence_is_the_time_of_the_present_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate()
        bench = Bench(FakeRetrieval(FakeClock(), before=gate))
        assert bench.queue.silent_seconds() == 0
        task = bench.ask(1)
        await gate.reached()
        bench.engine.clock.advance(7.0)
        assert bench.queue.silent_seconds() == 7
        waits = bench.ask(2)
        await asyncio.sleep(0)
        bench.queue.abandon(lambda: EngineDown("gone"))
        for one in (task, waits):
            with pytest.raises(EngineDown):
                await one
        gate.opened.set()
        await bench.queue.between(lambda: None)  # behind the batch
        assert (bench.queue.silent_seconds(), bench.engine.batches) == (0, [[1]])

    asyncio.run(scenario())


def test_a_retired_version_is_freed_once_nobody_needs_it() -> None:
    async def scenario() -> None:
        gate = Gate()
        bench = Bench(FakeRetrieval(FakeClock(), before=gate))
        new = Version(SimpleNamespace(engine=FakeRetrieval(bench.engine.clock)))  # type: ignore[arg-type]
        bench.queue.versions.append(new)
        tasks = [bench.ask(1)]
        await gate.reached()
        tasks += [bench.ask(2), bench.ask(3, version=new), bench.ask(4)]
        await asyncio.sleep(0)
        bench.queue.retire(bench.version)
        assert bench.queue.versions == [bench.version, new]
        gate.opened.set()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)
        assert bench.engine.batches == [[1], [2], [4]], "a key's searches keep their order"
        assert bench.queue.versions == [new]

    asyncio.run(scenario())
