"""POST /rank and /rank/batch over a fake engine: replies, headers, deadlines, clients that leave, faults."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from app.admission import AdmissionPolicy
from app.factory import create_app
from app.service import Policies, RankingService
from app.settings import Auth, Batching, Limits, Probes, Settings
from loadtest.fuzz.bodies import in_arrays
from model.engine import Item, Outcome
from tests.app.fakes import FakeEngine, expected, loaded, running
from tests.app.serving import good, served


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served() as (client, _):
        yield client


class Broken(FakeEngine):
    """Gives NaN to one user's request."""

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = super().forward(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if item.context.user_id == 13:
                outcome.scores.logits[:] = np.nan
        return outcomes


# replies


def test_a_reply_holds_what_the_contract_says(client: TestClient) -> None:
    body = good(actions_wanted=..., top_k=..., weights=...)
    reply = client.post("/rank", json=body)
    assert reply.status_code == 200
    content = reply.json()
    assert content["model"] == {"name": "fake", "version": "v1"}
    assert content["actions"] == ["favorite", "reply", "report"]
    assert [row["post_id"] for row in content["candidates"]] == [90, "9223372036854775809", 0]
    assert list(content["candidates"][0]) == ["post_id", "score", "rank", "probabilities", "continuous"]
    assert (content["history_used"], content["history_dropped"]) == (3, 0)
    assert set(content["timings_ms"]) == {"parse", "queue", "forward"}
    assert content["request_id"] == "page-7"


def test_scores_are_the_engines(client: TestClient) -> None:
    from app import features, schema
    from app.schema import Vocabulary

    body = good(actions_wanted=..., top_k=..., weights=...)
    request = schema.check(body, Vocabulary.of(loaded(FakeEngine()).checkpoint.manifest))
    engine = FakeEngine()
    wanted = expected(features.context_of(request, engine.config), features.candidates_of(request, engine.config))
    for shaped in (body, body | {"history": in_arrays(body["history"]), "candidates": in_arrays(body["candidates"])}):
        rows = client.post("/rank", json=shaped).json()["candidates"]
        assert np.array_equal(np.array([row["probabilities"] for row in rows], np.float32), wanted.probabilities)
        assert np.array_equal(
            np.array([row["continuous"]["dwell_time"] for row in rows], np.float32),
            wanted.continuous[:, 0] * np.float32(30),
        )
        assert [row["score"] for row in rows] == [float(p[0]) * 1.0 + float(p[2]) * -2.0 for p in wanted.probabilities]


def test_a_long_history_keeps_its_newest_and_says_so(client: TestClient) -> None:
    before = client.get("/metrics").text
    history = [{"post_id": place + 1, "author_id": 1} for place in range(20)]
    content = client.post("/rank", json=good(history=history)).json()
    assert (content["history_used"], content["history_dropped"]) == (16, 4)
    assert value_of(client.get("/metrics").text, "ranker_history_truncated_total") == 1 + value_of(
        before, "ranker_history_truncated_total"
    )


def value_of(exposition: str, series: str) -> float:
    """One sample, 0 where it is missing."""
    lines = [line for line in exposition.splitlines() if line.startswith(series + " ")]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


# headers


def test_headers_out(client: TestClient) -> None:
    headers = client.post("/rank", json=good()).headers
    assert headers["x-model-version"] == "v1"
    assert headers["x-context-cache"] == "miss"
    stages = [part.split(";dur=") for part in headers["server-timing"].split(", ")]
    assert [name for name, _ in stages] == ["parse", "queue", "forward", "serialize"]
    assert all(float(milliseconds) >= 0 for _, milliseconds in stages)


@pytest.mark.parametrize("path", ["/rank", "/livez", "/nowhere"])
def test_a_request_id_is_echoed_or_made(client: TestClient, path: str) -> None:
    sent = client.get(path, headers={"x-request-id": "Call-7:a/b"})
    assert sent.headers["x-request-id"] == "Call-7:a/b"
    made = {client.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3


def test_a_name_in_the_body_is_the_requests(client: TestClient) -> None:
    assert client.post("/rank", json=good()).headers["x-request-id"] == "page-7"
    both = client.post("/rank", json=good(), headers={"x-request-id": "call-1"})
    assert (both.headers["x-request-id"], both.json()["request_id"]) == ("call-1", "page-7")


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "é", "a\x1b[31m", "<script>"])
def test_a_bad_request_id_is_replaced(client: TestClient, sent: str) -> None:
    reply = client.post("/rank", json=good(request_id=...), headers={"x-request-id": sent.encode()})
    assert reply.status_code == 200
    assert reply.headers["x-request-id"].isalnum()
    assert len(reply.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    "headers",
    [
        {"x-request-timeout-ms": "60000"},
        {"x-envoy-expected-rq-timeout-ms": "60000"},
        {"x-envoy-expected-rq-timeout-ms": "0"},
        {"x-envoy-expected-rq-timeout-ms": "nonsense"},
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        {"content-type": "Application/JSON; Charset=UTF-8"},
        {"content-type": 'application/json; charset="utf-8"'},
        {"content-encoding": "identity"},
    ],
)
def test_headers_that_change_nothing(client: TestClient, headers: dict[str, str]) -> None:
    sent = {"content-type": "application/json"} | headers
    assert client.post("/rank", content=json.dumps(good()), headers=sent).status_code == 200


# batches


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


def test_a_whole_batch_may_fail_one_by_one(client: TestClient) -> None:
    reply = client.post("/rank/batch", json=[{}, {}])
    assert reply.status_code == 200
    assert [item["error"]["status"] for item in reply.json()] == [422, 422]


def test_a_batch_is_not_refused_for_the_room_that_it_takes_up_itself() -> None:
    items = [good(user_id=user, candidates=[{"post_id": n, "author_id": 1} for n in range(10)]) for user in range(1, 9)]
    tight = Policies(AdmissionPolicy(queue_candidates=15, queue_seconds=0))
    for settings in (Settings(), Settings(batching=Batching(max_candidates=10))):
        engine = FakeEngine()
        with served(engine, settings, tight) as (client, service):
            results = client.post("/rank/batch", json=items).json()
            assert all("error" not in result for result in results)
            assert sorted(chain.from_iterable(engine.forwards)) == list(range(1, 9))
            assert service.admission.requests == 0


def test_a_batch_is_refused_for_the_room_that_others_take_up() -> None:
    gate = threading.Event()
    engine = FakeEngine(before=lambda items: (gate.wait(10), None)[1])
    with (
        served(engine, policies=Policies(AdmissionPolicy(queue_candidates=5))) as (client, _),
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


def test_a_batch_whose_client_leaves_is_dropped() -> None:
    gate = threading.Event()
    engine = FakeEngine(before=lambda items: (gate.wait(10), None)[1])

    async def main() -> None:
        async with running(engine) as service:
            app = create_app(Settings(), service)
            first = asyncio.create_task(ask(app, [chunk(json.dumps(good(user_id=1)).encode(), False)]))
            await asyncio.sleep(0.05)
            raw = json.dumps([good(user_id=2), good(user_id=3)]).encode()
            messages = [chunk(raw, False), {"type": "http.disconnect"}]
            assert await ask(app, messages, path="/rank/batch") == []
            gate.set()
            assert (await first)[0]["status"] == 200
            assert engine.forwards == [[1]]
            assert service.admission.requests == 0

    asyncio.run(main())


def test_nan_fails_one_request_alone() -> None:
    with served(Broken()) as (client, _):
        results = client.post("/rank/batch", json=[good(user_id=user) for user in (1, 13, 2)]).json()
        assert [result.get("error", {}).get("code") for result in results] == [None, "non_finite_scores", None]
        alone = client.post("/rank", json=good(user_id=13))
        assert (alone.status_code, alone.json()["code"]) == (500, "non_finite_scores")
        assert "null" not in alone.text
        assert "NaN" not in alone.text


# refusals and faults


def test_a_fault_of_ours_is_a_problem_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the history holds a secret")

    with served() as (client, service):
        monkeypatch.setattr("app.features.context_of", fail)
        reply = client.post("/rank", json=good())
        assert (reply.status_code, reply.json()["code"]) == (500, "internal")
        assert reply.headers["x-request-id"] == reply.json()["request_id"]
        assert "secret" not in reply.text
        assert service.admission.requests == 0  # its place in the queue is free again
        monkeypatch.undo()
        assert client.post("/rank", json=good()).status_code == 200
    out = capsys.readouterr()
    assert "RuntimeError" in out.out + out.err
    assert "secret" not in out.out + out.err


def test_a_refused_request_gives_its_place_back() -> None:
    with served() as (client, service):
        for _ in range(5):
            assert client.post("/rank", json=good(user_id=-1)).status_code == 422
        assert service.admission.requests == 0
        assert service.admission.candidates == 0


def test_before_the_checkpoint_is_there_nothing_is_ranked() -> None:
    gate = threading.Event()
    engine = FakeEngine()

    def load(say: Any) -> Any:
        gate.wait(10)
        return loaded(engine)

    from app.metrics import Metrics

    service = RankingService(load, Policies(), Metrics())
    with TestClient(create_app(Settings(), service)) as client:
        assert client.get("/livez").status_code == 200
        for method, path in (("GET", "/readyz"), ("GET", "/startupz"), ("GET", "/info"), ("POST", "/rank")):
            reply = client.request(method, path, json=good() if method == "POST" else None)
            assert (reply.status_code, reply.json()["code"]) == (503, "not_ready"), path
            assert int(reply.headers["retry-after"]) >= 1
        assert client.get("/openapi.json").status_code == 200
        gate.set()
        asyncio.run(asyncio.sleep(0.1))
        assert client.get("/readyz").status_code == 200
        service.begin_drain()
        reply = client.get("/readyz")
        assert (reply.status_code, reply.json()["code"]) == (503, "draining")
        assert client.get("/startupz").status_code == 200
        assert client.post("/rank", json=good()).status_code == 200  # still served during the delay
        service.refuse_new()
        reply = client.post("/rank", json=good())
        assert (reply.status_code, reply.json()["code"]) == (503, "draining")


# keys

KEYS = {name: hashlib.sha256(f"{name}-key".encode()).hexdigest() for name in ("feed", "search")}


@pytest.fixture(scope="module")
def locked() -> Iterator[TestClient]:
    with served(settings=Settings(auth=Auth(keys=KEYS))) as (client, _):  # type: ignore[arg-type]
        yield client


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic feed-key"}, 401),
        ({"authorization": f"Bearer {KEYS['feed']}"}, 401),  # the hash is no key
        ({"authorization": "Bearer feed-key"}, 200),
        ({"authorization": "bearer search-key"}, 200),
        ({"x-api-key": "feed-key"}, 200),
        ({"x-api-key": "wrong"}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/rank", "/rank/batch"])
def test_keys(locked: TestClient, headers: dict[str, str], status: int, path: str) -> None:
    reply = locked.post(path, json=good() if path == "/rank" else [good()], headers=headers)
    assert reply.status_code == status
    if status == 401:
        assert reply.json()["code"] == "unauthorized"
        assert reply.headers["www-authenticate"] == "Bearer"


def test_probes_and_metrics_need_no_key(locked: TestClient) -> None:
    assert [locked.get(path).status_code for path in ("/livez", "/readyz", "/startupz", "/metrics")] == [200] * 4


# bodies and clients that leave


async def ask(
    app: Any, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, path: str = "/rank"
) -> list[dict[str, Any]]:
    """Play these ASGI messages to a path; after them, silence. Returns what was sent."""
    sent: list[dict[str, Any]] = []
    given = iter(messages)
    silence = asyncio.Event()

    async def receive() -> dict[str, Any]:
        for message in given:
            return message
        await silence.wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [
        (name.encode(), value.encode())
        for name, value in ({"content-type": "application/json"} | (headers or {})).items()
    ]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": raw,
        "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


def chunk(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_long_body_is_refused_while_it_is_read() -> None:
    pulled = 0

    def endless() -> Iterator[dict[str, Any]]:
        nonlocal pulled
        while True:
            pulled += 1
            yield chunk(b" " * 1000, True)

    async def main() -> None:
        async with running(FakeEngine()) as service:
            app = create_app(Settings(limits=Limits(max_body_bytes=10_000)), service)
            sent = await ask(app, endless())  # type: ignore[arg-type]
            assert sent[0]["status"] == 413
            assert pulled == 11
            sent = await ask(app, [], {"content-length": "10001"})
            assert sent[0]["status"] == 413

    asyncio.run(main())


def test_a_body_in_many_chunks_is_one_body() -> None:
    async def main() -> None:
        async with running(FakeEngine()) as service:
            app = create_app(Settings(), service)
            raw = json.dumps(good()).encode()
            pieces = [chunk(raw[place : place + 1], True) for place in range(len(raw))]
            sent = await ask(app, [*pieces, chunk(b"", False)])
            assert sent[0]["status"] == 200

    asyncio.run(main())


def test_a_client_that_leaves_costs_nothing_more() -> None:
    gate = threading.Event()
    engine = FakeEngine(before=lambda items: (gate.wait(10), None)[1])

    async def main() -> None:
        async with running(engine) as service:
            app = create_app(Settings(), service)
            raw = json.dumps(good(user_id=1)).encode()
            first = asyncio.create_task(ask(app, [chunk(raw, False)]))
            await asyncio.sleep(0.05)  # in its forward
            leaver = json.dumps(good(user_id=2)).encode()
            gone = await ask(app, [chunk(leaver, False), {"type": "http.disconnect"}])
            assert gone == []  # nobody to answer
            left_early = await ask(app, [chunk(b"{", True), {"type": "http.disconnect"}])
            assert left_early == []
            gate.set()
            assert (await first)[0]["status"] == 200
            assert engine.forwards == [[1]]  # never computed
            assert service.admission.requests == 0
            text = service.metrics.render().decode()
            assert value_of(text, 'ranker_http_requests_total{code="499",method="POST",route="/rank"}') == 2
            assert value_of(text, 'ranker_cancelled_total{stage="queue"}') == 1
            assert value_of(text, 'ranker_cancelled_total{stage="body"}') == 1

    asyncio.run(main())


def test_a_server_that_cancels_is_no_client_that_leaves() -> None:
    gate = threading.Event()
    engine = FakeEngine(before=lambda items: (gate.wait(10), None)[1])

    async def main() -> None:
        async with running(engine) as service:
            app = create_app(Settings(), service)
            task = asyncio.create_task(ask(app, [chunk(json.dumps(good()).encode(), False)]))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()

    asyncio.run(main())


# operations


def test_info_says_what_runs(client: TestClient) -> None:
    info = client.get("/info").json()
    assert info["model"] == {"name": "fake", "version": "v1"}
    assert info["actions"] == ["favorite", "reply", "report"]
    assert (info["device"], info["dtype"]) == ("cpu", "float32")
    assert info["limits"]["max_candidates"] == 4096
    assert info["architecture"]["history_length"] == 16
    assert len(info["checkpoint"]["digest"]) == 64
    assert {"version", "python", "torch"} <= info["build"].keys()
    assert not {"auth", "admin"} & info["settings"].keys()


def test_paths_make_no_series(client: TestClient) -> None:
    def series() -> set[str]:
        return {line.rsplit(" ", 1)[0] for line in client.get("/metrics").text.splitlines() if line[0] != "#"}

    def visit(number: int) -> None:
        client.request(f"M{number}", f"/{number}")
        client.get(f"/rank/{number}?x={number}", headers={"x-request-id": str(number)})
        client.post("/rank", json=good(user_id=number))

    client.get("/metrics")
    visit(0)
    before = series()
    for number in range(1, 40):
        visit(number)
    assert series() == before
    assert any('route="unmatched"' in name for name in before)
    client.put("/rank")
    assert series() != before  # a series that is new would have been noticed


def test_metrics_move_to_a_port_of_their_own() -> None:
    settings = Settings(probes=Probes(port=9100))

    async def main() -> None:
        async with running(FakeEngine()) as service:
            app = create_app(settings, service)
            side = app.state.side_apps["127.0.0.1", 9100]
            moved = {"/metrics": 404, "/readyz": 200, "/rank": 405}
            there = {"/metrics": 200, "/readyz": 200, "/info": 200, "/rank": 404}
            for given, paths in ((app, moved), (side, there)):
                async with httpx.AsyncClient(transport=httpx.ASGITransport(given), base_url="http://test") as client:
                    for path, status in paths.items():
                        assert (await client.get(path)).status_code == status

    asyncio.run(main())
