"""POST /context and handles over HTTP, around the fake engine: statuses, admission, counters, log lines, two checkpoints."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from app.settings import Auth, Limits, Queue, Settings
from tests.app.fakes import FakeEngine, Gate, loader
from tests.app.serving import good, listening, port_of, served, value_of

VIEWER = {name: good()[name] for name in ("user_id", "history")}
REST = {name: value for name, value in good().items() if name not in VIEWER}
UNKNOWN = "0" * 32


def metric(client: TestClient, series: str) -> float:
    return value_of(client.get("/metrics").text, series)


def test_a_context_is_a_ranking_without_candidates() -> None:
    engine = FakeEngine()
    with served(engine) as (client, service):
        reply = client.post("/context", json={**VIEWER, "request_id": "ahead"}, headers={"X-Model-Version": "v1"})
        body = reply.json()
        assert (reply.status_code, reply.headers["X-Request-ID"]) == (200, "ahead")
        assert body | {"timings_ms": 0} == {
            "model": {"name": "fake", "version": "v1"}, "history_used": 3, "history_dropped": 0, "timings_ms": 0,
            "context": reply.headers["X-Context"], "request_id": "ahead",
        }  # fmt: skip
        assert set(body["timings_ms"]) == {"parse", "queue", "forward"}
        assert engine.chunks == [[0]]
        whole, named = (
            client.post("/rank", json={**REST, **who}).json() for who in (VIEWER, {"context": body["context"]})
        )
        assert named | {"timings_ms": 0} == whole | {"timings_ms": 0}
        assert (service.admission.requests, service.admission.context_tokens) == (0, 0)
        assert metric(client, 'ranker_context_handles_total{result="found"}') == 1
        assert metric(client, 'ranker_http_requests_total{code="200",method="POST",route="/context"}') == 1


def test_a_long_history_says_how_much_of_it_is_kept() -> None:
    events = [{"post_id": number, "author_id": 1} for number in range(1, 21)]
    with served() as (client, _):
        viewer = {"user_id": 7, "history": events}
        body = client.post("/context", json=viewer).json()
        assert (body["history_used"], body["history_dropped"]) == (16, 4)
        candidates = {"candidates": REST["candidates"]}
        whole, named = (
            client.post("/rank", json={**candidates, **who}).json() for who in (viewer, {"context": body["context"]})
        )
        assert named | {"timings_ms": 0} == whole | {"timings_ms": 0}
        newest = client.post("/context", json={"user_id": 7, "history": events[4:]}).json()
        assert newest["history_dropped"] == 0
        assert newest["context"] != body["context"], "the model reads the same, but nothing came before it"
        assert metric(client, "ranker_history_truncated_total") == 2


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "malformed_json"),
        (b"{}", 422, "invalid_request"),
        (b'{"user_id": 7, "candidates": []}', 422, "invalid_request"),
        (b'{"user_id": 7, "context": "%s"}' % UNKNOWN.encode(), 422, "invalid_request"),
        (json.dumps({"user_id": 7, "history": [{"post_id": 1, "author_id": 1}] * 40}).encode(), 413, "too_large"),
    ],
)
def test_what_is_wrong_with_a_context_is_said(body: bytes, status: int, code: str) -> None:
    with served(settings=Settings(limits=Limits(max_history=39))) as (client, _):
        reply = client.post("/context", content=body, headers={"Content-Type": "application/json"})
        assert (reply.status_code, reply.json()["code"]) == (status, code)


def test_headers_are_read_as_elsewhere() -> None:
    kind = {"Content-Type": "application/json"}
    with served() as (client, _):
        for headers, status in (({**kind, "X-Model-Version": "none"}, 404),):
            assert client.post("/context", content=b'{"user_id": 7}', headers=headers).status_code == status, headers
        assert client.get("/context").status_code == 405


@pytest.mark.parametrize(
    "path", ["/rank", "/recommend", "/retrieve", "/explain", "/rank/batch", "/v2/models/fake/infer"]
)
def test_an_unknown_handle_is_412_and_the_table_knows_it(path: str) -> None:
    with served(settings=Settings(explore={"enabled": True})) as (client, service):  # type: ignore[arg-type]
        body: Any = {**REST, "context": UNKNOWN}
        if path == "/explain":
            body["explain"] = [90]
        if path == "/rank/batch":
            body = [body]
        if path.startswith("/v2"):
            inputs = [
                {"name": f"candidates.{name}", "datatype": "UINT64", "shape": [1], "data": [9]}
                for name in ("post_id", "author_id")
            ]
            body = {"inputs": inputs, "parameters": {"context": UNKNOWN}}
        if path in ("/recommend", "/retrieve"):
            assert client.post(path, json={"context": UNKNOWN}).status_code == 503, "nothing is retrieved here"
            return
        reply = client.post(path, json=body)
        problem = reply.json()[0]["error"] if path == "/rank/batch" else reply.json()
        assert (problem["status"], problem["code"]) == (412, "context_unknown")
        assert UNKNOWN not in reply.text
        assert service.admission.requests == 0
        assert metric(client, 'ranker_context_handles_total{result="unknown"}') == 1


def test_a_context_waits_and_is_refused_as_a_ranking() -> None:
    gate = Gate()
    with served(FakeEngine(before=gate), Settings(queue=Queue(max_requests=1))) as (client, service):
        with ThreadPoolExecutor(1) as beside:
            first = beside.submit(client.post, "/context", json=VIEWER)
            assert gate.entered.wait(10)
            assert (service.admission.requests, service.admission.context_tokens) == (1, 4)
            refused = client.post("/context", json={"user_id": 8})
            gate.opened.set()
            assert first.result().status_code == 200
        assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
        assert "Retry-After" in refused.headers
        service.refuse_new()
        refused = client.post("/context", json=VIEWER)
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")


def test_a_handle_belongs_to_its_api_key() -> None:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("one", "two")}
    with served(settings=Settings(auth=Auth(keys=digests))) as (client, _):
        assert client.post("/context", json=VIEWER).status_code == 401
        own, other = ({"X-API-Key": name} for name in ("one", "two"))
        handle = client.post("/context", json=VIEWER, headers=own).json()["context"]
        body = {**REST, "context": handle}
        assert [client.post("/rank", json=body, headers=key).status_code for key in (own, other)] == [200, 412]


def test_each_of_two_checkpoints_has_its_own_handles() -> None:
    settings = Settings(port=0, shadow={"checkpoint": "second", "share": 0}, split={"users": 0.5, "experiment": "x"})  # type: ignore[arg-type]
    with listening(settings=settings, second=loader(FakeEngine(2), "v2")) as server:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port_of(server)}")
        with client:
            replies = [client.post("/context", json={"user_id": user}) for user in range(1, 30)]
            versions = [reply.headers["X-Model-Version"] for reply in replies]
            assert set(versions) == {"v1", "v2"}
            for reply, version in zip(replies, versions, strict=True):
                body = {"candidates": REST["candidates"], "context": reply.json()["context"]}
                statuses = [
                    client.post("/rank", json=body, headers={"X-Model-Version": asked} if asked else {}).status_code
                    for asked in (version, "v1" if version == "v2" else "v2", "")
                ]
                assert statuses == [200, 412, 200 if version == "v1" else 412]
