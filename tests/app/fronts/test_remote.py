"""The service behind a link keeps the contract of `interface.Service`: same bits, deadlines, cancellation, swaps, refusals."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from typing import Any

import httpx
import pytest
import structlog

from app.engine.loading import LoadedModel
from app.errors import ContextUnknown, CorpusNotLoaded, DeadlineExceeded, Draining, EngineDown, NotReady, Overloaded
from app.fronts import host, remote, uplink, wire
from app.fronts.front import FrontServer
from app.fronts.remote import RemoteReloads
from app.http.application import create_app
from app.interface import CheckpointNotFound, Ranked
from app.ports import build_server
from app.settings import Batching, Queue
from app.telemetry.metrics import Metrics
from loadtest.soak.fake_engine import FakeEngine, loaded
from tests.app.fakes import Gate, loader, request, right, until
from tests.app.fronts.linked import begin, linked
from tests.app.serving import ask, chunk, good, port_of, value_of

pytestmark = pytest.mark.anyio


async def test_scores_are_the_same_bits_as_without_a_link() -> None:
    async with linked(FakeEngine(), fronts=2) as found:
        sent = [begin(found.fronts[user % 2], user, candidates=1 + user % 70) for user in range(1, 60)]
        for user, (_, future) in enumerate(sent, 1):
            ranked = await future
            assert right(ranked.scores, user)
            assert ranked.scores.is_finite()
            assert ranked.forward_seconds > 0
        assert found.service.admission.requests == 0
        there, here = found.service.model, found.fronts[0].model
        assert (here.manifest, here.engine) == (there.manifest, there.engine)
        assert found.fronts[0].second is None, "where none is configured there is none"


@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
async def test_without_a_corpus_a_front_says_so(path: str) -> None:
    async with linked(FakeEngine()) as found:
        messages = await ask(create_app(found.settings, found.fronts[0]), [chunk(b'{"user_id": 1}', False)], path=path)
        problem = json.loads(messages[1]["body"])
        assert (messages[0]["status"], problem["code"]) == (503, "corpus_not_loaded")
        with pytest.raises(CorpusNotLoaded):
            await RemoteReloads(found.fronts[0]).reload_retrieval()


async def test_a_released_place_is_not_computed_and_leaves_nothing() -> None:
    gate = Gate()
    engine = FakeEngine(before=gate)
    async with linked(engine) as found:
        [front], service = found.fronts, found.service
        _, first = begin(front, 1)
        await gate.reached()
        place, second = begin(front, 2)
        unsent = front.admit(front.model, candidates=4, history=2, deadline=None)
        await until(lambda: service.admission.requests == 2)
        for released in (place, place, unsent, unsent):
            released.release()
        await until(lambda: service.admission.requests == 1)
        gate.opened.set()
        assert right((await first).scores, 1)
        assert right((await begin(front, 3)[1]).scores, 3)
        assert not second.done()
        assert 2 not in [user for forward in engine.forwards for user in forward]
        assert 'ranker_cancelled_total{stage="queue"} 1.0' in service.metrics.render().decode()


@pytest.mark.usefixtures("no_collector")
async def test_a_released_place_keeps_nothing_of_its_caller() -> None:
    class Caller:
        def done(self, result: object) -> None: ...

    gate = Gate()
    async with linked(FakeEngine(before=gate)) as found:
        [front], caller = found.fronts, Caller()
        place = front.admit(front.model, candidates=4, history=2, deadline=None)
        front.rank(place, *request(1), caller.done)
        await gate.reached()
        there = weakref.ref(caller)
        del caller
        assert there() is not None
        place.release()
        assert there() is None, "without a circle, for the collector to find"
        gate.opened.set()


async def test_a_deadline_in_the_queue_is_kept_by_the_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "GRACE_SECONDS", 3600.0)  # the front alone would not end it
    gate = Gate()
    engine = FakeEngine(before=gate)
    async with linked(engine) as found:
        [front] = found.fronts
        _, first = begin(front, 1)
        await gate.reached()
        with pytest.raises(DeadlineExceeded):
            await begin(front, 2, deadline=front.clock() + 0.05)[1]
        gate.opened.set()
        await first
        assert 2 not in [user for forward in engine.forwards for user in forward]


async def test_an_engine_process_that_says_nothing_does_not_hold_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        found.host._take = {kind: lambda front, frame: None for kind in found.host._take}
        with pytest.raises(DeadlineExceeded):
            await begin(front, 1, deadline=front.clock() + 0.05)[1]
        monkeypatch.setattr(remote, "SILENT_SECONDS", -1.0)
        health = front.health()
        assert (health.ready, health.failed, health.started) == (False, True, True)


async def test_the_engine_process_admits_for_all_fronts_together() -> None:
    gate = Gate()
    queue = Queue(max_requests=2, max_wait_seconds=0)
    async with linked(FakeEngine(before=gate), fronts=2, queue=queue) as found:
        one, other = found.fronts
        _, first = begin(one, 1)
        await gate.reached()
        _, second = begin(other, 2)
        await until(lambda: found.service.admission.requests == 2)
        with pytest.raises(Overloaded) as refused:
            await begin(one, 3)[1]
        assert refused.value.retry_after_seconds is not None
        await until(lambda: bool(other.state.closed))
        for front in (one, other):  # from now on unread
            with pytest.raises(Overloaded):
                front.check_open()
        gate.opened.set()
        assert right((await first).scores, 1)
        assert right((await second).scores, 2)
        await until(lambda: not (one.state.closed or other.state.closed))
        one.check_open()


async def test_a_key_has_one_share_over_all_fronts() -> None:
    gate = Gate()
    queue = Queue(max_candidates=100, max_share_per_key=0.5, max_wait_seconds=0)
    async with linked(FakeEngine(before=gate), fronts=2, queue=queue, batching=Batching(max_requests=1)) as found:
        one, other = found.fronts
        _, first = begin(one, 1, candidates=40, key="feed")
        await gate.reached()
        with pytest.raises(Overloaded):
            await begin(other, 2, candidates=40, key="feed")[1]
        _, third = begin(other, 3, candidates=40, key="page")
        await until(lambda: found.service.admission.requests == 2)
        gate.opened.set()
        await asyncio.gather(first, third)


async def test_each_refusal_is_told_once() -> None:
    async with linked(FakeEngine()) as found:
        [front], told = found.fronts, []
        found.host._take[wire.Refused] = lambda front, frame: told.append(frame.requests)
        front.state.closed = "planted"
        for _ in range(7):
            with pytest.raises(Overloaded):
                front.check_open()
        await until(lambda: sum(told) >= 7)
        await asyncio.sleep(2 * uplink.TURN_SECONDS)
        assert told == [7]


async def test_what_is_refused_unread_counts_as_asked_for_and_as_work_of_the_loop() -> None:
    """By the latter the loop's lag tells a machine that is too slow from callers that are too many."""
    async with linked(FakeEngine()) as found:
        [front], offered = found.fronts, found.service.admission.offered
        begun = front._work()
        await begin(front, 1)[1]
        before = offered.forwards_per_second(found.service.clock())
        front.state.closed = "planted"
        for _ in range(50):
            with pytest.raises(Overloaded):
                front.check_open()
        after = front._work()
        assert (after.refused - begun.refused, after.answered - begun.answered) == (50, 1)
        assert after.cpu_seconds >= begun.cpu_seconds
        await until(lambda: offered.forwards_per_second(found.service.clock()) > 10 * before)
        text = (await front.exposition()).decode()
        assert value_of(text, 'ranker_rejected_total{reason="queue_full"}') == 50


async def test_a_loop_that_is_overrun_refuses_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        monkeypatch.setattr(type(front._loop_clock.lag), "refuses", lambda lag, under_way: True)
        with pytest.raises(Overloaded, match="arrive faster") as refused:
            front.check_open()
        assert refused.value.retry_after_seconds == remote.OVERRUN_RETRY_SECONDS
        assert value_of(front.metrics.render().decode(), 'ranker_rejected_total{reason="loop_overrun"}') == 1


async def test_more_than_the_queue_holds_is_not_sent() -> None:
    gate = Gate()
    async with linked(FakeEngine(before=gate), queue=Queue(max_requests=3, max_wait_seconds=0)) as found:
        [front] = found.fronts
        sent = [begin(front, user)[1] for user in range(1, 4)]
        with pytest.raises(Overloaded, match="the queue is full"):
            front.check_open()
        assert value_of(front.metrics.render().decode(), 'ranker_rejected_total{reason="queue_full"}') == 1
        gate.opened.set()
        await asyncio.gather(*sent)
        front.check_open()


async def test_requests_end_on_the_model_that_they_began_with() -> None:
    gate = Gate()
    old, new = FakeEngine(1, before=gate), FakeEngine(2)
    async with linked(old, fronts=2, load=loader(new, "v2")) as found:
        one, other = found.fronts
        prepared = one.admit(one.model, candidates=4, history=2, deadline=None)
        sent = begin(other, 5)[1]
        await gate.reached()
        after = await RemoteReloads(one).reload()
        assert after.manifest.version == "v2"
        assert [front.model.manifest.version for front in found.fronts] == ["v2", "v2"]  # both, when the reply is there
        gate.opened.set()
        assert right((await sent).scores, 5, version=1)
        assert right((await begin(other, 6)[1]).scores, 6, version=2)
        for front in (one, other):
            await front.exposition()  # the engine process has read all that was sent before
        assert not old.closed.is_set()  # `prepared` is still to come
        late: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        one.rank(prepared, *request(7), late.set_result)
        ranked = await late
        assert right(ranked.scores, 7, version=1)  # type: ignore[attr-defined]
        del prepared
        await until(old.closed.is_set)


async def test_a_model_that_was_replaced_is_kept_for_what_is_prepared_and_not_for_what_was_released() -> None:
    old = FakeEngine(1)
    async with linked(old, load=loader(FakeEngine(2), "v2")) as found:
        [front] = found.fronts
        dropped, kept = (front.admit(front.model, candidates=4, history=2, deadline=None) for _ in range(2))
        await RemoteReloads(front).reload()
        dropped.release()
        dropped.release()  # does nothing
        del dropped
        await front.exposition()  # the engine process has read all that was sent before
        assert not old.closed.is_set()
        assert right((await answer(front, kept)).scores, 1, version=1)
        kept.release()
        del kept
        await until(old.closed.is_set)


async def answer(front: remote.RemoteService, place: remote.Place) -> Ranked:
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    front.rank(place, *request(1), ended.set_result)
    ranked: Ranked = await ended
    return ranked


async def test_a_front_that_goes_keeps_no_model() -> None:
    old = FakeEngine(1)
    async with linked(old, fronts=2, load=loader(FakeEngine(2), "v2")) as found:
        one, other = found.fronts
        prepared = one.admit(one.model, candidates=4, history=2, deadline=None)
        await RemoteReloads(other).reload()
        for front in (one, other):
            await front.exposition()
        assert not old.closed.is_set()
        one.uplink.link.close()  # type: ignore[union-attr]
        await until(old.closed.is_set)
        prepared.release()


@pytest.mark.usefixtures("no_collector")
async def test_an_idle_connection_keeps_no_model_that_was_replaced() -> None:
    old = FakeEngine(1)
    async with linked(old, load=loader(FakeEngine(2), "v2")) as found:
        reloads = RemoteReloads(found.fronts[0])
        server = build_server(found.settings.model_copy(update={"port": 0}), found.fronts[0], reloads)
        await server.startup(None)
        explain = good() | {"explain": [good()["candidates"][0]["post_id"]]}
        bodies = {"/rank": good(), "/rank/batch": {"requests": [good()]}, "/explain": explain}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(server)}") as client:
            for path, body in bodies.items():
                assert (await client.post(path, json=body)).status_code == 200
            await reloads.reload()
            await until(old.closed.is_set)
        await server.shutdown()


async def test_a_lost_link_answers_at_once_and_comes_back() -> None:
    gate = Gate()
    async with linked(FakeEngine(before=gate)) as found:
        [front] = found.fronts
        sent = [begin(front, user)[1] for user in (1, 2)]
        admitted = front.admit(front.model, candidates=4, history=2, deadline=None)
        await gate.reached()
        with structlog.testing.capture_logs() as lines:
            found.cut()
            for future in sent:
                with pytest.raises(EngineDown):
                    await future
        assert not gate.opened.is_set()
        assert {"event": "engine_process_lost", "requests": 2, "log_level": "error"} in lines
        with pytest.raises(EngineDown) as down:
            front.check_open()
        assert down.value.retry_after_seconds == remote.RETRY_AFTER_SECONDS
        health = front.health()
        assert (health.ready, health.started, health.failed) == (False, True, True)
        assert found.service.admission.requests == 0
        gate.opened.set()
        await found.mend()
        await until(lambda: front.health().ready)
        assert right((await begin(front, 3)[1]).scores, 3)
        late: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        front.rank(admitted, *request(4), late.set_result)
        assert isinstance(await late, EngineDown)
        with pytest.raises(NotReady, match="was replaced") as replaced:
            front.admit(admitted.model, candidates=4, history=2, deadline=None)
        assert replaced.value.retry_after_seconds == 0


async def test_a_question_ends_with_its_answer_its_deadline_or_whoever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(FakeEngine()) as found:
        [front], take = found.fronts, found.host._take
        cancelled: list[int] = []
        scrape = wire.METHODS["exposition"].question
        take[wire.Cancel] = lambda front, cancel: cancelled.append(cancel.id)
        take[scrape] = lambda front, asked: front.link.send(wire.Failed(asked.id, "corpus_not_loaded", "planted"))
        with pytest.raises(CorpusNotLoaded, match="planted"):
            await front.exposition()
        take[scrape] = lambda front, asked: None
        monkeypatch.setattr(remote, "SCRAPE_SECONDS", 0.01)
        with pytest.raises(EngineDown, match="has not told the metrics in time"):
            await front.exposition()
        asking = asyncio.ensure_future(front.uplink.ask("exposition"))
        await asyncio.sleep(0)
        asking.cancel()
        await until(lambda: len(cancelled) == 2)
        assert not front.uplink.asked
        [there] = found.host._fronts
        there.send(wire.METHODS["exposition"].answer(99, b"to a question that has ended"))
        assert right((await begin(front, 1)[1]).scores, 1)


async def test_an_answer_to_something_else_ends_the_link_and_leaves_nobody_waiting() -> None:
    async with linked(FakeEngine()) as found:
        take = found.host._take
        rank, reload = wire.METHODS["rank"], wire.METHODS["reload"]
        take[rank.question] = lambda front, asked: front.link.send(reload.answer(asked.id, None))
        with pytest.raises(EngineDown):
            await begin(found.fronts[0], 1)[1]


async def test_without_an_engine_process_it_is_starting_and_not_failed() -> None:
    async with linked(FakeEngine()) as found:
        front = remote.RemoteService(found.settings, found.path + "-not-yet", 9, found.fronts[0].metrics)
        front.start()
        await asyncio.sleep(0.05)
        health = front.health()
        assert (health.ready, health.started, health.failed, health.draining) == (False, False, False, False)
        for ask in (front.check_open, lambda: front.model):
            with pytest.raises(NotReady):
                ask()
        with pytest.raises(NotReady):
            await front.exposition()
        await front.stop(0.1)


async def test_a_front_of_an_engine_that_loads_refuses_and_counts_and_says_when_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()

    def load(steps: object) -> LoadedModel:
        gate(None)
        return loaded(FakeEngine())

    monkeypatch.setattr("tests.app.fronts.linked.loader", lambda engine: load)
    async with linked(FakeEngine(), fronts=0) as found:
        front = remote.RemoteService(found.settings, found.path, 1, Metrics())
        found.fronts.append(front)
        front.start()
        await front.linked.wait()
        with pytest.raises(NotReady, match="is being loaded") as refused:
            front.check_open()
        assert refused.value.retry_after_seconds == remote.RETRY_AFTER_SECONDS
        assert value_of(front.metrics.render().decode(), 'ranker_rejected_total{reason="not_ready"}') == 1
        gate.opened.set()
        await until(lambda: front.health().ready)
        front.check_open()


async def test_an_engine_process_that_does_nothing_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SIGN_OF_LIFE_SECONDS", 0.05)
    async with linked(FakeEngine()) as found:
        for _ in range(3):
            heard = found.fronts[0].uplink.heard
            await until(lambda heard=heard: found.fronts[0].uplink.heard > heard, 10.0)


async def test_a_front_that_stops_waits_for_its_requests_and_takes_no_more() -> None:
    gate = Gate()
    async with linked(FakeEngine(before=gate)) as found:
        [front] = found.fronts
        _, sent = begin(front, 1)
        await gate.reached()
        front.begin_drain()
        assert not front.health().ready
        front.check_open()  # served until it stops
        stopping = asyncio.ensure_future(front.stop(5.0))
        await asyncio.sleep(0.02)
        for ask in (front.check_open, lambda: front.admit(front.model, candidates=4, history=2, deadline=None)):
            with pytest.raises(Draining) as refused:
                ask()
            assert refused.value.retry_after_seconds == remote.RETRY_AFTER_SECONDS
        assert value_of(front.metrics.render().decode(), 'ranker_rejected_total{reason="draining"}') == 2
        gate.opened.set()
        assert await stopping
        assert right((await sent).scores, 1)
        assert not front.has_running_threads(), "its process may end in order"
        assert front.uplink.link is None, "what it told last is on its way once the other side has closed"
        assert front.uplink._ended.is_set()


async def test_a_front_that_stops_waits_for_an_engine_process_that_hangs_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uplink, "CLOSE_SECONDS", 0.01)
    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        link = front.uplink.link
        with monkeypatch.context() as patch:
            patch.setattr(link, "close", lambda: None)
            assert await front.stop(1.0)
        link.close()


async def test_a_fault_in_one_callers_code_ends_no_link() -> None:
    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        place = front.admit(front.model, candidates=4, history=2, deadline=None)
        with structlog.testing.capture_logs() as lines:
            front.rank(place, *request(1), lambda result: 1 / 0)  # type: ignore[arg-type]
            assert right((await begin(front, 2)[1]).scores, 2)
        assert [line["event"] for line in lines] == ["fault"]


async def test_a_ticket_serves_once_and_one_that_was_released_nobody() -> None:
    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        place, future = begin(front, 1)
        await future
        released = front.admit(front.model, candidates=4, history=2, deadline=None)
        released.release()
        for used in (place, released):
            with pytest.raises(ValueError, match="before"):
                front.rank(used, *request(1), print)
        assert not front.uplink.asked


async def test_reloads_fail_on_a_front_as_they_do_in_one_process() -> None:
    async with linked(FakeEngine()) as found:
        reloads = RemoteReloads(found.fronts[0])
        with pytest.raises(CheckpointNotFound):
            await reloads.reload(reloads.resolve("../outside"))
        text = (await found.fronts[0].exposition()).decode()
        assert value_of(text, 'ranker_reloads_total{result="failure"}') == 0


async def test_metrics_are_the_sums_over_fronts_whichever_is_asked() -> None:
    async with linked(FakeEngine(), fronts=3) as found:
        for number, front in enumerate(found.fronts):
            front.metrics.http_requests.labels("POST", "/rank", "200").inc(10**number)
        series = 'ranker_http_requests_total{code="200",method="POST",route="/rank"}'
        for front in found.fronts:
            assert value_of((await front.exposition()).decode(), series) == 111
        memory = "process_virtual_memory_bytes"
        before = value_of((await found.fronts[1].exposition()).decode(), memory)
        await found.fronts[0].stop(1.0)
        text = (await found.fronts[1].exposition()).decode()
        assert value_of(text, series) == 111, "what it has counted stays"
        assert value_of(text, memory) == pytest.approx(before * 3 / 4, rel=0.1), "of four processes one has gone"


async def test_a_batch_is_not_refused_because_of_its_own_requests() -> None:
    engine = FakeEngine(before=lambda items: time.sleep(0.005))
    queue, batching = Queue(max_requests=2, max_wait_seconds=0), Batching(max_requests=1)
    async with linked(engine, queue=queue, batching=batching) as found:
        app = create_app(found.settings, found.fronts[0])
        body = json.dumps({"requests": [good(user_id=user) for user in range(1, 13)]}).encode()
        messages = await ask(app, [chunk(body, False)], path="/rank/batch")
        results = json.loads(messages[1]["body"])["results"]
        assert [result.get("error") for result in results] == [None] * 12


async def test_a_front_that_ends_tells_nothing_of_what_it_still_held() -> None:
    """At the end of a process Python would otherwise call each `finalize` that is left, on links that are closed."""
    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        held = set(front.serves.values())
        told = [each for each in weakref.finalize._registry if each.alive and each.peek()[0] in held]  # type: ignore[attr-defined]
        assert len(told) == len(held) > 0
        assert not any(each.atexit for each in told)


async def test_after_a_lost_link_there_is_one_again_and_no_more() -> None:
    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        for _ in range(2):
            number = front.state.model
            assert front.serves.get(number) is front.model
            found.cut()
            await until(lambda: front.uplink.link is None)
            assert front.serves.get(number) is None, "nothing is kept of an engine process that is gone"
            await found.mend()
            await until(lambda: front.health().ready)
            first = front.uplink.link
            await asyncio.sleep(5 * uplink.CONNECT_SECONDS)
            assert front.uplink.link is first
            assert len(found.host._links) == 1


@pytest.mark.parametrize("name", ["attention", "corpus", "exposition"])
async def test_every_question_with_a_deadline_ends_where_the_engine_process_says_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(remote, "SCRAPE_SECONDS", 0.05)
    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        found.host._take[wire.METHODS[name].question] = lambda front, asked: None
        ask = {
            "attention": lambda: front.attention(front.model, *request(1), front.clock() + 0.05),
            "corpus": front.corpus,
            "exposition": front.exposition,
        }[name]
        began = time.monotonic()
        with pytest.raises((DeadlineExceeded, EngineDown)):
            await asyncio.wait_for(ask(), 10.0)
        assert time.monotonic() - began > 0.04
        assert not front.uplink.asked


@pytest.mark.parametrize("waits", [False, True])
async def test_the_engine_process_looks_whether_it_is_open_to_this_key_but_not_for_who_waits(waits: bool) -> None:
    async with linked(FakeEngine()) as found:
        [front], asked = found.fronts, list[object]()

        def closed(key: str | None = None) -> None:
            asked.append(key)
            raise Overloaded("planted", retry_after_seconds=3.0)

        found.service.check_open = closed  # type: ignore[method-assign]
        sent = begin(front, 1, key="feed", waits=waits)[1]
        if waits:
            assert right((await sent).scores, 1)
            assert asked == []
        else:
            with pytest.raises(Overloaded, match="planted") as refused:
                await sent
            assert refused.value.retry_after_seconds == 3.0
            assert asked == ["feed"]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("waits", [False, True])
async def test_the_engine_process_admits_what_the_front_was_asked_for(again: bool, waits: bool) -> None:
    """With the history or, as a handle, with none; and a request that it refuses leaves nothing with it."""
    async with linked(FakeEngine()) as found:
        [front], admit, told = found.fronts, found.service.admit, list[dict[str, Any]]()

        def admits(model: Any, **asked: Any) -> Any:
            told.append(asked)
            return admit(model, **asked)

        found.service.admit = admits  # type: ignore[method-assign]
        deadline = front.clock() + 5.0
        options = {"deadline": deadline, "key": "feed", "again": again, "waits": waits}
        assert right((await begin(front, 1, **options)[1]).scores, 1)
        context, posts = request(1)
        place = front.admit(front.model, candidates=len(posts), history=0, **options)
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        front.rank(place, "0" * 32, posts, ended.set_result)
        assert isinstance(await ended, ContextUnknown)
        assert told == [{"candidates": len(posts), "history": len(each), **options} for each in (context, ())]
        [there] = found.host._fronts.values()
        assert not there.tickets


async def test_a_front_has_its_link_before_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.fronts.front.LINK_SECONDS", 60.0)
    async with linked(FakeEngine(), fronts=0) as found:
        front = remote.RemoteService(found.settings, found.path, 1, Metrics())
        found.fronts.append(front)
        settings = found.settings.model_copy(update={"port": 0})
        server = build_server(settings, front, RemoteReloads(front), FrontServer)
        await asyncio.wait_for(server.startup(None), 20.0)
        assert front.linked.is_set()
        assert port_of(server)
        await server.shutdown()
