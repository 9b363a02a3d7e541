"""The engine thread: what it does while it waits, how it ends, and what it says about its forwards."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.engine.loading import LoadedModel, Steps
from app.errors import DeadlineExceeded, EngineDown
from app.interface import Done, ranked
from app.settings import Batching
from model.engine import EngineError, Item, Outcome
from model.inputs import Scores
from tests.app.fakes import FakeClock, FakeEngine, Gate, busy, loaded, rank, request, right, running, until

pytestmark = pytest.mark.anyio


async def test_the_reply_says_how_long_the_request_queued_and_computed() -> None:
    clock = FakeClock()
    engine = FakeEngine(before=lambda items: clock.advance(0.25))
    async with running(engine, clock, batching=Batching(chunk_candidates=100)) as service:
        for candidates, forwards in ((4, 1), (200, 2)):
            ticket = service.admit(service.model, candidates=candidates, history=2, deadline=None)
            result = await ranked(service, ticket, *request(1, candidates))
            assert (result.queue_seconds, result.forward_seconds) == (0.0, 0.25 * forwards)


@pytest.mark.parametrize(
    "error",
    [EngineError("device lost", sticky=True), SystemExit("a thread's end"), KeyboardInterrupt("pressed")],
    ids=repr,
)
async def test_an_engine_that_is_lost_answers_everyone_and_is_fatal_once(error: BaseException) -> None:
    """An error after which it can compute nothing, or one that ends its thread."""
    told: list[str] = []

    def fault(items: object) -> None:
        raise error

    async with busy(fault) as (service, engine, gate, first):
        service.on_fatal = told.append
        others = [asyncio.ensure_future(rank(service, user)) for user in range(2, 6)]
        await asyncio.sleep(0.01)
        gate.opened.set()
        results = await asyncio.gather(first, *others, return_exceptions=True)
        assert all(isinstance(result, EngineDown) for result in results)
        assert not service.health().ready
        with pytest.raises(EngineDown):
            service.check_open()
        assert str(error) in service.health().reason
        assert await asyncio.to_thread(engine.closed.wait, 2)
    assert len(told) == 1


async def test_a_caller_that_cannot_be_told_keeps_no_mate_of_its_batch_waiting() -> None:
    def fault(result: object) -> None:
        raise asyncio.InvalidStateError

    async with busy() as (service, _, gate, first):
        ticket = service.admit(service.model, candidates=4, history=2, deadline=None)
        service.rank(ticket, *request(2), fault)
        mates = [asyncio.ensure_future(rank(service, user)) for user in (3, 4)]
        await asyncio.sleep(0)
        gate.opened.set()
        assert right(await first, 1)
        assert right(await mates[0], 3)
        assert right(await mates[1], 4)
        assert service.admission.requests == 0


async def test_each_is_told_when_its_own_deadline_has_passed_in_whatever_order_they_came() -> None:
    """Also one that is being computed. One timer serves all of them, and none is left behind."""
    async with busy() as (service, _, gate, first):
        assert service.versions.current is not None
        worker, begun = service.versions.current, service.clock()

        async def late(user: int, seconds: float) -> None:
            with pytest.raises(DeadlineExceeded):
                await rank(service, user, deadline=begun + seconds)
            assert service.clock() >= begun + seconds

        patient = asyncio.ensure_future(rank(service, 2))
        await asyncio.gather(late(3, 0.2), late(4, 0.05), late(5, 0.1))
        assert not first.done()
        assert not patient.done()
        worker._running[0].job.deadline = service.clock() + 0.05
        with pytest.raises(DeadlineExceeded):
            await rank(service, 6, deadline=service.clock() + 0.05)
        with pytest.raises(DeadlineExceeded):
            await first
        gate.opened.set()
        assert right(await patient, 2)
    assert worker._look is None


async def test_scores_that_cannot_be_joined_keep_no_mate_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scores.concatenate

    def join(parts: Sequence[Scores]) -> Scores:
        if sum(map(len, parts)) == 6:
            raise MemoryError
        return real(parts)

    monkeypatch.setattr(Scores, "concatenate", join)
    async with busy(batching=Batching(chunk_candidates=4)) as (service, _, gate, first):
        mates = [asyncio.ensure_future(rank(service, user, 6 if user == 2 else 4)) for user in (2, 3)]
        await asyncio.sleep(0)
        gate.opened.set()
        assert right(await first, 1)
        with pytest.raises(EngineDown):
            await mates[0]
        assert right(await mates[1], 3)


@pytest.mark.parametrize("fault", ["an outcome too few", "a candidate too few"])
async def test_an_engine_that_answers_for_others_than_it_was_asked_is_asked_for_each_alone(fault: str) -> None:
    class Short(FakeEngine):
        def forward(self, items: Sequence[Item]) -> list[Outcome]:
            outcomes = super().forward(items)
            if len(items) < 2:
                return outcomes
            *others, last = outcomes
            return others if "outcome" in fault else [*others, replace(last, scores=last.scores.rows(slice(0, 3)))]

    gate = Gate()
    async with running(Short(before=gate)) as service:
        tasks = [asyncio.ensure_future(rank(service, user)) for user in (1, 2)]
        gate.opened.set()
        assert [right(scores, user) for user, scores in enumerate(await asyncio.gather(*tasks), 1)] == [True, True]


async def test_a_forward_may_end_before_a_cancelled_task_has_released_its_ticket() -> None:
    """Cancelling takes one more turn of the loop."""
    told: list[Done] = []

    class Keeping:
        rank = staticmethod(lambda ticket, context, candidates, done: told.append(done))

    async with running(FakeEngine()) as service:
        ticket = service.admit(service.model, candidates=4, history=2, deadline=None)
        leaving = asyncio.ensure_future(ranked(Keeping, ticket, *request(2)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        leaving.cancel()
        told[0](EngineDown("as if its forward had ended"))
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert service.admission.requests == 0


async def test_an_engine_that_cannot_be_closed_has_ended_all_the_same() -> None:
    """As `empty_cache` raises on a device that is lost."""

    def fault(items: object) -> None:
        raise EngineError("device lost", sticky=True)

    def close() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    async with busy(fault) as (service, engine, gate, first):
        engine.close = close  # type: ignore[method-assign]
        worker = service.versions.current
        gate.opened.set()
        with pytest.raises(EngineDown):
            await first
        await asyncio.wait_for(worker.closed, 5)


async def test_a_busy_engine_lets_the_batch_grow_and_sleeps_meanwhile() -> None:
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += threading.current_thread().name == "engine"
        return time.monotonic()

    window = Batching(window_seconds=1.0)
    async with busy(clock=clock, batching=window) as (service, engine, gate, first):
        second = asyncio.ensure_future(rank(service, 2))
        await asyncio.sleep(0.01)
        gate.opened.set()
        await first
        await asyncio.sleep(0.1)
        third = asyncio.ensure_future(rank(service, 3))
        assert right(await second, 2)
        assert right(await third, 3)
        assert engine.forwards == [[1], [2, 3]]
        assert looks < 30  # a core that spins looks at the clock thousands of times


async def test_a_load_that_is_cancelled_frees_its_engine_when_it_is_there() -> None:
    begun, go_on = threading.Event(), threading.Event()
    late = FakeEngine(2)

    def load(steps: Steps) -> LoadedModel:
        begun.set()
        assert go_on.wait(10)
        return loaded(late, "v2")

    def engines() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "engine"}

    others = engines()  # of tests before, which may be slow to end
    async with running(FakeEngine()) as service:
        swap = asyncio.ensure_future(service.swap(load))
        await asyncio.to_thread(begun.wait, 10)
        swap.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swap
        go_on.set()
        assert await asyncio.to_thread(late.closed.wait, 5)
        await until(lambda: len(engines() - others) == 1)
        assert right(await rank(service, 1), 1)
