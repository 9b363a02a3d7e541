"""POST /context, and handles in place of user and history: equal answers, refusals, counters. Of whose key: tests/e2e/test_contexts.py."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from app.settings import Limits, Queue
from tests.support.asgi import served
from tests.support.bodies import good
from tests.support.fakes import FakeEngine, Gate
from tests.support.rankers import figure

VIEWER = {name: good()[name] for name in ("user_id", "history")}
REST = {name: value for name, value in good().items() if name not in VIEWER}
UNKNOWN = "0" * 32
JSON = {"content-type": "application/json"}


def test_a_context_is_a_ranking_without_candidates() -> None:
    engine = FakeEngine()
    with served(engine) as (client, ranker):
        reply = client.post("/context", json={**VIEWER, "request_id": "ahead"})
        body = reply.json()
        assert (reply.status_code, reply.headers["X-Request-ID"]) == (200, "ahead")
        assert body | {"timings_ms": 0} == {
            "model": {"name": "fake", "version": "v1"}, "history_used": 3, "history_dropped": 0, "timings_ms": 0,
            "context": reply.headers["X-Context"], "request_id": "ahead",
        }  # fmt: skip
        assert {*body["timings_ms"]} == {"parse", "queue", "forward"}
        assert engine.chunks == [[0]]
        whole = client.post("/rank", json={**REST, **VIEWER}).json()
        named = client.post("/rank", json={**REST, "context": body["context"]}).json()
        assert named | {"timings_ms": 0} == whole | {"timings_ms": 0}
        assert figure(ranker, "ranker_queue_requests") == 0
        assert figure(ranker, 'ranker_context_handles_total{result="found"}') == 1
        assert figure(ranker, 'ranker_http_requests_total{code="200",method="POST",route="/context"}') == 1


def test_a_long_history_says_how_much_of_it_is_kept() -> None:
    events = [{"post_id": number, "author_id": 1} for number in range(1, 21)]
    viewer, shown = {"user_id": 7, "history": events}, {"candidates": REST["candidates"]}
    with served() as (client, ranker):
        body = client.post("/context", json=viewer).json()
        assert (body["history_used"], body["history_dropped"]) == (16, 4)
        whole = client.post("/rank", json={**shown, **viewer}).json()
        named = client.post("/rank", json={**shown, "context": body["context"]}).json()
        assert named | {"timings_ms": 0} == whole | {"timings_ms": 0}
        newest = client.post("/context", json={"user_id": 7, "history": events[4:]}).json()
        assert newest["history_dropped"] == 0
        assert newest["context"] != body["context"], "the model reads the same, but nothing came before it"
        assert figure(ranker, "ranker_history_truncated_total") == 2


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "malformed_json"),
        (b"{}", 422, "invalid_request"),
        (b'{"user_id": 7, "candidates": []}', 422, "invalid_request"),
        (b'{"user_id": 7, "context": "%s"}' % UNKNOWN.encode(), 422, "invalid_request"),
        (b'{"user_id": "x"}', 422, "invalid_request"),
        (b'{"user_id": 7, "request_id": " "}', 422, "invalid_request"),
        (b'{"user_id": 7, "history": null}', 422, "invalid_request"),
        (json.dumps({"user_id": 7, "history": [{"post_id": 1, "author_id": 1}] * 40}).encode(), 413, "too_large"),
    ],
)
def test_what_is_wrong_with_a_context_is_said(body: bytes, status: int, code: str) -> None:
    with served(limits=Limits(max_history=39)) as (client, _):
        reply = client.post("/context", content=body, headers=JSON)
        assert (reply.status_code, reply.json()["code"]) == (status, code)


@pytest.mark.parametrize("path", ["/rank", "/rank/batch", "/rank/fake"])
def test_an_unknown_handle_is_told(path: str) -> None:
    body: Any = {**REST, "context": UNKNOWN}
    with served() as (client, ranker):
        reply = client.post(path, json=[body] if path == "/rank/batch" else body)
        problem = reply.json()[0]["error"] if path == "/rank/batch" else reply.json()
        assert (problem["status"], problem["code"]) == (412, "context_unknown")
        assert UNKNOWN not in reply.text
        assert figure(ranker, "ranker_queue_requests") == 0
        assert figure(ranker, 'ranker_context_handles_total{result="unknown"}') == 1


def test_a_context_waits_and_is_refused_as_a_ranking_is() -> None:
    gate = Gate()
    with served(FakeEngine(before=gate), queue=Queue(max_requests=1)) as (client, ranker):
        with ThreadPoolExecutor(1) as beside:
            first = beside.submit(client.post, "/context", json=VIEWER)
            assert gate.entered.wait(10)
            assert figure(ranker, "ranker_queue_requests") == 1
            refused = client.post("/context", json={"user_id": 8})
            gate.opened.set()
            assert first.result().status_code == 200
        assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
        assert "Retry-After" in refused.headers
