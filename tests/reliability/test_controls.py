"""Negative controls in process: with one guard taken out, the property it guards must break."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from app.engine.batching import Batcher, Chunk
from app.engine.job import RankJob
from app.engine.worker import Ended, Worker
from app.errors import DeadlineExceeded, EngineDown
from app.service.service import RankingService
from app.settings import Queue
from loadtest.soak.fake_engine import FakeEngine
from model.engine import Item
from tests.app.fakes import busy, rank, right, run, running, until


async def expire_in_the_queue() -> list[int]:
    """One request holds the engine, another's deadline passes behind it; the users that were computed."""
    async with busy() as (service, engine, gate, first):
        with pytest.raises(DeadlineExceeded):
            await rank(service, 2, deadline=service.clock() + 0.02)
        assert service.admission.requests == 1
        gate.opened.set()
        await first
        await rank(service, 3)
        return [user for forward in engine.forwards for user in forward]


def test_l3_the_queue_forgets_the_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(expire_in_the_queue()) == [1, 3]
    monkeypatch.setattr(Worker, "cancel", lambda worker, job: None)
    monkeypatch.setattr(Batcher, "take", _take_late(Batcher.take))
    assert 2 in run(expire_in_the_queue())


def _take_late(take: object) -> object:
    """A batcher that looks at no deadline."""

    def late(batcher: object, now: float) -> object:
        return take(batcher, -1e9)  # type: ignore[operator]

    return late


async def stall(queue: Queue) -> bool:
    """Whether the service still calls itself ready while its engine hangs."""
    async with busy(queue=queue) as (service, _, gate, waiting):
        await asyncio.sleep(0.15)
        ready = service.health().ready
        gate.opened.set()
        await waiting
        return ready


def test_f5_a_stall_costs_readiness() -> None:
    assert not run(stall(Queue(stall_seconds=0.1)))
    assert run(stall(Queue(stall_seconds=3600)))


def poisoned(items: Sequence[Item]) -> None:
    if any(item.context.user_id == 13 for item in items):
        raise MemoryError("planted")


async def poison() -> tuple[list[object], float | None]:
    """Requests 10 to 19 in one batch, of which 13 raises: what each got, and how many forwards failed."""
    async with busy(poisoned) as (service, _, gate, first):
        tasks = [asyncio.ensure_future(rank(service, user)) for user in range(10, 20)]
        await asyncio.sleep(0.01)
        gate.opened.set()
        assert right(await first, 1)
        results = list(await asyncio.gather(*tasks, return_exceptions=True))
        assert service.health().ready
        return results, service.metrics.registry.get_sample_value("ranker_forward_failures_total")


def test_f6_only_the_guilty_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, failures = run(poison())
    assert failures == 2  # the batch, and the request that is to blame
    results = dict(zip(range(10, 20), answers, strict=True))
    assert isinstance(results.pop(13), EngineDown)
    assert all(right(scores, user) for user, scores in results.items())
    monkeypatch.setattr(Worker, "_failed", _unsplit)
    assert len([result for result in run(poison())[0] if isinstance(result, EngineDown)]) == 10


def _unsplit(worker: Worker[RankJob], chunks: Sequence[Chunk[RankJob]], error: BaseException) -> list[Ended[RankJob]]:
    """A worker that blames the whole batch."""
    return [(chunk.job, EngineDown()) for chunk in chunks]


class Vanishing(RuleBasedStateMachine):
    """F7: clients come, wait, vanish and return in any order; whoever waits is answered rightly, and nothing is left over."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.context = running(FakeEngine())
        self.service: RankingService = self.loop.run_until_complete(self.context.__aenter__())
        self.tasks: dict[int, asyncio.Task[object]] = {}
        self.users = 0

    @rule(candidates=st.sampled_from([1, 3, 600]))
    def come(self, candidates: int) -> None:
        self.users += 1
        self.tasks[self.users] = self.loop.create_task(rank(self.service, self.users, candidates))  # type: ignore[arg-type]

    @rule(turns=st.integers(1, 5))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.run_until_complete(asyncio.sleep(0))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        self.tasks.pop(data.draw(st.sampled_from(sorted(self.tasks)))).cancel()

    @rule()
    def drop_a_ticket(self) -> None:
        self.service.admit(self.service.model, candidates=1, history=0, deadline=None)

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return

        async def finish() -> None:
            for user, task in self.tasks.items():
                assert right(await task, user)  # type: ignore[arg-type]
            await until(lambda: self.service.admission.requests == 0)
            assert self.service.admission.cost == 0
            await self.context.__aexit__(None, None, None)

        self.loop.run_until_complete(finish())
        self.loop.close()


TestVanishing = Vanishing.TestCase
TestVanishing.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


def test_f7_a_place_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        async with running(FakeEngine()) as service:
            waiting = asyncio.ensure_future(rank(service, 1))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            return service.admission.requests

    assert run(main()) == 0
    monkeypatch.setattr(RankJob, "release", lambda ticket: None)
    monkeypatch.setattr(RankJob, "__del__", lambda ticket: None)
    monkeypatch.setattr(RankingService, "stop", _stop_without_waiting(RankingService.stop))
    assert run(main()) == 1


def _stop_without_waiting(stop: object) -> object:
    async def at_once(service: RankingService, timeout_seconds: float = 0.0) -> object:
        return await stop(service, 0.01)  # type: ignore[operator]

    return at_once
