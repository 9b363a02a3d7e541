"""POST /rank/batch: every request on its own terms, and room for others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from app.engine.admission import Refusal
from app.errors import Overloaded
from app.http import rank_batch
from app.http.application import create_app
from app.request.codec import Codec, Packed
from app.settings import Batching, Limits, Queue, Settings
from loadtest.generate.samples import server_timing
from model.engine import Item, Outcome
from tests.app.bounds import bounded
from tests.app.fakes import FakeEngine, running, until
from tests.app.serving import ask, chunk, good, served, value_of

pytestmark = pytest.mark.anyio


class Broken(FakeEngine):
    """Gives NaN to one user's request."""

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = super().forward(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if item.context.user_id == 13:
                outcome.scores.logits[:] = np.nan
        return outcomes


def test_each_item_has_a_form_of_its_own(client: TestClient) -> None:
    reply = client.post("/rank/batch", json=[good(), good(reply="columns")])
    assert int(reply.headers["content-length"]) == len(reply.content)
    objects, columns = reply.json()
    told = columns.pop("candidates")
    rows = objects.pop("candidates")
    for name in ("post_id", "score", "rank", "probabilities"):
        assert told[name] == [row[name] for row in rows]
    assert told["continuous"] == {"dwell_time": [row["continuous"]["dwell_time"] for row in rows]}
    assert columns.keys() == objects.keys()


@pytest.mark.parametrize("items", [[good()], [good(), good()], [good(), {}]], ids=["one", "two", "the last fails"])
def test_the_headers_name_the_model_as_the_results_do(client: TestClient, items: list[object]) -> None:
    reply = client.post("/rank/batch", json=items)
    assert reply.status_code == 200
    assert reply.headers["x-model-version"] == reply.json()[0]["model"]["version"]


def test_the_parse_stage_counts_the_splitting_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    split = rank_batch.BatchDecoder.split

    def slow(decoder: Any, body: Any) -> Any:
        time.sleep(0.05)
        return split(decoder, body)

    monkeypatch.setattr(rank_batch.BatchDecoder, "split", slow)
    with served() as (client, _):
        reply = client.post("/rank/batch", json=[good()])
    assert server_timing(reply.headers["server-timing"])["parse"] >= 50


@pytest.mark.parametrize("bare", [True, False])
def test_an_item_that_fails_carries_its_own_problem(client: TestClient, bare: bool) -> None:
    items = [good(user_id=1), good(user_id=-1), "nonsense", good(user_id=2, candidates=[]), good(user_id=3)]
    reply = client.post("/rank/batch", json=items if bare else {"requests": items})
    assert reply.status_code == 200
    results = reply.json() if bare else reply.json()["results"]
    assert [result.get("error", {}).get("code") for result in results] == [None, *["invalid_request"] * 3, None]
    assert results[1]["error"]["errors"][0]["field"] == "user_id"
    alone = [client.post("/rank", json=items[place]).json()["candidates"] for place in (0, 4)]
    assert [results[place]["candidates"] for place in (0, 4)] == alone


@pytest.mark.parametrize("name", [None, "the-batch"])
def test_a_batch_has_no_name_of_one_of_its_requests(client: TestClient, name: str | None) -> None:
    items = [good(request_id="one"), good(request_id="two")]
    reply = client.post("/rank/batch", json=items, headers={} if name is None else {"X-Request-ID": name})
    assert [result["request_id"] for result in reply.json()] == ["one", "two"]
    assert reply.headers["x-request-id"] not in ("one", "two")
    assert name in (None, reply.headers["x-request-id"])


BIG = [good(user_id=user, candidates=[{"post_id": n, "author_id": 1} for n in range(10)]) for user in range(1, 9)]
TIGHT = Queue(max_candidates=15, max_wait_seconds=0)


@pytest.mark.parametrize("batching", [Batching(), Batching(max_candidates=10)])
def test_a_batch_is_not_refused_for_the_room_that_it_takes_up_itself(batching: Batching) -> None:
    engine = FakeEngine()
    with served(engine, Settings(queue=TIGHT, batching=batching)) as (client, service):
        results = client.post("/rank/batch", json=BIG).json()
        assert all("error" not in result for result in results)
        assert sorted(chain.from_iterable(engine.forwards)) == list(range(1, 9))
        assert service.admission.requests == 0


def test_a_batch_that_waits_for_its_own_requests_is_counted_once() -> None:
    """Each try for a place is neither a refusal nor more work that is offered."""
    with served(FakeEngine(), Settings(queue=TIGHT)) as (client, service):
        offered: list[float | None] = []
        observe = service.admission.offered.observe
        service.admission.offered.observe = lambda now, forwards=None: (
            offered.append(forwards) or observe(now, forwards)
        )  # type: ignore[method-assign,func-returns-value]
        client.post("/rank/batch", json=BIG)
        assert value_of(client.get("/metrics").text, 'ranker_rejected_total{reason="queue_full"}') == 0
        assert len(offered) == 8
        service.admission.refusal = lambda job, again=False: Refusal("queue_full", "planted", 1.0)  # type: ignore[method-assign]
        refused = client.post("/rank/batch", json=BIG).json()
        assert [item["error"]["status"] for item in refused] == [429] * 8
        assert value_of(client.get("/metrics").text, 'ranker_rejected_total{reason="queue_full"}') == 8


def test_other_requests_go_between_the_requests_of_a_batch_and_it_waits_for_nothing_else() -> None:
    items = [good(user_id=user) for user in range(1, 9)]
    queued = [0]  # what another task sees, turn by turn

    async def main() -> float:
        async with running(FakeEngine()) as service:

            async def look() -> None:
                while True:
                    queued.append(service.admission.requests)
                    await asyncio.sleep(0)

            looking = asyncio.create_task(look())
            started = time.monotonic()
            messages = [chunk(json.dumps(items).encode(), False)]
            assert (await ask(create_app(Settings(), service), messages, path="/rank/batch"))[0]["status"] == 200
            looking.cancel()
            return time.monotonic() - started

    seconds = asyncio.run(main())
    assert all(later - earlier <= 1 for earlier, later in pairwise(queued))
    assert max(queued) >= 1
    assert seconds < 10


def test_a_batch_is_refused_for_the_room_that_others_take_up() -> None:
    gate = threading.Event()
    engine = FakeEngine(before=lambda items: (gate.wait(10), None)[1])
    with (
        served(engine, Settings(queue=Queue(max_candidates=5))) as (client, _),
        ThreadPoolExecutor() as pool,
    ):
        first = pool.submit(client.post, "/rank", json=good())
        while not value_of(client.get("/metrics").text, "ranker_queue_requests"):
            time.sleep(0.005)
        results = client.post("/rank/batch", json=[good(), good()]).json()
        assert [result["error"]["code"] for result in results] == ["overloaded"] * 2
        alone = client.post("/rank", json=good())
        assert alone.status_code == 429
        assert int(alone.headers["retry-after"]) >= 1
        gate.set()
        assert first.result(10).status_code == 200


async def test_a_batch_whose_client_leaves_is_dropped() -> None:
    gate = threading.Event()
    engine = FakeEngine(before=lambda items: (gate.wait(10), None)[1])
    async with running(engine) as service:
        app = create_app(Settings(), service)
        first = asyncio.create_task(ask(app, [chunk(json.dumps(good(user_id=1)).encode(), False)]))
        await asyncio.sleep(0.05)
        raw = json.dumps([good(user_id=2), good(user_id=3)]).encode()
        messages = [chunk(raw, False), {"type": "http.disconnect"}]
        assert await ask(app, messages, path="/rank/batch") == []
        await until(lambda: service.admission.requests == 1)
        gate.set()
        assert (await first)[0]["status"] == 200
        assert engine.forwards == [[1]]
        assert service.admission.requests == 0


def test_nan_fails_one_request_alone() -> None:
    with served(Broken()) as (client, _):
        results = client.post("/rank/batch", json=[good(user_id=user) for user in (1, 13, 2)]).json()
        assert [result.get("error", {}).get("code") for result in results] == [None, "non_finite_scores", None]
        alone = client.post("/rank", json=good(user_id=13))
        assert (alone.status_code, alone.json()["code"]) == (500, "non_finite_scores")
        assert "null" not in alone.text
        assert "NaN" not in alone.text


def spin(seconds: float) -> None:
    """Hold a core for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def errors(client: TestClient, items: list[object]) -> list[int | None]:
    return [result.get("error", {}).get("status") for result in client.post("/rank/batch", json=items).json()]


def test_candidates_of_a_call_and_of_all_calls_have_room_up_to_a_bound() -> None:
    items: list[object] = [
        good(user_id=user, candidates=[{"post_id": 1, "author_id": 1}] * 4, top_k=...) for user in range(5)
    ]
    with served(settings=Settings(limits=bounded(Limits(), max_batch_candidates=12, batch_candidates=65_536))) as (
        client,
        _,
    ):
        assert errors(client, items) == [None, None, None, 413, 413]
    with served(settings=Settings(limits=bounded(Limits(), batch_candidates=12))) as (client, _):
        for _ in range(3):  # what a call has taken it gives back
            assert errors(client, items) == [None, None, None, 429, 429]
        used = 'ranker_budget_used{budget="batch_candidates"}'
        assert value_of(client.get("/metrics").text, used) == 0
        assert value_of(client.get("/metrics").text, used.replace("used", "refusals_total")) == 6
        assert errors(client, items[:3]) == [None] * 3


@pytest.mark.parametrize(("wait", "rests"), [(time.sleep, False), (spin, True)], ids=["busy machine", "dear"])
def test_a_batch_rests_for_the_processor_time_that_a_request_took(
    monkeypatch: pytest.MonkeyPatch, wait: Callable[[float], None], rests: bool
) -> None:
    seen: list[float] = []
    for kind, step in ((Codec, "read"), (Packed, "unpack")):
        real = getattr(kind, step)
        monkeypatch.setattr(kind, step, lambda *given, real=real: (wait(0.02), real(*given))[1])
    monkeypatch.setattr("app.http.rank_batch.rest_seconds", lambda held: seen.append(held) or 0.0)
    with served() as (client, _):
        assert errors(client, [good(user_id=user) for user in range(4)]) == [None] * 4
    assert len(seen) >= 4
    assert (sum(held > 0.035 for held in seen) == 4) == rests
    assert rests or max(seen) < 0.01


def test_between_requests_of_a_batch_that_hold_the_loop_others_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.http.rank_batch.rest_seconds", lambda held: 0.05)
    with served() as (client, _):
        began = time.monotonic()
        assert errors(client, [good(user_id=user) for user in range(4)]) == [None] * 4
        assert time.monotonic() - began > 4 * 0.05


@pytest.mark.parametrize("alone", [False, True])
def test_what_an_engine_process_refuses_beside_the_rest_of_its_batch_is_tried_again(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process there is no room before it is sent; an engine process says so afterwards. By itself it is refused."""
    real, tried, users = rank_batch.ranked, list[int](), [1] if alone else [1, 2, 3]

    async def ranked(service: Any, ticket: Any, context: Any, candidates: Any) -> Any:
        tried.append(context.user_id)
        if tried == [1]:
            await until(lambda: len(tried) == len(users))
            ticket.release()
            raise Overloaded("planted", retry_after_seconds=1.0)
        await asyncio.sleep(0.2)  # the others are still under way when the first is refused
        return await real(service, ticket, context, candidates)

    monkeypatch.setattr(rank_batch, "ranked", ranked)
    with served() as (client, service):
        admit, again = service.admit, list[bool]()
        monkeypatch.setattr(service, "admit", lambda *a, **b: (again.append(b["again"]), admit(*a, **b))[1])
        reply = client.post("/rank/batch", json={"requests": [good(user_id=user) for user in users]})
        codes = [result.get("error", {}).get("code") for result in reply.json()["results"]]
        assert codes == (["overloaded"] if alone else [None] * 3)
        assert sorted(tried) == sorted(users + ([] if alone else [1]))
        assert again == [False] * len(users) + ([] if alone else [True]), "it is not asked for a second time"
        assert service.admission.requests == 0
