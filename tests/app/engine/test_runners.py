"""Forwards in native threads: the same scores, no Python beside the loop, and short ones are not handed over."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.assembly import build_service
from app.engine import runners, worker
from app.engine.loading import checkpoint_loader
from app.engine.runners import NativeForwards
from app.errors import DeadlineExceeded, EngineDown
from app.interface import ranked
from app.service.service import RankingService
from app.settings import Settings
from app.telemetry.metrics import Metrics
from model.engine import EngineError, Item, Outcome
from model.inputs import Scores
from model.native.engine import NativeEngine
from model.selftest import same_bits
from tests.model.builders import random_request

pytestmark = pytest.mark.anyio

DEMO = Path(__file__).parents[3] / "weights" / "demo"


async def rank(service: RankingService, user: int, count: int = 4) -> Scores:
    """A request that the checkpoint understands."""
    context, candidates = random_request(service.model.manifest.config, 9, count, seed=user)
    ticket = service.admit(service.model, candidates=count, history=9, deadline=None)
    return (await ranked(service, ticket, replace(context, user_id=user), candidates)).scores


async def scores_of(users: Sequence[int], service: RankingService) -> list[Any]:
    results: list[Any] = await asyncio.gather(*(rank(service, user) for user in users), return_exceptions=True)
    return results


@asynccontextmanager
async def serving() -> AsyncIterator[RankingService]:
    """A service of the demo's checkpoint."""
    service = build_service(Settings(checkpoint=DEMO, backend="native", dtype="bfloat16"), Metrics())
    service.start()
    await service.wait_ready()
    try:
        yield service
    finally:
        assert await service.stop(5)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each forward went, and in which thread."""
    found: list[str] = []
    for name in ("begin", "forward"):
        original = getattr(NativeEngine, name)

        def noted(engine: Any, items: Sequence[Item], name: str = name, original: Any = original) -> Any:
            found.append(f"{name} in {threading.current_thread().name}")
            return original(engine, items)

        monkeypatch.setattr(NativeEngine, name, noted)
    return found


async def test_short_forwards_stay_in_the_loop_and_give_the_same_bits(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scores() -> list[Scores]:
        async with serving() as service:
            del calls[:]  # of the warm-up
            asked = range(1, 40), [3], [3]
            return [found for users in asked for found in await scores_of(users, service)]

    monkeypatch.setattr(runners, "HAND_OVER_SECONDS", 0.0)
    handed_over = await scores()
    assert set(calls) == {"begin in MainThread"}
    monkeypatch.setattr(runners, "HAND_OVER_SECONDS", 3600.0)
    kept = await scores()
    assert calls[0] == "begin in MainThread"  # nothing is known yet
    assert set(calls[1:]) == {"forward in MainThread"}
    assert all(same_bits(ours, theirs) for ours, theirs in zip(kept, handed_over, strict=True))


@pytest.mark.parametrize(("early", "forwards"), [(8, [8, 24]), (33, [32])])
async def test_a_forward_that_is_worth_it_begins_before_the_loops_turn_ends(
    early: int, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests of four candidates in one turn of the loop: the same bits as alone, in the forwards that are to be."""
    sizes: list[int] = []
    plan = NativeEngine._plan

    def noted(engine: Any, items: Sequence[Item]) -> Any:
        sizes.append(sum(len(item.candidates) for item in items))
        return plan(engine, items)

    monkeypatch.setattr(runners, "HAND_OVER_SECONDS", 0.0)  # else the first forward may be over before the turn is
    monkeypatch.setattr(worker, "EARLY_CANDIDATES", early)
    monkeypatch.setattr(NativeEngine, "_plan", noted)
    async with serving() as service:
        alone = [(await scores_of([user], service))[0] for user in range(1, 9)]
        del sizes[:]
        together = await scores_of(range(1, 9), service)
    assert sizes == forwards
    assert all(same_bits(ours, theirs) for ours, theirs in zip(together, alone, strict=True))


async def test_a_request_without_time_is_refused_after_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`done` is called later even where the forward would begin at once."""
    told: list[Any] = []

    monkeypatch.setattr(worker, "EARLY_CANDIDATES", 1)
    async with serving() as service:
        context, candidates = random_request(service.model.manifest.config, 9, 4, seed=1)
        ticket = service.admit(service.model, candidates=4, history=9, deadline=service.clock() + 1.0)
        late = service.clock() + 2.0
        monkeypatch.setattr(service.versions.current, "clock", lambda: late)
        service.rank(ticket, context, candidates, told.append)
        assert not told
        await asyncio.sleep(0)
        assert [type(found) for found in told] == [DeadlineExceeded]


@pytest.mark.parametrize("limit", [0.0, 3600.0])
async def test_an_error_of_either_way_is_the_requests_own(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "HAND_OVER_SECONDS", limit)
    plan = NativeEngine._plan

    def refusing(engine: Any, items: Sequence[Item]) -> Any:
        if any(item.context.user_id == 13 for item in items):
            raise MemoryError("planted")
        return plan(engine, items)

    async with serving() as service:
        await rank(service, 1)
        monkeypatch.setattr(NativeEngine, "_plan", refusing)
        results = await scores_of(range(10, 20), service)
        assert [10 + place for place, found in enumerate(results) if isinstance(found, EngineDown)] == [13]


async def test_a_sticky_error_at_the_end_of_a_forward_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(engine: Any) -> list[Outcome]:
        raise EngineError("planted", sticky=True)

    async with serving() as service:
        monkeypatch.setattr(NativeEngine, "finish", lost)
        monkeypatch.setattr(runners, "HAND_OVER_SECONDS", 0.0)
        assert all(isinstance(found, EngineDown) for found in await scores_of(range(3), service))
        assert "planted" in service.health().reason


async def test_a_model_that_is_replaced_while_it_computes_ends_what_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is freed then: its descriptor is watched no longer."""
    closed: list[NativeForwards] = []
    close = NativeForwards.close
    monkeypatch.setattr(NativeForwards, "close", lambda forwards: (closed.append(forwards), close(forwards))[1])
    monkeypatch.setattr(runners, "HAND_OVER_SECONDS", 0.0)

    async with serving() as service:
        asked = asyncio.ensure_future(rank(service, 1, 4096))
        await asyncio.sleep(0)
        replaced = service.versions.current
        swapped = asyncio.ensure_future(service.swap(checkpoint_loader(DEMO, service.settings)))
        assert len(await asked) == 4096
        await swapped
        await asyncio.wait_for(replaced.closed, 5)
        assert len(closed) == 1


async def test_a_forwards_descriptor_is_let_go_once() -> None:
    """A second time, as when the process ends after a lost engine, its number may be a connection's."""
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    reader, writer = os.pipe()
    idle: Any = SimpleNamespace(closed=None, call=None, close=lambda: None)  # it computes nothing
    forwards = NativeForwards(idle, idle, reader, loop, time.monotonic)
    forwards.close()
    loop.add_reader(reader, heard.set)
    forwards.close()
    os.write(writer, b"x")
    await asyncio.wait_for(heard.wait(), 10)
    loop.remove_reader(reader)
    os.close(reader)
    os.close(writer)
