"""A ranker with a fake engine: who gets which scores or which error, and that no place in the queue leaks."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.errors import (
    DeadlineExceeded,
    Draining,
    EngineDown,
    NotReady,
    Overloaded,
)
from app.interface import Health, PlaceRequest
from app.queue.loading import LoadedModel
from app.queue.runners import Steps
from app.service.local import LocalService
from app.settings import Batching, Deadline, Queue
from model.engine import EngineError, Item, Outcome
from tests.support.fakes import FakeClock, FakeEngine, Gate, fake_model, fake_request, is_right
from tests.support.rankers import busy, create, figure, rank, running, until
from weights.format.reader import MappedFiles

pytestmark = pytest.mark.anyio


# scores


async def test_every_caller_gets_its_own_scores() -> None:
    engine = FakeEngine()
    async with running(engine) as ranker:
        found = await asyncio.gather(*(rank(ranker, user, 1 + user % 7) for user in range(1, 200)))
        assert all(is_right(each.scores, user) for user, each in enumerate(found, start=1))
        assert not is_right(found[0].scores, 2)  # the check can fail
        assert len(engine.forwards) < 199  # and they shared forwards
        assert figure(ranker, "ranker_queue_requests") == figure(ranker, "ranker_queue_candidates") == 0


async def test_a_long_list_is_cut_and_joined_in_order_with_one_state() -> None:
    clock, states = FakeClock(), list[Any]()

    def before(items: Sequence[Item]) -> None:
        states.extend(item.state for item in items)
        clock.advance(0.25)

    async with running(engine := FakeEngine(before=before), clock, batching=Batching(chunk_candidates=100)) as ranker:
        found = await rank(ranker, 3, 513)
        scores = found.scores
        assert is_right(scores, 3)
        assert len(scores) == 513
        assert engine.chunks == [[86], [86], [86], [85], [85], [85]]
        assert found.forward_seconds == 6 * 0.25
        await asyncio.sleep(0)  # figures keep no reply waiting
        counts = {"batch_requests_count": 6, "batch_candidates_sum": 513, "candidates_scored_total": 513}
        assert {name: figure(ranker, f"ranker_{name}") for name in counts} == counts
    assert states == [None] + ["state"] * 5


# failures


async def test_a_failing_batch_is_split_once_and_the_rest_get_scores() -> None:
    def fault(items: Sequence[Item]) -> None:
        if any(item.context.user_id == 13 for item in items):
            raise MemoryError("planted")

    async with busy(fault) as now:
        mates = [asyncio.create_task(rank(now.ranker, user)) for user in range(10, 20)]
        await asyncio.sleep(0.01)
        now.gate.opened.set()
        results = await asyncio.gather(*mates, return_exceptions=True)
        assert [10 + place for place, found in enumerate(results) if isinstance(found, EngineDown)] == [13]
        rest = [(user, found) for user, found in enumerate(results, 10) if user != 13]
        assert all(not isinstance(found, BaseException) and is_right(found.scores, user) for user, found in rest)
        assert figure(now.ranker, "ranker_forward_failures_total") == 2  # the batch, and the one to blame by itself
        assert now.ranker.health().ready


@pytest.mark.parametrize("fault", ["an outcome too few", "a candidate too few"])
async def test_wrong_outcomes_of_a_batch_are_computed_again_one_by_one(fault: str) -> None:
    class Short(FakeEngine):
        def forward(self, items: Sequence[Item]) -> list[Outcome]:
            outcomes = super().forward(items)
            if len(items) < 2:
                return outcomes
            *others, last = outcomes
            return others if "outcome" in fault else [*others, replace(last, scores=last.scores.rows(slice(0, 3)))]

    async with running(Short()) as ranker:
        found = await asyncio.gather(*(rank(ranker, user) for user in (1, 2)))
        assert [is_right(each.scores, user) for user, each in enumerate(found, 1)] == [True, True]


@pytest.mark.parametrize(
    "error",
    [EngineError("device lost", sticky=True), SystemExit("a thread's end")],
    ids=repr,
)
async def test_a_lost_engine_answers_everyone_and_is_fatal_once(error: BaseException) -> None:
    """An error after which it can compute nothing, or one that ends its thread."""
    told: list[str] = []

    def fault(items: object) -> None:
        raise error

    async with busy(fault) as now:
        now.ranker.on_fatal = told.append
        others = [asyncio.create_task(rank(now.ranker, user)) for user in range(2, 6)]
        await asyncio.sleep(0.01)
        now.gate.opened.set()
        results = await asyncio.gather(now.first, *others, return_exceptions=True)
        assert all(isinstance(found, EngineDown) for found in results)
        await until(lambda: bool(told))
        assert (now.ranker.health().ready, now.ranker.health().failed) == (False, True)
        assert now.ranker.health().reason == told[0]
        assert str(error) not in told[0]  # that is for the log
        with pytest.raises(EngineDown):
            now.ranker.check_open(None)
        assert await asyncio.to_thread(now.engine.closed.wait, 2)
    assert len(told) == 1


async def test_an_engine_that_cannot_be_closed_keeps_no_end_waiting() -> None:
    """As `empty_cache` raises on a device that is lost."""

    class Lost(FakeEngine):
        def forward(self, items: Sequence[Item]) -> list[Outcome]:
            raise EngineError("device lost", sticky=True)

        def close(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    async with running(Lost()) as ranker:
        with pytest.raises(EngineDown):
            await rank(ranker, 1)
        async with asyncio.timeout(5):
            await ranker.stop(30.0)


# callers who go, deadlines


async def test_a_caller_gone_between_chunks_is_computed_no_further() -> None:
    async with busy(candidates=8, batching=Batching(chunk_candidates=4)) as now:
        now.first.cancel()
        await asyncio.wait([now.first])
        now.gate.opened.set()
        assert is_right((await rank(now.ranker, 2)).scores, 2)
        assert now.engine.chunks == [[4], [4]]


async def test_a_caller_gone_after_a_split_is_not_computed() -> None:
    gate = Gate()

    def together_or_held(items: Sequence[Item]) -> None:
        if len(items) > 1:
            raise MemoryError("planted")
        gate(items)

    engine = FakeEngine(before=together_or_held)
    async with running(engine) as ranker:
        first, second, third = [asyncio.create_task(rank(ranker, user)) for user in (1, 2, 3)]
        await asyncio.to_thread(gate.entered.wait, 10)  # the first is tried by itself, and the others wait for that
        second.cancel()
        await asyncio.wait([second])
        gate.opened.set()
        assert is_right((await first).scores, 1)
        assert is_right((await third).scores, 3)
        assert engine.forwards == [[1], [3]]


async def test_each_request_ends_at_its_own_deadline_in_any_order() -> None:
    """Also one that is being computed. What has expired in the queue is never computed."""
    async with busy(deadline=Deadline(default_seconds=0.3)) as now:
        begun = now.ranker.clock()

        async def late(user: int, seconds: float) -> None:
            with pytest.raises(DeadlineExceeded):
                await rank(now.ranker, user, deadline=begun + seconds)
            assert now.ranker.clock() >= begun + seconds

        patient = asyncio.create_task(rank(now.ranker, 2, deadline=begun + 30))
        await asyncio.gather(late(3, 0.2), late(4, 0.05), late(5, 0.1))
        assert not now.first.done()
        with pytest.raises(DeadlineExceeded):
            await now.first
        assert not patient.done()
        now.gate.opened.set()
        assert is_right((await patient).scores, 2)
        assert now.engine.forwards == [[1], [2]]
        assert figure(now.ranker, "ranker_queue_requests") == 0


# admission


async def test_nothing_is_admitted_before_loading_or_while_draining() -> None:
    ranker = create()
    with pytest.raises(NotReady) as early:
        ranker.check_open(None)
    assert early.value.retry_after_seconds is not None
    with pytest.raises(NotReady):
        ranker.model()
    assert not ranker.health().ready
    ranker.start()
    await ranker.wait_ready()
    assert ranker.health().ready
    ranker.begin_drain()
    shutting = "The process is shutting down."
    assert ranker.health() == Health(ready=False, started=True, failed=False, draining=True, reason=shutting)
    assert is_right((await rank(ranker, 1)).scores, 1)  # still served during the delay
    model = ranker.model()
    assert await ranker.stop(1.0)
    for ask in (
        lambda: ranker.check_open(None),
        lambda: ranker.admit(model, PlaceRequest(1, 0, math.inf)),
    ):
        with pytest.raises(Draining) as late:
            ask()
        assert late.value.retry_after_seconds is not None
    assert figure(ranker, 'ranker_rejected_total{reason="draining"}') == 2


async def test_refusals_are_counted_by_their_reason() -> None:
    queue = Queue(max_candidates=100, key_candidates_per_second=60.0)
    async with busy(candidates=100, key="heavy", queue=queue, clock=FakeClock()) as now:

        def refused(reason: str) -> float:
            return figure(now.ranker, f'ranker_rejected_total{{reason="{reason}"}}')

        with pytest.raises(Overloaded, match="rate"):
            await rank(now.ranker, 2, 100, key="heavy")
        assert (refused("key_rate"), refused("queue_full")) == (1, 0)
        with pytest.raises(Overloaded, match="full"):
            now.ranker.check_open("light")
        with pytest.raises(DeadlineExceeded, match="on arrival"):
            await rank(now.ranker, 2, deadline=now.ranker.clock() - 1)
        counted = [refused(reason) for reason in ("key_rate", "queue_full", "deadline", "loop_overrun")]
        assert counted == [1, 1, 1, 0]
        now.gate.opened.set()
        await now.first
        now.ranker.check_open("light")


async def test_a_loop_that_falls_behind_refuses_early_and_recovers() -> None:
    """The engine has time; the turns of the loop are long, as where many callers send to a small model."""
    async with running(queue=Queue(max_wait_seconds=0.02)) as ranker:
        stop, waits = asyncio.Event(), list[float]()

        async def caller(user: int) -> None:
            while not stop.is_set():
                try:
                    ranker.check_open(None)
                    await rank(ranker, user, 1)
                except Overloaded as refused:
                    waits.append(refused.retry_after_seconds or 0.0)
                    await asyncio.sleep(0.05)
                ends = time.thread_time() + 0.001  # what reading a request and writing its reply take
                while time.thread_time() < ends:
                    pass

        callers = [asyncio.create_task(caller(user)) for user in range(1, 200)]
        await until(lambda: figure(ranker, 'ranker_rejected_total{reason="loop_overrun"}') > 0)
        stop.set()
        await asyncio.gather(*callers)
        assert min(waits) > 0
        ranker.check_open(None)


# life


async def test_readiness_says_what_the_loader_does() -> None:
    read, warm = threading.Event(), threading.Event()

    def load(path: Path, steps: Steps) -> LoadedModel:
        assert read.wait(10)
        steps.warming()
        assert warm.wait(10)
        return fake_model(FakeEngine())

    ranker = create(load=load)
    reasons = [ranker.health().reason]
    ranker.start()
    reasons.append(ranker.health().reason)
    read.set()
    await until(lambda: ranker.health().reason != reasons[-1])
    reasons.append(ranker.health().reason)
    warm.set()
    await ranker.wait_ready()
    assert [reason.split()[-1] for reason in reasons] == ["starting.", "loaded.", "up."]
    assert ranker.health().reason == ""
    await ranker.stop(1.0)
    assert ranker.health().reason == "The process has stopped."


async def test_a_checkpoint_that_fails_to_load_is_fatal_and_says_why() -> None:
    told: list[str] = []

    def load(path: Path, steps: Steps) -> LoadedModel:
        raise ValueError("tables.user.safetensors: digest differs")

    ranker = create(load=load)
    ranker.on_fatal = told.append
    ranker.start()
    with pytest.raises(ValueError, match="digest differs"):
        await ranker.wait_ready()
    assert "the log says why" in ranker.health().reason  # what is wrong may name a path
    assert not ranker.health().started  # so that the process ends with 1, and not as if an engine had been lost
    await ranker.stop(1.0)
    assert len(told) == 1


async def test_the_end_tells_those_who_wait_when_its_time_is_over() -> None:
    """It waits for them until then: tests/app/api/test_server.py."""
    async with busy() as now:
        queued = asyncio.create_task(rank(now.ranker, 2))
        await asyncio.sleep(0)
        stopped = asyncio.create_task(now.ranker.stop(0.05))
        for waiting in (now.first, queued):
            with pytest.raises(Draining):
                await waiting
        now.gate.opened.set()
        assert not await stopped


def is_refused(ranker: LocalService) -> bool:
    """Whether a request is told before it is read that the engine is down."""
    try:
        ranker.check_open(None)
    except EngineDown:
        return True
    return False


async def test_a_stall_is_seen_and_a_late_answer_reaches_nobody() -> None:
    async with busy(queue=Queue(stall_seconds=0.05), deadline=Deadline(default_seconds=0.1)) as now:
        assert now.ranker.health().ready
        await until(lambda: is_refused(now.ranker))  # however often it is asked
        assert "finished no forward" in now.ranker.health().reason
        assert now.ranker.health().failed
        assert figure(now.ranker, "ranker_stalled_seconds") > 0.05
        with pytest.raises(DeadlineExceeded):
            await now.first
        now.gate.opened.set()
        await until(lambda: now.ranker.health().ready)
        assert figure(now.ranker, "ranker_stalled_seconds") == 0
        assert is_right((await rank(now.ranker, 2)).scores, 2)


async def test_a_hang_answers_who_waits_and_is_fatal() -> None:
    told: list[str] = []
    async with busy(queue=Queue(stall_seconds=0.05, stall_exit_seconds=0.1)) as now:
        now.ranker.on_fatal = told.append
        queued = asyncio.create_task(rank(now.ranker, 2))
        for waiting in (now.first, queued):
            with pytest.raises(EngineDown, match="finished no forward"):
                await waiting
        assert len(told) == 1
        assert now.engine.forwards == []


async def test_after_a_failure_the_end_waits_a_second_for_the_engine() -> None:
    hold = threading.Event()

    class Hanging(FakeEngine):
        def forward(self, items: Sequence[Item]) -> list[Outcome]:
            raise EngineError("device lost", sticky=True)

        def close(self) -> None:
            hold.wait(20)
            super().close()

    engine = Hanging()
    ranker = create(engine)
    ranker.start()
    await ranker.wait_ready()
    with pytest.raises(EngineDown):
        await rank(ranker, 1)
    async with asyncio.timeout(10):
        await ranker.stop(30.0)
    assert not engine.closed.is_set()
    assert ranker.has_running_threads()
    hold.set()
    assert await asyncio.to_thread(engine.closed.wait, 5)


async def test_a_busy_engine_lets_the_batch_grow_for_the_window() -> None:
    async with busy(batching=Batching(window_seconds=0.5)) as now:
        second = asyncio.create_task(rank(now.ranker, 2))
        await asyncio.sleep(0.01)
        now.gate.opened.set()
        await now.first
        await asyncio.sleep(0.05)
        third = asyncio.create_task(rank(now.ranker, 3))
        assert is_right((await second).scores, 2)
        assert is_right((await third).scores, 3)
        assert now.engine.forwards == [[1], [2, 3]]


async def test_a_file_that_is_written_to_while_it_serves_answers_503(tmp_path: Path) -> None:
    """Also the request whose forward runs meanwhile: its scores may be of other numbers."""
    tables = tmp_path / "tables"
    tables.write_bytes(b"numbers")
    mapped, gate = MappedFiles(), Gate()
    with tables.open("rb", buffering=0) as file:
        mapped.add("tables", file, os.fstat(file.fileno()))
    made = fake_model(FakeEngine(before=gate))

    def load(path: Path, steps: Steps) -> LoadedModel:
        return LoadedModel(replace(made.checkpoint, mapped=mapped), made.engine)

    async with running(load=load) as ranker:
        asked = asyncio.create_task(rank(ranker, 1))
        await asyncio.to_thread(gate.entered.wait, 10)
        assert ranker.health().ready
        tables.write_bytes(b"other numbers")
        gate.opened.set()
        with pytest.raises(EngineDown):
            await asked
        assert "tables was written to" in ranker.health().reason
        await until(lambda: is_refused(ranker))


# attention


async def test_attention_is_computed_beside_the_engine() -> None:
    async with busy() as now:
        context, posts = fake_request(7, candidates=3, history=5)
        found = await now.ranker.attention(now.ranker.model(), context, posts, now.ranker.clock() + 20)
        assert found.shape == (1, 1, 3, 7)
        assert found.dtype == np.float32
        assert not now.first.done()
        with pytest.raises(DeadlineExceeded):
            await now.ranker.attention(now.ranker.model(), context, posts, now.ranker.clock() - 1)
        gone = fake_model(FakeEngine()).served
        with pytest.raises(NotReady):
            await now.ranker.attention(gone, context, posts, now.ranker.clock() + 20)


async def test_attention_that_fails_is_the_requests_own_error() -> None:
    class Faulty(LoadedModel):
        __slots__ = ()

        def attention(self, *_: Any) -> Any:
            raise RuntimeError("planted")

    made = fake_model(FakeEngine())

    async with running(load=lambda path, steps: Faulty(made.checkpoint, made.engine)) as ranker:
        with pytest.raises(EngineDown):
            await ranker.attention(ranker.model(), *fake_request(1), ranker.clock() + 20)
        assert is_right((await rank(ranker, 1)).scores, 1)
