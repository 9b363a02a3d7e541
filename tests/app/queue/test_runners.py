"""Forwards in native threads: the same scores either way, and short ones are not handed over."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.errors import EngineDown
from app.interface import PlaceRequest
from app.queue.loading import LoadedModel, checkpoint_loader
from app.queue.runners import EARLY_CANDIDATES, HAND_OVER_SECONDS, Steps
from app.service.local import LocalService
from app.settings import Settings
from model.engine import EngineError, Item, Outcome, OverlappingEngine
from model.inputs import Scores
from model.selftest import same_bits
from model.synthetic import random_request
from tests.support.fakes import FakeClock, FakeEngine, is_right
from tests.support.rankers import rank, running, until

pytestmark = pytest.mark.anyio

DEMO = Path(__file__).parents[3] / "weights" / "demo"


class Overlapping(FakeEngine):
    """A fake engine that also computes while its caller goes on. `seconds`: what each forward takes, by this clock."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.ways: list[str] = []
        self.fault: Callable[[Sequence[Item]], None] = lambda items: None
        self._begun: Sequence[Item] = ()
        self._reader, self._writer = os.pipe()

    def open(self) -> int:
        return self._reader

    def begin(self, items: Sequence[Item]) -> None:
        self.ways.append("native threads")
        self._begun = items
        os.write(self._writer, b"x")

    def finish(self) -> list[Outcome]:
        os.read(self._reader, 1)
        return self._computed(self._begun)

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        self.ways.append("loop")
        return self._computed(items)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)
        super().close()

    def _computed(self, items: Sequence[Item]) -> list[Outcome]:
        self.fault(items)
        self.clock.advance(self.seconds)
        return super().forward(items)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.mark.parametrize(
    ("seconds", "ways"),
    [
        (HAND_OVER_SECONDS / 2, ["native threads", "loop", "loop"]),  # nothing is known before the first
        (HAND_OVER_SECONDS * 2, ["native threads"] * 3),
    ],
)
async def test_a_forward_shorter_than_its_handover_runs_in_the_loop(
    clock: FakeClock, seconds: float, ways: list[str]
) -> None:
    engine = Overlapping(clock, seconds)
    async with running(engine, clock) as ranker:
        for user in (1, 2, 3):
            assert is_right((await rank(ranker, user)).scores, user)
        assert engine.ways == ways


@pytest.mark.parametrize(("candidates", "forwards"), [(EARLY_CANDIDATES // 2, [[1, 2], [3, 4]]), (4, [[1, 2, 3, 4]])])
async def test_a_worthwhile_forward_begins_before_the_turn_ends(
    clock: FakeClock, candidates: int, forwards: list[list[int]]
) -> None:
    """Four requests in one turn of the loop."""
    engine = Overlapping(clock, 1.0)
    async with running(engine, clock) as ranker:
        found = await asyncio.gather(*(rank(ranker, user, candidates) for user in (1, 2, 3, 4)))
        assert all(is_right(each.scores, user) for user, each in enumerate(found, start=1))
        assert engine.forwards == forwards


@pytest.mark.parametrize("seconds", [HAND_OVER_SECONDS / 2, HAND_OVER_SECONDS * 2])
async def test_an_error_of_either_way_is_the_requests_own(clock: FakeClock, seconds: float) -> None:
    engine = Overlapping(clock, seconds)

    def fault(items: Sequence[Item]) -> None:
        if any(item.context.user_id == 13 for item in items):
            raise MemoryError("planted")

    async with running(engine, clock) as ranker:
        await rank(ranker, 1)
        engine.fault = fault
        results = await asyncio.gather(*(rank(ranker, user) for user in range(10, 20)), return_exceptions=True)
        assert [10 + place for place, found in enumerate(results) if isinstance(found, EngineDown)] == [13]


async def test_a_sticky_error_is_fatal_and_frees_the_descriptor_once(clock: FakeClock) -> None:
    """The process ends after it; the number of the descriptor may be a connection's by then."""
    engine, told = Overlapping(clock, 1.0), list[str]()

    def fault(items: Sequence[Item]) -> None:
        raise EngineError("planted", sticky=True)

    engine.fault = fault
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    async with running(engine, clock) as ranker:
        ranker.on_fatal = told.append
        with pytest.raises(EngineDown):
            await rank(ranker, 1)
        await until(lambda: bool(told))
        assert ranker.health().reason == told[0] == "The engine is lost; the log says why."
        assert await asyncio.to_thread(engine.closed.wait, 5)
        reader, writer = os.pipe()  # which takes the numbers that have become free
        loop.add_reader(reader, heard.set)
    os.write(writer, b"x")
    await asyncio.wait_for(heard.wait(), 10)
    loop.remove_reader(reader)
    os.close(reader)
    os.close(writer)


class Ticking:
    """Seconds that pass by themselves: so many from each look to the next."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 100.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


@pytest.fixture(scope="module")
def native() -> LoadedModel:
    """The demo checkpoint on the native engine."""
    settings = Settings(checkpoint=DEMO, device="cpu", backend="native", dtype="bfloat16")
    return checkpoint_loader(settings)(DEMO, Steps())


class Watched:
    """An engine that outlives its ranker, and in which way it was asked for each forward."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.ways: list[str] = []

    def close(self) -> None: ...


def passed_on(name: str) -> property:
    def get(watched: Watched) -> Any:
        if name in ("begin", "forward"):
            watched.ways.append(name)
        return getattr(watched._engine, name)

    return property(get)


METHODS = {name for name in dir(OverlappingEngine) if not name.startswith("_")}
for name in (METHODS | {"config", "info"}) - {"close"}:
    setattr(Watched, name, passed_on(name))  # on the class, where `isinstance` looks from Python 3.12 on


async def test_the_native_engine_gives_the_same_bits_either_way(native: LoadedModel) -> None:
    """Its forwards look long by one clock, and short by the other."""

    async def scores(seconds: float) -> tuple[list[str], list[Scores]]:
        engine = Watched(native.engine)

        def load(path: Path, steps: Steps) -> LoadedModel:
            return LoadedModel(native.checkpoint, engine)

        async with running(load=load, clock=Ticking(seconds)) as ranker:
            engine.ways.clear()
            found = [await native_rank(ranker, user) for user in range(1, 5)]
            return engine.ways, found + await asyncio.gather(*(native_rank(ranker, user) for user in range(1, 40)))

    ways, handed_over = await scores(1e-3)
    assert set(ways) == {"begin"}
    ways, kept = await scores(1e-9)
    assert (ways[0], set(ways[1:])) == ("begin", {"forward"})
    assert all(same_bits(ours, theirs) for ours, theirs in zip(kept, handed_over, strict=True))
    assert all(same_bits(alone, among) for alone, among in zip(kept[:4], kept[4:8], strict=True))


async def native_rank(ranker: LocalService, user: int, count: int = 4) -> Scores:
    context, candidates = random_request(ranker.model().manifest.config, 9, count, seed=user)
    with ranker.admit(ranker.model(), PlaceRequest(count, 9, math.inf)) as job:
        return (await ranker.rank(job, context, candidates)).scores
