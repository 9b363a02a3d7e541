"""What the service tells with a refusal, what it counts, and what it leaves behind at its end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from app.engine.loading import NICE, LoadedModel
from app.errors import DeadlineExceeded, Draining, EngineDown, Overloaded, ServiceError
from app.interface import ranked
from app.load import HALF_LIFE_SECONDS
from app.service import watchdog
from app.service.lifecycle import State
from app.service.plain_path import PLAIN_THREAD, PlainPath
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Queue, Settings, Shadow, Split
from app.telemetry.exposition import add_stats
from app.telemetry.metrics import Metrics
from model.engine import CacheStats
from model.retrieval.inputs import Filters, Query
from tests.app import retrieving
from tests.app.fakes import (
    FakeClock,
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
    until,
)  # fmt: skip
from tests.app.serving import value_of
from weights.errors import CheckpointError

pytestmark = pytest.mark.anyio
NO_IDS = np.empty(0, np.uint64)


def refused(service: RankingService, reason: str) -> float:
    return value_of(service.metrics.render().decode(), f'ranker_rejected_total{{reason="{reason}"}}')


async def test_the_load_of_a_service_is_what_its_engine_and_its_queue_do() -> None:
    clock = FakeClock()
    service = RankingService(loader(FakeEngine()), Settings(), Metrics(), clock=clock)
    service.load.look()
    service.metrics.busy_seconds += 3.0
    clock.advance(4.0)
    service.load.look()
    assert service.load._engine / (1 - 0.5 ** (4.0 / HALF_LIFE_SECONDS)) == pytest.approx(0.75)
    assert service.load._wait == service.admission.behind_seconds() == 0


# refusals


async def test_who_waits_for_room_is_not_counted_as_refused() -> None:
    async with busy(queue=Queue(max_requests=1, max_wait_seconds=0)) as (service, _, gate, first):
        for waits, counted in ((True, 0), (False, 1)):
            with pytest.raises(Overloaded):
                service.admit(service.model, candidates=1, history=0, deadline=None, waits=waits)
            assert refused(service, "queue_full") == counted
        gate.opened.set()
        await first


async def test_a_ticket_shrinks_before_it_is_used_and_to_something() -> None:
    async with busy() as (service, _, gate, first):
        before = service.admission.candidates
        ticket = service.admit(service.model, candidates=9, history=2, deadline=None)
        service.shrink(ticket, 4)
        assert service.admission.candidates == before + 4
        for wrong in (0, 5):
            with pytest.raises(ValueError, match="ticket"):
                service.shrink(ticket, wrong)
        gate.opened.set()
        assert right((await ranked(service, ticket, *request(2, 4))).scores, 2)
        with pytest.raises(ValueError, match="ticket"):
            service.shrink(ticket, 1)
        await first


async def test_a_failure_answers_searches_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.engine.runners.SHORT_SEARCH_SECONDS", 0.0)
    held = Gate()
    fake = FakeEngine(before=held)
    service = await ready(loader(fake), retrieval=retrieving.loader(tmp_path))
    gate, engine = Gate(), service.retrieval._loaded.engine
    search = engine.retrieve
    vars(engine)["retrieve"] = lambda *asked: (gate(asked), search(*asked))[1]
    asked = Query(request(7, history=0)[0], 5, Filters(np.array([3, 4], np.uint64)))
    waits = asyncio.ensure_future(
        ended(service.retrieval.retrieve, service.retrieval.served, asked, service.clock() + 60, None)
    )
    await gate.reached()
    assert service.retrieval.excluded.used == 2
    assert value_of(service.metrics.render().decode(), "ranker_corpus_posts") == service.retrieval._loaded.engine.posts
    ranking = asyncio.ensure_future(rank(service, 1, deadline=service.clock() + 60))
    await until(lambda: service.admission.requests == 1)
    service.engine_lost("planted")
    for waiting in (waits, ranking):
        with pytest.raises(EngineDown, match="planted") as lost:
            await waiting
        assert lost.value.retry_after_seconds is not None
    assert service.retrieval.excluded.used == 0
    for each in (gate, held):
        each.opened.set()
    await service.stop(5.0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("retrieval-slow")]


# the end


async def test_the_end_refuses_waits_and_answers_the_rest() -> None:
    for seconds, finished in ((10.0, True), (0.05, False)):
        gate = Gate()
        service = await ready(loader(FakeEngine(before=gate)))
        first = asyncio.ensure_future(rank(service, 1))
        await gate.reached()
        stopping = asyncio.ensure_future(service.stop(seconds))
        await asyncio.sleep(0.01)
        assert service.health().draining
        with pytest.raises(Draining):
            service.check_open()
        began = time.monotonic()
        if finished:
            asyncio.get_running_loop().call_later(0.3, gate.opened.set)
            assert right(await first, 1)
        else:
            with pytest.raises(ServiceError) as unfinished:
                await asyncio.wait_for(first, 0.2)
            assert unfinished.value.retry_after_seconds == 5.0
        assert await stopping is finished
        assert time.monotonic() - began < 1.0, "it waits for no thread"
        assert service.lifecycle.state is State.STOPPED
        gate.opened.set()


async def test_explanations_that_wait_end_with_the_service() -> None:
    service, gate, begun = RankingService(loader(FakeEngine()), Settings(), Metrics()), Gate(), []
    plain = service.plain_path
    own = plain._executor.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(5)
    assert own == NICE, "it stands back"
    first = plain._executor.submit(gate, None)
    later = plain._executor.submit(begun.append, 1)
    await gate.reached()
    assert [thread for thread in threading.enumerate() if thread.name.startswith(PLAIN_THREAD)]
    assert service.has_running_threads(), "the end of the process does not wait for it"
    with pytest.raises(DeadlineExceeded):
        await plain.attention(loaded(FakeEngine()), *request(1), 0.05)
    plain.stop()
    gate.opened.set()
    first.result(5)
    assert later.cancelled()
    assert begun == []
    with pytest.raises(RuntimeError, match="shutdown"):
        plain._executor.submit(begun.append, 1)


@pytest.mark.parametrize("fault", ["changed", "memory"])
async def test_an_explanation_that_cannot_be_computed_says_when_to_come_back(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(*asked: Any) -> Any:
        if fault == "memory":
            raise MemoryError
        return "found"

    monkeypatch.setattr("app.service.plain_path.candidate_attention", attention)
    model, plain = loaded(FakeEngine()), PlainPath()
    monkeypatch.setattr(LoadedModel, "changed_file", lambda self: "A file has changed." if fault == "changed" else "")
    with pytest.raises(EngineDown) as caught:
        await plain.attention(model, *request(1), 10.0)
    assert caught.value.retry_after_seconds == 1.0
    monkeypatch.setattr(LoadedModel, "changed_file", lambda self: "")
    if fault == "changed":  # the negative control
        assert await plain.attention(model, *request(1), 10.0) == "found"
    plain.stop()


async def test_a_loop_that_turns_is_not_taken_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches counts the loop's turns; without them it would end this process."""
    ends: list[int] = []
    monkeypatch.setattr(watchdog, "WATCHDOG_SECONDS", 0.02)
    monkeypatch.setattr("app.service.watchdog.os._exit", ends.append)
    async with running(FakeEngine(), queue=Queue(stall_seconds=0.05, stall_exit_seconds=0.1)) as service:
        service.watchdog.watch_loop()
        assert "loop-watch" in {thread.name for thread in threading.enumerate()}
        await asyncio.sleep(0.5)
        assert ends == []
        for task in service._tasks:
            task.cancel()
        await until(lambda: service.watchdog._looks is None)  # nobody counts turns any more: that is no hang
        await asyncio.sleep(0.2)
        assert ends == []
        service.watchdog._looks = 7  # it stands still from now on, as far as the thread can see
        drained, sink = [], watchdog.logs.process_sink()
        monkeypatch.setattr(sink, "drain", lambda: drained.append(True))
        await until(lambda: len(ends) > 0)
        assert drained, "the line that says so is written before the process ends"


# the second checkpoint

GROUPS = {"shadow": Shadow(checkpoint=Path("second"), share=1.0), "split": Split(users=0.5)}


async def test_without_a_second_checkpoint_nothing_is_asked_of_it() -> None:
    async with running(FakeEngine()) as service:
        second = service.second_checkpoint
        await second.load()
        second.engine_lost("planted")
        assert (service.second, second.failure) == (None, second.failure)
        assert "planted" not in second.failure
        second.soon()
        assert right(await rank(service, 1), 1)


async def test_both_checkpoints_count_where_both_answer() -> None:
    gates = Gate(), Gate()
    load = loader(FakeEngine(2, before=gates[1]), "v2")
    service = await ready(loader(FakeEngine(before=gates[0])), Settings(**GROUPS), second=load)  # type: ignore[arg-type]
    await until(lambda: service.second is not None and service.second.model is not None)
    second = service.second
    assert second.model is not None
    waits = []
    for model, user, count in ((service.model, 1, 4), (second.model, 2, 7)):
        ticket = service.admit(model, candidates=count, history=2, deadline=None)
        waits.append(asyncio.ensure_future(ranked(service, ticket, *request(user, count))))
    for gate in gates:
        await gate.reached()
    now = service.second_checkpoint.running()
    assert (now.requests, now.candidates, now.context_tokens) == (2, 11, 6)
    first, other = CacheStats(hits=1, misses=2, bytes=3), CacheStats(hits=10, misses=20, bytes=30)
    service.versions.cache_stats = lambda: first  # type: ignore[method-assign]
    service.second_checkpoint.versions.cache_stats = lambda: other  # type: ignore[method-assign]
    assert service.second_checkpoint.cache_stats() == add_stats(first, other, keep_gauges=True)
    service.second_checkpoint.is_split = False
    assert service.second_checkpoint.running().requests == service.versions.running().requests == 1
    assert service.second_checkpoint.cache_stats() == first
    service.second_checkpoint.is_split = True
    service.second_checkpoint.engine_lost("planted")
    with pytest.raises(EngineDown) as lost:
        await waits[1]
    assert lost.value.retry_after_seconds == 0.0
    for gate in gates:
        gate.opened.set()
    assert right((await waits[0]).scores, 1)
    await service.stop(5.0)


# reloads


async def test_a_manifest_that_is_refused_is_tried_once_until_it_changes(tmp_path: Path) -> None:
    tries: list[Path] = []

    def load(path: Path) -> Any:
        tries.append(path)
        raise CheckpointError("planted")

    place = tmp_path / "checkpoint"
    place.mkdir()
    (place / "manifest.json").write_text("{}")
    async with running(FakeEngine()) as service:
        reloads = Reloader(service, tmp_path, place, load)
        reloads.watch(0.02)
        await asyncio.sleep(0.1)
        assert tries == []
        for count in (1, 2):
            (place / "manifest.json").write_text("{}" + " " * count)
            await until(lambda count=count: len(tries) == count)
            await asyncio.sleep(0.2)
            assert len(tries) == count
        reloads.reload_soon()
        await until(lambda: len(tries) == 3)
        await until(lambda: len(reloads._tasks) == 1)  # the watch alone
        reloads.stop()
        await until(lambda: not reloads._tasks)


@pytest.mark.parametrize("short", [False, True])
async def test_who_is_refused_while_the_loop_is_short_of_time_may_wait_for_the_answer(
    short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection then holds back the refusal, and with it the next request of an impatient caller."""
    async with busy(queue=Queue(max_requests=1, max_wait_seconds=0)) as (service, _, gate, first):
        monkeypatch.setattr(type(service.loop_clock.lag), "is_short_of_time", property(lambda lag: short))
        with pytest.raises(Overloaded) as refused:
            service.admit(service.model, candidates=1, history=0, deadline=None)
        assert refused.value.may_wait is short
        gate.opened.set()
        await first


@pytest.mark.parametrize("which", ["plain path", "compaction"])
async def test_an_end_waits_for_no_thread_and_nothing_begins_after_it(which: str) -> None:
    async with running(FakeEngine()) as service:
        executor = service.plain_path._executor if which == "plain path" else service.retrieval._slow
        gate = Gate()
        hanging = executor.submit(gate, None)
        waiting = executor.submit(print)
        await gate.reached()
        assert await asyncio.wait_for(service.stop(1.0), 5.0)
        assert not hanging.done()
        assert waiting.cancelled()
        with pytest.raises(RuntimeError, match="shutdown"):
            executor.submit(print)
        assert all(task.done() or task.cancelling() for task in service._tasks)
        with pytest.raises(Draining):
            service.check_open()
        gate.opened.set()


async def test_the_log_names_the_towers_and_the_posts_of_a_reload(tmp_path: Path) -> None:
    loads: list[Any] = [retrieving.loader(tmp_path / "two", version="v2")]
    service = await ready(loader(FakeEngine()), retrieval=retrieving.loader(tmp_path / "one"))
    paths = tmp_path / "towers", tmp_path / "posts"

    def load(*given: Path) -> Any:
        assert given == paths
        if not loads:
            raise CheckpointError("planted")
        return loads.pop()

    reloads = Reloader(service, tmp_path, tmp_path / "none", lambda path: loader(FakeEngine()), paths, load)
    with structlog.testing.capture_logs() as lines:
        await reloads.reload_retrieval()
        with pytest.raises(CheckpointError):
            await reloads.reload_retrieval()
    named = {"retrieval": str(paths[0]), "corpus": str(paths[1])}
    first, second = (line for line in lines if line["event"] in ("reloaded", "reload_failed"))
    assert first.items() >= (named | {"event": "reloaded", "version": "v2", "corpus_version": "v2"}).items()
    assert second.items() >= (named | {"event": "reload_failed", "reason": "planted"}).items()
    await service.stop(1.0)
