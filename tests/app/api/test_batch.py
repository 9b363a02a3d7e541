"""POST /rank/batch: every request on its own terms, one forward's worth at a time, and room for others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from app.main import create_app
from app.settings import Batching, Deadline, Limits, Queue
from model.engine import Item, Outcome
from tests.support import rankers
from tests.support.asgi import ADDRESS, served
from tests.support.bodies import good
from tests.support.fakes import FakeEngine, Gate
from tests.support.rankers import figure

JSON = {"content-type": "application/json"}
BIG = [good(user_id=user, candidates=[{"post_id": n, "author_id": 1} for n in range(10)]) for user in range(1, 9)]
TIGHT = Queue(max_candidates=15, max_wait_seconds=0)


class Broken(FakeEngine):
    """Gives NaN to user 13."""

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = super().forward(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if item.context.user_id == 13:
                outcome.scores.logits[:] = np.nan
        return outcomes


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served() as (client, _):
        yield client


def codes_of(client: TestClient, items: Sequence[Any]) -> list[str | None]:
    reply = client.post("/rank/batch", json=items)
    assert reply.status_code == 200, reply.text
    return [result.get("error", {}).get("code") for result in reply.json()]


@pytest.mark.parametrize("is_bare", [True, False])
def test_a_request_that_fails_carries_its_own_problem(client: TestClient, is_bare: bool) -> None:
    items = [good(user_id=1), good(user_id=-1), "nonsense", good(user_id=2, candidates=[]), good(user_id=3)]
    reply = client.post("/rank/batch", json=items if is_bare else {"requests": items})
    assert reply.status_code == 200
    results = reply.json() if is_bare else reply.json()["results"]
    assert [result.get("error", {}).get("code") for result in results] == [None, *["invalid_request"] * 3, None]
    assert results[1]["error"]["errors"][0]["field"] == "user_id"
    alone = [client.post("/rank", json=items[place]).json()["candidates"] for place in (0, 4)]
    assert [results[place]["candidates"] for place in (0, 4)] == alone


@pytest.mark.parametrize(
    "bad", [b'{"user_id":"\xff"}', b'{"user_id":NaN}', b'{"user_id":1e999}', b'{"user_id":"\\ud800"}', b"{"]
)
def test_one_request_that_is_no_json_refuses_the_whole_body(client: TestClient, bad: bytes) -> None:
    whole = json.dumps(good()).encode()
    for body in (b"[%b,%b]" % (whole, bad), b'{"requests":[%b,%b]}' % (bad, whole)):
        reply = client.post("/rank/batch", content=body, headers=JSON)
        assert (reply.status_code, reply.json()["code"]) == (400, "malformed_json")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        *(
            (body, 422)
            for body in (b"[]", b"{}", b'"x"', b'{"requests":1}', b'{"requests":[]}', b'{"requests":[1],"x":1}')
        ),
        *((body, 400) for body in (b"", b'"x', b"[1] x", b"[1,01]", b"[" * 9000, b'{"requests":1,')),
        (b"[%b1]" % (b"1," * 64), 413),
    ],
)
def test_what_is_no_batch_is_refused_as_a_whole(client: TestClient, body: bytes, status: int) -> None:
    assert client.post("/rank/batch", content=body, headers=JSON).status_code == status


def test_each_request_has_a_form_and_a_name_of_its_own(client: TestClient) -> None:
    items = [good(request_id="one"), good(request_id="two", reply="columns")]
    objects, columns = client.post("/rank/batch", json=items).json()
    assert (objects["request_id"], columns["request_id"]) == ("one", "two")
    for name in ("post_id", "score", "rank", "probabilities"):
        assert columns["candidates"][name] == [row[name] for row in objects["candidates"]]
    dwell = [row["continuous"]["dwell_time"] for row in objects["candidates"]]
    assert columns["candidates"]["continuous"] == {"dwell_time": dwell}
    assert columns.keys() == objects.keys()


@pytest.mark.parametrize("items", [[good()], [good(), good()], [good(), {}]], ids=["one", "two", "the last fails"])
def test_the_headers_name_the_model_as_the_results_do(client: TestClient, items: list[Any]) -> None:
    reply = client.post("/rank/batch", json=items)
    assert reply.headers["x-model-version"] == reply.json()[0]["model"]["version"]
    scored = [result for result in reply.json() if "error" not in result]
    assert reply.headers.get("x-context") == (scored[0]["context"] if len(scored) == 1 else None)


def test_a_batch_of_failures_has_headers_too(client: TestClient) -> None:
    reply = client.post("/rank/batch", json=[{}, {}])
    assert (reply.status_code, reply.headers["x-model-version"], reply.headers["x-context-cache"]) == (
        200,
        "v1",
        "miss",
    )


def test_nan_fails_one_request_alone() -> None:
    with served(Broken()) as (client, _):
        assert codes_of(client, [good(user_id=user) for user in (1, 13, 2)]) == [None, "non_finite_scores", None]
        alone = client.post("/rank", json=good(user_id=13))
        assert (alone.status_code, alone.json()["code"]) == (500, "non_finite_scores")
        assert "null" not in alone.text
        assert "NaN" not in alone.text


@pytest.mark.parametrize("batching", [Batching(), Batching(max_candidates=10)])
def test_a_batch_is_not_refused_because_of_its_own_requests(batching: Batching) -> None:
    engine = FakeEngine()
    with served(engine, queue=TIGHT, batching=batching) as (client, ranker):
        assert codes_of(client, BIG) == [None] * 8
        assert sorted(chain.from_iterable(engine.forwards)) == [*range(1, 9)]
        assert figure(ranker, "ranker_queue_requests") == 0


def test_a_batch_is_refused_for_the_room_that_others_take_up() -> None:
    gate = Gate()
    with served(FakeEngine(before=gate), queue=Queue(max_candidates=5)) as (client, _), ThreadPoolExecutor() as pool:
        first = pool.submit(client.post, "/rank", json=good())
        assert gate.entered.wait(10)
        assert codes_of(client, [good(), good()]) == ["overloaded"] * 2
        gate.opened.set()
        assert first.result(10).status_code == 200


def test_candidates_of_one_call_and_of_all_calls_are_bounded() -> None:
    items = [good(user_id=user, candidates=[{"post_id": 1, "author_id": 1}] * 4, top_k=...) for user in range(6)]
    with served(limits=Limits(max_candidates=5)) as (client, _):  # 20 in a call, 80 in all calls
        for _ in range(5):  # what a call has taken it gives back
            assert codes_of(client, items) == [None] * 5 + ["too_large"]
    gate = Gate()
    with (
        served(FakeEngine(before=gate), limits=Limits(max_candidates=5)) as (client, ranker),
        ThreadPoolExecutor() as pool,
    ):
        calls = [pool.submit(codes_of, client, items[:5]) for _ in range(4)]
        while figure(ranker, "ranker_queue_requests") < 20:
            time.sleep(0.005)
        assert codes_of(client, items[:1]) == ["overloaded"]
        gate.opened.set()
        assert [call.result(10) for call in calls] == [[None] * 5] * 4
        assert codes_of(client, items[:1]) == [None]


def test_all_requests_have_one_deadline() -> None:
    with served(
        FakeEngine(before=lambda items: time.sleep(0.2)),
        batching=Batching(max_requests=1, max_candidates=3),
        deadline=Deadline(default_seconds=0.5),
    ) as (client, _):
        codes = codes_of(client, [good(user_id=user) for user in range(1, 9)])
    assert codes[0] is None
    assert codes[-1] == "deadline_exceeded"


def test_other_requests_go_between_the_requests_of_a_batch() -> None:
    items = [good(user_id=user) for user in range(1, 9)]
    queued = [0.0]  # what another task sees, turn by turn

    async def main() -> None:
        async with rankers.running(FakeEngine()) as ranker:

            async def look() -> None:
                while True:
                    queued.append(ranker.admission.requests)
                    await asyncio.sleep(0)

            transport = httpx.ASGITransport(create_app(ranker.settings, ranker))
            async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
                looking = asyncio.create_task(look())
                assert (await client.post("/rank/batch", json=items)).status_code == 200
                looking.cancel()

    asyncio.run(main())
    assert all(later - earlier <= 1 for earlier, later in pairwise(queued)), [q for q in queued if q]
    assert max(queued) >= 1


def test_requests_of_a_batch_share_forwards() -> None:
    entered = threading.Event()

    def before(items: Sequence[Item]) -> None:
        if not entered.is_set():
            entered.set()
            time.sleep(0.2)

    engine = FakeEngine(before=before)
    with served(engine) as (client, _):
        assert codes_of(client, [good(user_id=user) for user in range(1, 9)]) == [None] * 8
    assert len(engine.forwards) < 8
