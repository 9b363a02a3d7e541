"""What the watchdog does beside requests: ends a process whose loop hangs, survives a pause, collects garbage."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from app.service.watchdog import COLLECT_OBJECTS, collect_garbage
from app.settings import Queue
from model.split.graphs import no_garbage
from tests.support.fakes import FakeClock
from tests.support.rankers import busy, rank, running, until

pytestmark = pytest.mark.anyio


async def test_a_hang_of_the_event_loop_is_told_in_another_thread() -> None:
    told: list[str] = []
    async with running(queue=Queue(stall_seconds=0.1, stall_exit_seconds=0.5)) as ranker:
        ranker.watchdog.watch_loop(told.append)
        await asyncio.sleep(1.7)
        assert told == []
        ends = time.monotonic() + 20
        while not told and time.monotonic() < ends:
            time.sleep(0.01)  # noqa: ASYNC251  # nothing else runs in this loop
    assert "The event loop has hung" in told[0]


async def test_a_loop_that_is_late_for_less_than_the_limit_goes_on() -> None:
    """The limit is shorter than the time between two looks, one of which comes too late for the thread that watches."""
    told: list[str] = []
    async with running(queue=Queue(stall_seconds=0.1, stall_exit_seconds=0.45)) as ranker:
        await asyncio.sleep(0.1)
        ranker.watchdog.watch_loop(told.append)
        await asyncio.sleep(0.8)
        time.sleep(0.35)  # noqa: ASYNC251
        await asyncio.sleep(0.7)
        assert told == []


async def test_a_process_that_was_stopped_for_a_while_is_not_stuck() -> None:
    """The first look after the pause comes before the loop hears of the forward that has ended meanwhile."""
    clock, lost = FakeClock(), list[str]()
    async with busy(clock=clock, queue=Queue(stall_exit_seconds=30.0)) as now:
        now.ranker.on_fatal = lost.append
        clock.advance(60.0)
        await asyncio.sleep(0.7)  # one look
        now.gate.opened.set()
        await now.first
        await asyncio.sleep(0.7)
        assert lost == []
        assert now.ranker.health().ready


async def test_no_request_begins_a_collection_and_cycles_are_collected() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    gc.unfreeze()
    of_the_load = weakref.ref(Cycle())
    async with running() as ranker:
        assert of_the_load() is None
        assert gc.get_freeze_count() > 10_000, "no collection walks over code and weights"
        assert not gc.isenabled()
        await rank(ranker, 1)
        cycles = [weakref.ref(Cycle()) for _ in range(COLLECT_OBJECTS)]
        await until(lambda: not any(cycle() for cycle in cycles))
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("counts", "collected"),
    [((0, 0, 0), []), ((1, 11, 11), [2]), ((1, 10, 11), [2]), ((1, 11, 10), [1]), ((1, 10, 10), [0])],
)
async def test_each_tenth_collection_takes_an_older_generation(
    counts: tuple[int, int, int], collected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(gc, "get_count", lambda: (COLLECT_OBJECTS + counts[0], *counts[1:]))
    monkeypatch.setattr(gc, "collect", found.append)
    collect_garbage()
    assert found == collected


def test_no_garbage_is_collected_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version is recorded in a thread of its own, while the event loop serves."""
    found: list[int] = []
    monkeypatch.setattr(gc, "get_count", lambda: (COLLECT_OBJECTS + 1, 0, 0))
    monkeypatch.setattr(gc, "collect", lambda generation=2: found.append(generation))

    def look() -> None:
        thread = threading.Thread(target=collect_garbage)
        thread.start()
        thread.join(10)

    with no_garbage():
        look()
        assert found == []
    look()
    assert found == [0]
