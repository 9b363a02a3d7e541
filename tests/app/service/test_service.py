"""The service with a fake engine: who is answered with what, and that nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from app.assembly import build_server
from app.engine.loading import LoadedModel, Steps, checkpoint_loader
from app.errors import DeadlineExceeded, Draining, EngineDown, InvalidRequest, NonFiniteScores, NotReady, Overloaded
from app.exits import EXIT_ENGINE_LOST
from app.interface import Found, Health, ranked
from app.loop_lag import LoopLag, Work
from app.request.body import decode
from app.request.validate import check
from app.service.service import RankingService
from app.service.watchdog import COLLECT_OBJECTS, collect_garbage
from app.settings import Batching, Deadline, Limits, Queue, Settings
from app.telemetry.metrics import Metrics
from loadtest.machine import ROOT
from model.engine import EngineError
from model.native.engine import NativeEngine
from model.retrieval.inputs import Filters, Mark, Query
from model.synthetic import random_request
from tests.app import retrieving
from tests.app.bounds import overrun
from tests.app.fakes import (
    FakeEngine,
    Gate,
    busy,
    ended,
    loaded,
    loader,
    rank,
    ready,
    request,
    right,
    running,
    running_on,
    until,
)
from tests.app.request.test_cost import HOSTILE
from tests.app.serving import VOCABULARY, value_of
from tests.zygote import zygote

pytestmark = pytest.mark.anyio


async def test_each_chunk_is_counted_as_it_was_computed() -> None:
    async with running(FakeEngine(), batching=Batching(chunk_candidates=30)) as service:
        for user in range(1, 4):
            assert right(await rank(service, user, 60), user)
        said = service.metrics.render().decode()
        counts = {
            "batch_requests_count": 6,
            "batch_candidates_sum": 180,
            "batch_candidates_count": 6,
        }
        assert {name: value_of(said, f"ranker_{name}") for name in counts} == counts


async def test_every_caller_gets_its_own_scores() -> None:
    engine = FakeEngine()
    async with running(engine) as service:
        scores = await asyncio.gather(*(rank(service, user, 1 + user % 7) for user in range(1, 200)))
        assert all(right(found, user) for user, found in enumerate(scores, start=1))
        assert not right(scores[0], 2)  # the check can fail
        assert len(engine.forwards) < 199  # and they shared forwards
        assert service.admission.requests == service.admission.cost == 0


async def test_a_long_list_is_cut_and_joined_in_order_with_the_state_passed_on() -> None:
    states = []
    engine = FakeEngine(before=lambda items: states.extend(item.state for item in items))
    async with running(engine, batching=Batching(chunk_candidates=100)) as service:
        scores = await rank(service, 3, 513)
        assert right(scores, 3)
        assert len(scores) == 513
        assert engine.chunks == [[86], [86], [86], [85], [85], [85]]
    assert states == [None] + ["state"] * 5


async def test_nothing_is_admitted_before_loading_nor_after_draining_and_each_says_when_to_come_back() -> None:
    service = RankingService(loader(FakeEngine()), Settings(), Metrics())
    with pytest.raises(NotReady) as early:
        service.check_open()
    assert early.value.retry_after_seconds is not None
    with pytest.raises(NotReady):
        _ = service.model
    assert not service.health().ready
    service.start()
    await service.wait_ready()
    assert service.health().ready
    service.begin_drain()
    assert service.health() == Health(
        ready=False, started=True, failed=False, draining=True, reason="The process is shutting down."
    )
    assert right(await rank(service, 1), 1)  # still served during the delay
    service.refuse_new()
    for ask in (service.check_open, lambda: service.admit(service.model, candidates=1, history=0, deadline=None)):
        with pytest.raises(Draining) as late:
            ask()
        assert late.value.retry_after_seconds is not None
    assert value_of(service.metrics.render().decode(), 'ranker_rejected_total{reason="draining"}') == 2
    assert await service.stop(1.0)


async def test_a_checkpoint_that_cannot_be_loaded_is_fatal_and_says_why() -> None:
    told: list[str] = []

    def load(steps: object) -> LoadedModel:
        raise ValueError("tables.user.safetensors: digest differs")

    service = RankingService(load, Settings(), Metrics())
    service.on_fatal = told.append
    service.start()
    with pytest.raises(ValueError, match="digest differs"):
        await service.wait_ready()
    assert "digest differs" in service.health().reason
    await service.stop(1.0)
    assert len(told) == 1


async def test_readiness_says_what_the_loader_does() -> None:
    read, warm = threading.Event(), threading.Event()

    def load(steps: Steps) -> LoadedModel:
        assert read.wait(10)
        steps.warming()
        assert warm.wait(10)
        return loaded(FakeEngine())

    service = RankingService(load, Settings(), Metrics())
    reasons = [service.health().reason]
    service.start()
    reasons.append(service.health().reason)
    read.set()
    await until(lambda: service.health().reason != reasons[-1])
    reasons.append(service.health().reason)
    warm.set()
    await service.wait_ready()
    assert [reason.split()[-1] for reason in reasons] == ["starting.", "loaded.", "up."]
    assert service.health().reason == ""
    await service.stop(1.0)


async def test_a_load_that_fails_during_a_drain_exits_with_1_and_was_never_started() -> None:
    drained = threading.Event()

    def load(steps: object) -> LoadedModel:
        assert drained.wait(10)
        raise ValueError("digest differs")

    service = RankingService(load, Settings(), Metrics())
    server = build_server(Settings(), service)
    service.start()
    service.begin_drain()
    assert not service.health().started  # what /startupz answers
    drained.set()
    with pytest.raises(ValueError, match="digest"):
        await service.wait_ready()
    assert server.exit_code == 1  # and not as if an engine had been lost
    await service.stop(1.0)


async def test_refusals_are_counted_by_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(max_candidates=100, key_candidates_per_second=60.0)
    async with busy(candidates=100, key="heavy", queue=queue) as (service, _, gate, first):

        def refused(reason: str) -> float:
            return value_of(service.metrics.render().decode(), f'ranker_rejected_total{{reason="{reason}"}}')

        with pytest.raises(Overloaded, match="rate"):
            await rank(service, 2, 100, key="heavy")
        assert (refused("key_rate"), refused("queue_full")) == (1, 0)
        with pytest.raises(Overloaded, match="full"):
            service.check_open("light")
        assert (refused("key_rate"), refused("queue_full"), refused("loop_overrun")) == (1, 1, 0)
        gate.opened.set()
        await first
        service.check_open("light")
        overrun(monkeypatch)
        monkeypatch.setattr(LoopLag, "refuses", lambda lag, unanswered: unanswered > 0)
        service.check_open()
        ticket = service.admit(service.model, candidates=1, history=0, deadline=None)
        with pytest.raises(Overloaded, match="faster than they can be answered") as caught:
            service.check_open()
        assert caught.value.retry_after_seconds == 1.0
        assert (refused("queue_full"), refused("loop_overrun")) == (1, 1)
        ticket.release()
        service.check_open()


async def test_the_clock_of_the_loop_hears_of_answers_and_of_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Work] = []
    monkeypatch.setattr(LoopLag, "tick", lambda lag, now, work: heard.append(work))
    async with busy(candidates=100, queue=Queue(max_candidates=100)) as (service, _, gate, first):
        for _ in range(3):
            with pytest.raises(Overloaded):
                service.admit(service.model, candidates=1, history=0, deadline=None)
        with pytest.raises(Overloaded):
            service.check_open()
        await until(lambda: bool(heard) and heard[-1][1:] == (0, 4, 1))
        gate.opened.set()
        await first
        service.check_open()
        await until(lambda: heard[-1][1:] == (1, 4, 0))


HANGS = """
import asyncio, time
from app.service import service, watchdog
from app.settings import Queue, Settings
from app.telemetry.metrics import Metrics
from loadtest.soak.fake_engine import FakeEngine, loader

async def main():
    ranking = service.RankingService(loader(FakeEngine()), Settings(queue=Queue(stall_seconds=0.1, stall_exit_seconds=0.5)), Metrics())
    ranking.watchdog.watch_loop()
    ranking.start()
    await ranking.wait_ready()
    await asyncio.sleep(0.2)
    time.sleep({})
    await asyncio.sleep(0.2)

watchdog.WATCHDOG_SECONDS = 0.05
asyncio.run(main())
"""


@pytest.mark.parametrize(("seconds", "code"), [(20.0, EXIT_ENGINE_LOST), (0.0, 0)])
async def test_a_process_whose_event_loop_hangs_ends_and_says_so(seconds: float, code: int) -> None:
    ended = await asyncio.to_thread(zygote.run, [sys.executable, "-c", HANGS.format(seconds)])
    assert ended.returncode == code, ended.stderr
    assert ("The event loop has hung" in ended.stdout + ended.stderr) == (code != 0)


async def test_a_heavy_key_does_not_close_the_door_to_a_light_one() -> None:
    gate = Gate()
    groups = {"queue": Queue(max_wait_seconds=0.5, max_share_per_key=1.0), "batching": Batching(max_candidates=10)}
    async with running(FakeEngine(before=gate), **groups) as service:
        service.admission.forward_time.observe(10, 0.15)
        jobs = [asyncio.ensure_future(rank(service, user, 10, key="heavy")) for user in range(1, 5)]
        await gate.reached()
        service.check_open("heavy")  # nobody was refused yet, so nobody is looked at
        for refused in (
            lambda: service.admit(service.model, candidates=10, history=2, deadline=None, key="heavy"),
            lambda: service.check_open("heavy"),
        ):
            with pytest.raises(Overloaded, match="predicted wait"):
                refused()
        service.check_open("light")
        gate.opened.set()
        await asyncio.gather(*jobs)


async def test_the_queue_is_bounded_in_work_and_says_when_to_come_back() -> None:
    queue = Queue(max_candidates=100, max_wait_seconds=0)
    async with busy(candidates=60, queue=queue) as (service, _, gate, first):
        second = asyncio.ensure_future(rank(service, 2, 40))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            service.admit(service.model, candidates=1, history=0, deadline=None)
        assert refused.value.retry_after_seconds is not None
        assert refused.value.retry_after_seconds > 0
        with pytest.raises(Overloaded):
            service.check_open()
        gate.opened.set()
        assert right(await first, 1)
        assert right(await second, 2)
        service.check_open()


async def test_a_client_that_goes_away_in_the_queue_is_never_computed_and_leaves_no_trace() -> None:
    async with busy() as (service, engine, gate, first):
        gone = [asyncio.ensure_future(rank(service, user)) for user in range(2, 50)]
        await asyncio.sleep(0.01)
        for task in (first, *gone[::2]):
            task.cancel()
        await asyncio.wait([first, *gone[::2]])
        gate.opened.set()
        results = await asyncio.gather(first, *gone, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(right(found, user) for user, found in zip(range(3, 50, 2), results[2::2], strict=True))
        assert not set(range(2, 50, 2)) & set(chain.from_iterable(engine.forwards))
        assert service.admission.requests == service.admission.cost == 0
        assert len(service.versions.current.batcher) == 0


async def test_a_ticket_that_is_dropped_or_released_frees_its_place() -> None:
    async with running(FakeEngine()) as service:
        ticket = service.admit(service.model, candidates=5, history=2, deadline=None)
        assert service.admission.requests == 1
        del ticket
        assert service.admission.requests == 0
        ticket = service.admit(service.model, candidates=5, history=2, deadline=None)
        assert service.admission.candidates == 5
        ticket.release()
        ticket.release()
        assert service.admission.requests == service.admission.cost == 0
        with pytest.raises(ValueError, match="used before"):
            await ranked(service, ticket, *request(1))


async def test_non_finite_scores_fail_that_request_only() -> None:
    class Nan(FakeEngine):
        def forward(self, items):  # type: ignore[no-untyped-def]
            outcomes = super().forward(items)
            for item, outcome in zip(items, outcomes, strict=True):
                if item.context.user_id == 2:
                    outcome.scores.logits[0, 0] = float("nan")
            return outcomes

    async with running(Nan()) as service:
        one, two, three = await asyncio.gather(*(rank(service, u) for u in (1, 2, 3)), return_exceptions=True)
        assert right(one, 1)
        assert isinstance(two, NonFiniteScores)
        assert right(three, 3)


async def test_a_swap_finishes_the_old_requests_on_the_old_model_and_frees_it() -> None:
    gate = Gate()
    old, new = FakeEngine(1, before=gate), FakeEngine(2)
    async with running(old) as service:
        first = service.model
        early = [asyncio.ensure_future(rank(service, user)) for user in (1, 2, 3)]
        await gate.reached()
        late_ticket = service.admit(first, candidates=4, history=2, deadline=None)  # features made for the old one
        await service.swap(loader(new, "v2"))
        assert service.model.manifest.version == "v2"
        assert right(await rank(service, 4), 4, version=2)
        gate.opened.set()
        assert all(right(scores, user, 1) for user, scores in enumerate(await asyncio.gather(*early), start=1))
        assert not old.closed.is_set()
        context, posts = request(5)
        assert right((await ranked(service, late_ticket, context, posts)).scores, 5, 1)
        assert await asyncio.to_thread(old.closed.wait, 2)
        with pytest.raises(NotReady):
            service.admit(first, candidates=1, history=0, deadline=None)
        assert service.versions.cache_stats().misses == 5  # totals of the old one are kept


@pytest.mark.usefixtures("no_collector")
async def test_a_native_engine_that_has_computed_goes_at_once() -> None:
    settings = Settings(checkpoint=ROOT / "weights/demo", device="cpu", backend="native")
    load = checkpoint_loader(settings.checkpoint, settings)
    async with running_on(load) as service:
        worker = service.versions.current
        assert isinstance(worker.model.engine, NativeEngine)
        old, model = weakref.ref(worker.model.engine), service.model
        del worker
        context, candidates = random_request(model.manifest.config, 5, 64)
        ticket = service.admit(model, candidates=64, history=5, deadline=None)
        assert (await ranked(service, ticket, context, candidates)).scores.is_finite()
        del model, ticket
        assert old() is not None
        await service.swap(load)
        await until(lambda: old() is None)


@pytest.mark.usefixtures("no_collector")
async def test_a_failed_swap_leaves_the_old_model_serving_and_nothing_of_the_new_one() -> None:
    made: list[weakref.ref[FakeEngine]] = []

    def load(steps: object) -> LoadedModel:
        engine = FakeEngine()
        made.append(weakref.ref(engine))
        try:
            engine.warm_up()
            raise MemoryError
        except MemoryError as error:
            raise EngineError("self-test failed") from error

    async with running(FakeEngine()) as service:
        with pytest.raises(EngineError, match="self-test failed"):
            await service.swap(load)
        await until(lambda: made[0]() is None)
        assert right(await rank(service, 1), 1)
        assert service.model.manifest.version == "v1"


async def test_a_stall_is_seen_and_a_late_answer_reaches_nobody() -> None:
    groups = {"queue": Queue(stall_seconds=0.05), "deadline": Deadline(default_seconds=0.1)}
    async with busy(**groups) as (service, _, gate, lost):
        assert service.health().ready
        with pytest.raises(DeadlineExceeded):
            await lost
        assert "finished no forward" in service.health().reason
        with pytest.raises(EngineDown):
            service.check_open()
        gate.opened.set()
        await until(lambda: service.health().ready)
        assert right(await rank(service, 2), 2)


async def test_a_stall_is_seen_however_often_requests_come() -> None:
    async with busy(queue=Queue(stall_seconds=0.05)) as (service, _, gate, lost):

        def is_refused() -> bool:
            with suppress(EngineDown):
                service.check_open()
                return False
            return True

        await until(is_refused)
        gate.opened.set()
        await lost


async def test_after_a_failure_the_end_waits_a_second_for_the_engine_and_no_longer() -> None:
    for close_seconds, is_freed in ((0.4, True), (20.0, False)):
        engine = FakeEngine()
        closed, hold = engine.close, threading.Event()
        engine.close = lambda hold=hold, seconds=close_seconds, closed=closed: (hold.wait(seconds), closed())  # type: ignore[method-assign,misc]
        service = await ready(loader(engine))
        service.engine_lost("planted")
        async with asyncio.timeout(10):
            await service.stop(30.0)
        assert engine.closed.is_set() is is_freed
        hold.set()


async def test_a_search_that_is_not_finished_at_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.runners.SHORT_SEARCH_SECONDS", 0.0)
    load = retrieving.loader(tmp_path)
    for seconds, finished in ((0.05, False), (10.0, True)):
        gate = Gate()
        service = await ready(loader(FakeEngine()), retrieval=load)
        engine = service.retrieval._loaded.engine
        search = engine.retrieve
        vars(engine)["retrieve"] = lambda *asked, gate=gate, search=search: (gate(asked), search(*asked))[1]
        asked = Query(request(7, history=0)[0], 5, Filters(np.empty(0, np.uint64)))
        waits = asyncio.ensure_future(
            ended(service.retrieval.retrieve, service.retrieval.served, asked, service.clock() + 60, None)
        )
        await gate.reached()
        asyncio.get_running_loop().call_later(0.5, gate.opened.set)
        assert await service.stop(seconds) is finished
        assert isinstance((await asyncio.gather(waits, return_exceptions=True))[0], Found) is finished


async def test_no_body_begins_a_garbage_collection_and_cycles_are_collected_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.service.watchdog.WATCHDOG_SECONDS", 0.01)
    body = HOSTILE["nested objects as candidates"].body(2**20)
    begun: list[str] = []
    gc.callbacks.append(lambda phase, info: begun.append(phase))
    gc.unfreeze()
    of_the_load = weakref.ref(Cycle())
    try:
        async with running(FakeEngine()) as service:
            assert of_the_load() is None
            assert gc.get_freeze_count() > 10_000, "no collection walks over code and weights"
            for _ in range(20):
                begun.clear()
                with pytest.raises(InvalidRequest):
                    check(decode(body, Limits(max_candidates=10_000)), VOCABULARY)
                assert begun == []
            cycles = [weakref.ref(Cycle()) for _ in range(COLLECT_OBJECTS)]
            await until(lambda: not any(cycle() for cycle in cycles))
            assert service.health().ready
        assert gc.isenabled()
        with pytest.raises(InvalidRequest):
            check(decode(body, Limits(max_candidates=10_000)), VOCABULARY)
        assert begun  # the check can fail
    finally:
        gc.callbacks.pop()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(("silences", "told"), [([60.0, 0.0], 0), ([60.0, 60.5], 1)])
async def test_a_process_that_was_stopped_for_a_while_is_not_stuck(
    silences: list[float], told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks once before it hears what has ended meanwhile."""
    monkeypatch.setattr("app.service.watchdog.WATCHDOG_SECONDS", 0.001)
    lost: list[str] = []
    async with running(FakeEngine()) as service:
        service.on_fatal = lost.append
        looks, after = iter(silences), threading.Event()

        def silent_seconds() -> float:
            found = next(looks, None)
            after.set() if found is None else None
            return found or 0.0

        monkeypatch.setattr(service.versions, "silent_seconds", silent_seconds)
        await until(lambda: after.is_set() or bool(lost))
        assert len(lost) == told


async def test_a_scrape_says_how_far_searches_and_changes_of_posts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"search_queue_requests": 7, 'corpus_check{at="milestone"}': 8_000_000_010, "feed_lag_seconds": 2.5}
    async with running(FakeEngine()) as service:
        for expected in (dict.fromkeys(figures, 0.0), figures):
            said = service.metrics.render().decode()
            assert {name: value_of(said, f"ranker_{name}") for name in figures} == expected
            monkeypatch.setattr(type(service.retrieval.versions), "waiting", 7)
            service.retrieval.milestone = Mark(8, "00000000000a" + "f" * 20)
            service.retrieval.feed = SimpleNamespace(lag_seconds=2.5, reason="", problem="")  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("counts", "collected"),
    [((0, 0, 0), []), ((1, 11, 11), [2]), ((1, 10, 11), [2]), ((1, 11, 10), [1]), ((1, 10, 10), [0])],
)
def test_an_older_generation_is_collected_after_every_tenth_of_the_one_before(
    counts: tuple[int, int, int], collected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(gc, "get_count", lambda: (COLLECT_OBJECTS + counts[0], *counts[1:]))
    monkeypatch.setattr(gc, "collect", found.append)
    collect_garbage()
    assert found == collected
