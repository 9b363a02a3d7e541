"""A second checkpoint that shadows: after the answer, only when nothing else is to be done, with no bit changed; and given up alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from app.engine.loading import LoadedModel, Loader, Steps
from app.errors import EngineDown
from app.interface import ranked
from app.service import watchdog
from app.service.service import RankingService
from app.settings import Batching, Queue, Settings, Shadow, Split
from model.engine import CacheStats, EngineError
from tests.app.fakes import (
    ACTIONS,
    FakeEngine,
    Gate,
    expected,
    loaded,
    loader,
    rank,
    ready,
    request,
    right,
    until,
)  # fmt: skip
from tests.app.serving import value_of
from weights.agreement import agreement
from weights.errors import CheckpointError

pytestmark = pytest.mark.anyio
EVERY = Shadow(checkpoint=Path("second"), share=1.0)
HALF = Split(users=0.5)


@asynccontextmanager
async def both(
    first: Any, second: Any | Loader, shadow: Shadow = EVERY, **groups: Any
) -> AsyncIterator[RankingService]:
    """A service that is ready, and has loaded its second checkpoint or has failed to."""
    load = loader(second, "v2") if isinstance(second, FakeEngine) else second
    service = await ready(loader(first), Settings(shadow=shadow, **groups), second=load)
    await until(lambda: service.second is not None and "being loaded" not in service.second.reason)
    try:
        yield service
    finally:
        await service.stop(1.0)


def counted(service: RankingService, series: str) -> float:
    return value_of(service.metrics.render().decode(), f"ranker_{series}")


def results(service: RankingService) -> dict[str, float]:
    names = ("scored", "full", "late", "failed")
    found = {name: counted(service, f'shadow_requests_total{{result="{name}"}}') for name in names}
    return {name: count for name, count in found.items() if count}


async def test_the_log_says_which_second_checkpoint_was_loaded() -> None:
    with structlog.testing.capture_logs() as logs:
        async with both(FakeEngine(), FakeEngine(2)) as service:
            manifest = service.second.model.manifest
    (line,) = [line for line in logs if line["event"] == "second_checkpoint"]
    assert (line["version"], line["digest"]) == (manifest.version, manifest.digest)


async def test_every_answered_request_is_scored_and_none_is_changed() -> None:
    second, jobs = FakeEngine(2), list[Any]()
    async with both(FakeEngine(), second) as service:
        worker = service.second_checkpoint.versions.current
        submit = worker.submit
        worker.submit = lambda job: (jobs.append(job), submit(job))
        for user in range(1, 9):
            assert right(await rank(service, user, 20), user)
            await until(lambda user=user: results(service) == {"scored": user})  # type: ignore[misc]
        assert sorted(user for forward in second.forwards for user in forward) == list(range(1, 9))
        assert counted(service, "candidates_scored_total") == 160, "the second's forwards are not the service's"
        assert counted(service, "shadow_candidates_total") == 160
        assert counted(service, 'answers_total{checkpoint="first"}') == 8
        assert counted(service, 'context_cache_lookups_total{result="miss"}') == 8, "nor are its lookups"
        assert counted(service, "shadow_seconds_count") == 8
        assert 0 < counted(service, "shadow_seconds_sum") < 7
        assert worker.unfinished == 0
        assert {(job.candidates, job.context_tokens) for job in jobs} == {(20, 3)}, "the user and two events"


async def test_the_figures_are_those_of_compare() -> None:
    async with both(FakeEngine(), FakeEngine(2)) as service:
        weights = np.array([1.0, 0.0, -2.0], np.float32)
        alike, means = [], []
        for user in range(1, 6):
            await rank(service, user, 12)
            pair = [expected(*request(user, 12), version).probabilities for version in (1, 2)]
            alike.append(agreement(*(each @ weights for each in pair)))
            means.append([each.sum(0) for each in pair])
        await until(lambda: results(service) == {"scored": 5})
        said = service.metrics.render().decode()
        for name in ("kendall", "correlation"):
            assert value_of(said, f"ranker_shadow_{name}_distance_count") == 5
            mean = 1 - 2 * value_of(said, f"ranker_shadow_{name}_distance_sum") / 5
            assert mean == pytest.approx(np.mean([getattr(each, name) for each in alike]), abs=1e-6)
            assert -0.99 < mean < 0.99
        for k in (1, 3, 5, 10):
            overlap = value_of(said, f'ranker_shadow_overlap_sum{{k="{k}"}}') / 5
            assert overlap == pytest.approx(np.mean([each.overlap[k] for each in alike]))
        for row, checkpoint in enumerate(("first", "second")):
            for column, action in enumerate(ACTIONS):
                series = f'ranker_shadow_probability_total{{action="{action}",checkpoint="{checkpoint}"}}'
                assert value_of(said, series) == pytest.approx(sum(mean[row][column] for mean in means), rel=1e-5)


async def test_long_lists_are_scored_in_chunks_and_one_candidate_has_no_order_to_compare() -> None:
    second = FakeEngine(2)
    async with both(FakeEngine(), second, batching=Batching(chunk_candidates=4)) as service:
        await rank(service, 1, 1)
        await until(lambda: results(service) == {"scored": 1})
        assert counted(service, "shadow_candidates_total") == 1
        assert counted(service, "shadow_kendall_distance_count") == 0
        assert counted(service, 'shadow_overlap_count{k="1"}') == 0
        await rank(service, 1, 10)
        await until(lambda: results(service) == {"scored": 2})
        assert second.chunks == [[1], [4], [3], [3]]


async def test_a_busy_service_is_left_alone_and_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.service.shadow.SHADOW_WAITING", 3)
    monkeypatch.setattr("app.service.shadow.MAX_WAIT_SECONDS", 0.2)
    gate, second = Gate(), FakeEngine(2)

    def hold(items: Any) -> None:
        if any(item.context.user_id == 99 for item in items):
            gate(items)

    async with both(FakeEngine(before=hold), second, EVERY, batching=Batching(max_requests=1)) as service:
        answers = [asyncio.ensure_future(rank(service, user)) for user in (1, 2, 3, 4, 5, 99)]
        await gate.reached()
        assert all([right(await answer, user) for user, answer in enumerate(answers[:5], 1)])
        await asyncio.sleep(0.05)
        assert second.forwards == [], "while a request waits for its answer nothing is begun"
        assert results(service) == {"full": 2}
        await asyncio.sleep(0.2)
        gate.opened.set()
        await answers[5]
        await until(lambda: results(service) == {"full": 2, "late": 3, "scored": 1})
        assert second.forwards == [[99]]


async def test_the_control_is_begun_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the question whether the service is busy, the second checkpoint computes beside requests that wait."""
    gate, second = Gate(), FakeEngine(2)
    monkeypatch.setattr(RankingService, "is_busy", lambda service: False)

    def hold(items: Any) -> None:
        if any(item.context.user_id == 99 for item in items):
            gate(items)

    async with both(FakeEngine(before=hold), second, batching=Batching(max_requests=1)) as service:
        answers = [asyncio.ensure_future(rank(service, user)) for user in (1, 99)]
        await gate.reached()
        await until(lambda: second.forwards == [[1]])
        gate.opened.set()
        await asyncio.gather(*answers)


async def test_only_the_share_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([0.1, 0.9, 0.4, 0.5])
    async with both(FakeEngine(), FakeEngine(2), EVERY.model_copy(update={"share": 0.5})) as service:
        monkeypatch.setattr(service.second_checkpoint._shadow, "_draw", lambda: next(draws))
        for user in range(1, 5):
            await rank(service, user)
            await until(lambda: not service.second_checkpoint.versions.running().requests)
        await until(lambda: results(service) == {"scored": 2})


async def test_none_is_scored_twice_where_the_second_checkpoint_answers_users() -> None:
    """`SHADOW__SHARE` has no effect where `SPLIT__USERS` is above 0. A shadow run starts after the reply, when the queue is empty."""
    second = FakeEngine(2)
    async with both(FakeEngine(), second, split=HALF) as service:
        for user in range(3):
            await rank(service, user)
            await asyncio.sleep(0.01)
        assert (second.forwards, results(service)) == ([], {})


def refused(steps: Steps) -> LoadedModel:
    raise CheckpointError("its bytes are not those of its digest")


async def test_one_that_cannot_be_loaded_is_said_and_nothing_else_comes_of_it() -> None:
    async with both(FakeEngine(), refused, split=HALF) as service:
        assert service.health().ready
        assert (service.second.model, service.second.answers) == (None, False)
        assert "its bytes are not those" in service.second.reason
        assert counted(service, "second_ready") == 0
        assert right(await rank(service, 1), 1)
        await service.second_checkpoint.swap(loader(FakeEngine(2), "v2"))
        assert counted(service, "second_ready") == 1
        assert service.second.reason == ""


async def test_one_that_is_lost_takes_nothing_with_it() -> None:
    def fault(items: Any) -> None:
        raise EngineError("the device is gone", sticky=True)

    lost: list[str] = []
    async with both(FakeEngine(), FakeEngine(2, fault)) as service:
        service.on_fatal = lost.append
        for user in (1, 2, 3):
            assert right(await rank(service, user), user)
        await until(lambda: service.second is not None and service.second.model is None)
        assert "the device is gone" in service.second.reason  # type: ignore[union-attr]
        assert results(service)["failed"] == 1
        assert (service.health().ready, lost) == (True, [])


async def test_a_forward_that_fails_fails_alone() -> None:
    def fault(items: Any) -> None:
        if any(item.context.user_id == 2 for item in items):
            raise MemoryError

    async with both(FakeEngine(), FakeEngine(2, fault)) as service:
        for user in (1, 2, 3):
            assert right(await rank(service, user), user)
            await until(lambda user=user: sum(results(service).values()) == user)  # type: ignore[misc]
        assert results(service) == {"scored": 2, "failed": 1}


async def test_one_that_hangs_is_given_up_and_readiness_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "WATCHDOG_SECONDS", 0.02)
    gate, lost = Gate(), list[str]()
    queue = Queue(stall_seconds=0.1, stall_exit_seconds=0.3)
    async with both(FakeEngine(), FakeEngine(2, gate), queue=queue) as service:
        service.on_fatal = lost.append
        assert right(await rank(service, 1), 1)
        await gate.reached()

        def given_up() -> bool:
            assert service.health().ready
            return service.second is not None and service.second.model is None

        await until(given_up)
        assert "has finished no forward" in service.second.reason  # type: ignore[union-attr]
        assert right(await rank(service, 2), 2)
        gate.opened.set()
        assert lost == []


async def test_where_it_answers_users_its_work_is_the_services() -> None:
    class Caching(FakeEngine):
        def cache_stats(self) -> CacheStats:
            return replace(super().cache_stats(), bytes=100)

    async with both(Caching(), Caching(2), split=HALF) as service:
        second = service.second
        assert second.model is not None
        for user, model in ((1, service.model), (2, second.model)):
            ticket = service.admit(model, candidates=4, history=2, deadline=None)
            assert right((await ranked(service, ticket, *request(user))).scores, user, user)
        await until(lambda: counted(service, "candidates_scored_total") == 8)
        assert counted(service, 'context_cache_lookups_total{result="miss"}') == 2
        assert counted(service, "context_cache_bytes") == 200
        assert results(service) == {}, "and it shadows nothing"


async def test_callers_of_a_lost_second_checkpoint_are_told_and_the_next_ones_have_the_first() -> None:
    def fault(items: Any) -> None:
        raise EngineError("the device is gone", sticky=True)

    async with both(FakeEngine(), FakeEngine(2, fault), split=HALF) as service:
        second = service.second
        assert second.answers
        assert second.model is not None
        ticket = service.admit(second.model, candidates=4, history=2, deadline=None)
        told = asyncio.get_running_loop().create_future()
        service.rank(ticket, *request(1), told.set_result)
        assert isinstance(await told, EngineDown)
        assert not service.second.answers
        assert service.admission.requests == 0


async def test_both_may_be_swapped_while_requests_come() -> None:
    """Requests that were answered before a swap are not scored by another pair than theirs."""
    old, new = FakeEngine(2), FakeEngine(3)
    async with both(FakeEngine(), old) as service:
        gate = Gate()
        old.before = gate
        await rank(service, 1)
        await gate.reached()
        await rank(service, 2)
        await service.second_checkpoint.swap(loader(new, "v3"))
        gate.opened.set()
        await until(lambda: results(service) == {"scored": 1, "late": 1})
        await until(old.closed.is_set)
        await service.swap(loader(FakeEngine(4), "v4"))
        assert right(await rank(service, 3), 3, 4)
        await until(lambda: results(service) == {"scored": 2, "late": 1})
        assert new.forwards == [[3]]


@pytest.mark.parametrize(
    ("differs", "words"), [("action_names", (("like", "reply", "report"),)), ("ids", (ACTIONS, "text"))]
)
async def test_one_that_reads_requests_otherwise_shadows_nothing_and_says_why(differs: str, words: Any) -> None:
    async with both(FakeEngine(), loader(FakeEngine(2), "v2", *words)) as service:
        assert right(await rank(service, 1), 1)
        await asyncio.sleep(0.05)
        assert f"({differs})" in service.second.reason
        assert results(service) == {}


async def test_a_load_that_hangs_delays_neither_readiness_nor_a_reload_of_the_first() -> None:
    goes_on = threading.Event()

    def slow(steps: Steps) -> LoadedModel:
        assert goes_on.wait(10)
        return loaded(FakeEngine(2), "v2")

    service = await ready(loader(FakeEngine()), Settings(shadow=EVERY), second=slow)
    assert service.health().ready
    assert (await service.swap(loader(FakeEngine(3), "v3"))).manifest.version == "v3"
    goes_on.set()
    await until(lambda: service.second is not None and service.second.model is not None)
    await service.stop(1.0)


async def test_a_ticket_for_a_second_checkpoint_that_was_given_up_is_told_at_once() -> None:
    """As of `/recommend`, which is admitted before its search."""
    async with both(FakeEngine(), FakeEngine(2), split=HALF) as service:
        second = service.second
        assert second.model is not None
        ticket = service.admit(second.model, candidates=4, history=2, deadline=None)
        service.second_checkpoint.engine_lost("planted")
        with pytest.raises(EngineDown):
            await ranked(service, ticket, *request(1))


async def test_where_none_is_configured_none_is_loaded_and_nothing_is_said() -> None:
    with structlog.testing.capture_logs() as lines:
        service = await ready(loader(FakeEngine()))
        await service._tasks[-1]
        await service.stop(1.0)
    assert service.second is None
    assert [line for line in lines if "second" in line["event"]] == []


async def test_a_request_that_finds_no_room_is_counted_once_and_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.service.shadow.SHADOW_WAITING", 0)
    async with both(FakeEngine(), FakeEngine(2)) as service:
        shadow = service.second_checkpoint._shadow
        assert shadow is not None
        ticket = service.admit(service.model, candidates=4, history=2, deadline=None)
        ticket.context, ticket.items = request(1)
        assert shadow.watched(ticket, print) is print
        assert results(service) == {"full": 1}
        ticket.release()
