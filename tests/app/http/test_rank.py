"""POST /rank over a fake engine: what a reply holds, headers in and out."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from app.request.codec import Codec, Packed
from loadtest.fuzz.bodies import in_arrays
from tests.app.fakes import FakeEngine, expected
from tests.app.serving import checked, good, served, value_of


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
    from app.request import features

    body = good(actions_wanted=..., top_k=..., weights=...)
    request = checked(body)
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


@pytest.mark.parametrize(("path", "body"), [("/rank", good()), ("/rank/batch", [good()])])
def test_durations_are_those_of_this_call(path: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled codec reads and writes it, each step of which takes its time here."""
    work_ms = 30.0
    for kind, step in ((Codec, "read"), (Packed, "unpack"), (Codec, "write")):
        real = getattr(kind, step)
        monkeypatch.setattr(kind, step, lambda *given, real=real: (time.sleep(work_ms / 1000), real(*given))[1])
    with served(FakeEngine(before=lambda items: time.sleep(work_ms / 1000))) as (client, _):
        started = time.perf_counter()
        reply = client.post(path, json=body)
        wall_ms = (time.perf_counter() - started) * 1000
        exposition = client.get("/metrics").text
    stages = dict(part.split(";dur=") for part in reply.headers["server-timing"].split(", "))
    spent = {name: float(milliseconds) for name, milliseconds in stages.items()}
    assert list(spent) == ["parse", "queue", "forward", "serialize"]
    assert min(spent.values()) > 0
    assert min(spent["parse"] / 2, spent["forward"], spent["serialize"]) >= work_ms
    assert sum(spent.values()) <= wall_ms
    told = (reply.json() if path == "/rank" else reply.json()[0])["timings_ms"]
    assert (told["queue"], told["forward"]) == (spent["queue"], spent["forward"])
    assert work_ms <= told["parse"] <= spent["parse"]
    labels = f'{{method="POST",route="{path}"}}'
    counted_ms = value_of(exposition, f"ranker_http_request_duration_seconds_sum{labels}") * 1000
    assert sum(spent.values()) <= counted_ms <= wall_ms
    for stage, milliseconds in spent.items():
        observed = value_of(exposition, f'ranker_stage_duration_seconds_sum{{stage="{stage}"}}') * 1000
        assert observed == pytest.approx(milliseconds, abs=0.01), stage


@pytest.mark.parametrize("path", ["/rank", "/livez", "/nowhere"])
def test_a_request_id_is_echoed_or_made(client: TestClient, path: str) -> None:
    sent = client.get(path, headers={"x-request-id": "Call-7:a/b"})
    assert sent.headers["x-request-id"] == "Call-7:a/b"
    made = {client.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3


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
    def ranked(body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        reply = client.post("/rank", content=json.dumps(body), headers={"content-type": "application/json"} | headers)
        assert reply.status_code == 200
        return {name: value for name, value in reply.json().items() if name != "timings_ms"}

    assert ranked(good(), headers) == ranked(good(), {})
    assert ranked(good(user_id=5), headers) != ranked(good(), {})


def test_a_reply_in_pieces_is_whole(client: TestClient) -> None:
    posts = {"post_id": list(range(1, 2501)), "author_id": [1] * 2500}
    rows = client.post("/rank", json=good(candidates=posts, top_k=...)).json()["candidates"]
    assert [row["post_id"] for row in rows] == posts["post_id"]
    assert sorted(row["rank"] for row in rows) == posts["post_id"]
