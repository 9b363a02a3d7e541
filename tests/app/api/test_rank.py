"""POST /rank: what a reply holds, what is refused and how. Equal bits on every way in: tests/e2e."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from msgspec.json import Decoder
from msgspec.structs import replace as remade
from starlette.testclient import TestClient

from app import features, schema
from app.queue.loading import LoadedModel
from app.queue.runners import Steps
from app.service.local import LocalService
from app.settings import Limits
from app.vocabulary import NO_WEIGHTS, Vocabulary
from model.engine import Item
from tests.support import strategies
from tests.support.asgi import served
from tests.support.bodies import good, in_columns
from tests.support.fakes import CONFIG, FakeEngine, expected, fake_loader, fake_model
from tests.support.rankers import figure

MARK = "zq9marker"
JSON = {"content-type": "application/json"}
POST: dict[str, Any] = {"post_id": 1, "author_id": 2}
PLAIN = good(actions_wanted=..., top_k=..., weights=...)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[TestClient, LocalService]]:
    with served(limits=Limits(max_body_bytes=200_000, max_candidates=3000, max_history=200)) as both:
        yield both


@pytest.fixture(scope="module")
def client(running: tuple[TestClient, LocalService]) -> TestClient:
    return running[0]


def rows_of(client: TestClient, body: Any, path: str = "/rank") -> list[dict[str, Any]]:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    rows: list[dict[str, Any]] = reply.json()["candidates"]
    return rows


def test_a_reply_holds_what_the_contract_says(client: TestClient) -> None:
    reply = client.post("/rank", json=PLAIN)
    content = reply.json()
    assert reply.headers["content-type"] == "application/json"
    assert content["model"] == {"name": "fake", "version": "v1"}
    assert content["actions"] == ["favorite", "reply", "report"]
    assert [row["post_id"] for row in content["candidates"]] == [90, "9223372036854775809", 0]
    assert [*content["candidates"][0]] == ["post_id", "score", "rank", "probabilities", "continuous"]
    assert (content["history_used"], content["history_dropped"]) == (3, 0)
    assert {*content["timings_ms"]} == {"parse", "queue", "forward"}
    assert content["request_id"] == reply.headers["x-request-id"] == "page-7"
    assert content["context"] == reply.headers["x-context"]
    assert (reply.headers["x-model-version"], reply.headers["x-context-cache"]) == ("v1", "miss")


def test_scores_are_the_engines_in_either_form(client: TestClient) -> None:
    asked = schema.decode(Decoder(schema.RankRequest), json.dumps(PLAIN).encode())
    words = Vocabulary.of(fake_model(FakeEngine()).checkpoint.manifest)
    wanted = expected(features.context_of(asked, words, CONFIG), features.check(asked, words, CONFIG).candidates)
    for body in (PLAIN, strategies.columnar(PLAIN)):
        rows = rows_of(client, body)
        assert np.array_equal(np.array([row["probabilities"] for row in rows], np.float32), wanted.probabilities)
        assert [row["score"] for row in rows] == [float(p[0]) * 1.0 + float(p[2]) * -2.0 for p in wanted.probabilities]


def test_durations_are_those_of_this_call() -> None:
    work_ms = 30.0
    with served(FakeEngine(before=lambda items: time.sleep(work_ms / 1000))) as (client, ranker):
        started = time.perf_counter()
        reply = client.post("/rank", json=good())
        wall_ms = (time.perf_counter() - started) * 1000
        stages = dict(part.split(";dur=") for part in reply.headers["server-timing"].split(", "))
        spent = {name: float(milliseconds) for name, milliseconds in stages.items()}
        assert [*spent] == ["read", "parse", "queue", "forward", "serialize"]
        assert min(spent.values()) > 0
        assert spent["forward"] >= work_ms
        assert sum(spent.values()) <= wall_ms
        assert reply.json()["timings_ms"] == {name: spent[name] for name in ("parse", "queue", "forward")}
        for stage, milliseconds in spent.items():
            counted = figure(ranker, f'ranker_stage_duration_seconds_sum{{stage="{stage}"}}') * 1000
            assert counted == pytest.approx(milliseconds, abs=0.01), stage


def test_waiting_for_a_busy_event_loop_counts_as_waiting() -> None:
    waited_ms, portals = 150.0, list[Any]()

    def before(items: Sequence[Item]) -> None:
        for portal in portals:  # when the scores come, the loop does something else
            portal.start_task_soon(partial(time.sleep, waited_ms / 1000))

    with served(FakeEngine(before=before)) as (client, _):
        portals.append(client.portal)
        reply = client.post("/rank", json=good())
        assert reply.json()["timings_ms"]["queue"] > 0.5 * waited_ms > reply.json()["timings_ms"]["forward"]


def test_a_model_is_asked_for_by_its_path(client: TestClient) -> None:
    for path in ("/rank/fake", "/rank/fake@v1"):
        assert rows_of(client, PLAIN, path) == rows_of(client, PLAIN)
    for path in ("/rank/fake@v2", "/rank/fake@", "/rank/@v1", "/rank/v1", f"/rank/{MARK}"):
        reply = client.post(path, json=PLAIN)
        assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
        assert MARK not in reply.text


def test_weights_that_are_all_zero_are_warned_of() -> None:
    model = fake_model(FakeEngine())
    manifest = remade(model.checkpoint.manifest, score_weights={}, version="v0")

    def load(path: Path, steps: Steps) -> LoadedModel:
        steps.warming()
        return LoadedModel(replace(model.checkpoint, manifest=manifest), model.engine)

    with served(load=load) as (client, _), structlog.testing.capture_logs() as lines:
        for _ in range(2):
            content = client.post("/rank", json=good(weights=...)).json()
            assert [row["score"] for row in content["candidates"]] == [0.0, 0.0, 0.0]
            assert "relabel --score-weights" in content["warnings"][0]
        for weights in ({"favorite": 1}, "default"):
            assert "warnings" not in client.post("/rank", json=good(weights=weights)).json()
        for weights in ({}, {"favorite": 0}):  # the caller's own: told, and not logged
            assert client.post("/rank", json=good(weights=weights)).json()["warnings"] == [NO_WEIGHTS]
    assert len([line for line in lines if line["event"] == "scores_mean_nothing"]) == 1


# what is refused


def test_a_refused_ranking_keeps_the_name_in_its_body() -> None:
    with served() as (client, _), structlog.testing.capture_logs() as lines:
        unknown_action = good(request_id="page-9", weights={"unheard_of": 1})
        reply = client.post("/rank", json=unknown_action)
        assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")
        assert reply.json()["request_id"] == reply.headers["x-request-id"] == "page-9"
        named = client.post("/rank", json=unknown_action, headers={"x-request-id": "from-the-header"})
        assert named.json()["request_id"] == "from-the-header"
    assert [line["request_id"] for line in lines if line["event"] == "request"] == ["page-9", "from-the-header"]


def candidate(**changes: Any) -> dict[str, Any]:
    return good(candidates=[POST, POST | changes])


def event(**changes: Any) -> dict[str, Any]:
    return good(history=[POST | changes])


INVALID: dict[str, tuple[Any, str]] = {
    "not an object": ([MARK], ""),
    "null": (None, ""),
    "user missing": (good(user_id=...), "user_id"),
    "user 2^64": (good(user_id=2**64), "user_id"),
    "user text": (good(user_id=MARK), "user_id"),
    "unknown field": (good(**{MARK: 1}), ""),
    "unknown field that looks like a path": (good(**{f"a` - at `$.{MARK}": 1}), ""),
    "no candidates": (good(candidates=[]), "candidates"),
    "candidates null": (good(candidates=None), "candidates"),
    "candidates empty arrays": (good(candidates={"post_id": [], "author_id": []}), "candidates"),
    "candidate no object": (good(candidates=[POST, MARK]), "candidates[1]"),
    "candidate unknown field": (candidate(**{MARK: 1}), "candidates[1]"),
    "candidate unknown field that looks like a path": (good(candidates=[{f"a` - at `$.{MARK}": 1}]), "candidates[0]"),
    "arrays unknown field": (good(candidates={"post_id": [1], MARK: [1]}), "candidates"),
    "candidates missing": (good(candidates=...), "candidates"),
    "candidate author missing": (good(candidates=[POST, {"post_id": 1}]), "candidates[1].author_id"),
    "candidate post text": (candidate(post_id=MARK), "candidates[1].post_id"),
    "candidate created in ms": (candidate(created_at=1_779_990_000_000), "candidates[1].created_at"),
    "candidate with dwell": (candidate(dwell_time=3), "candidates[1]"),
    "arrays unequal": (good(candidates={"post_id": [1, 2], "author_id": [1]}), "candidates"),
    "arrays of which one is empty": (
        good(candidates={"post_id": [1], "author_id": [1], "created_at": []}),
        "candidates",
    ),
    "arrays null entry": (good(candidates={"post_id": [1, None], "author_id": [1, 2]}), "candidates.post_id[1]"),
    "arrays bad entry": (good(candidates={"post_id": [1, MARK], "author_id": [1, 2]}), "candidates.post_id[1]"),
    "action unknown": (event(actions=["favorite", MARK]), "history[0].actions[1]"),
    "action of a number": (event(actions=["favorite", 1]), "history[0].actions[1]"),
    "action text": (event(actions=MARK), "history[0].actions"),
    "action map text": (event(actions={"favorite": MARK}), "history[0].actions.favorite"),
    "action map null in arrays": (
        good(history=in_columns([POST | {"actions": {"reply": None}}])),
        "history.actions[0].reply",
    ),
    "impression negative": (good(impression_ts=-1), "impression_ts"),
    "impression 2^70": (good(impression_ts=2**70), "impression_ts"),
    "impression in ms": (good(impression_ts=1_780_000_000_000), "impression_ts"),
    "weights unknown action": (good(weights={MARK: 1}), "weights"),
    "weights text": (good(weights={"favorite": MARK}), "weights.favorite"),
    "weights unknown set": (good(weights=MARK), "weights"),
    "weights huge": (good(weights={"favorite": 1e308}), "weights.favorite"),
    "weights twice": (good(weights={"favorite": 1, "0": 1}), "weights"),
    "top_k zero": (good(top_k=0), "top_k"),
    "top_k 2^63": (good(top_k=2**63), "top_k"),
    "score null": (good(score=None), "score"),
    "reply unknown": (good(reply=MARK), "reply"),
    "wanted unknown": (good(actions_wanted=[MARK]), "actions_wanted[0]"),
    "wanted twice": (good(actions_wanted=["favorite", "0"]), "actions_wanted"),
    "reply as a map": (good(reply={MARK: 1}), "reply"),
    "request id with line feed": (good(request_id=f"{MARK}\r\nX-Evil: 1"), "request_id"),
    "request id empty": (good(request_id=""), "request_id"),
    "request id long": (good(request_id=MARK * 100), "request_id"),
    "context and user": (good(context="0" * 32), "context"),
    "context and history": (good(context="0" * 32, user_id=...), "context"),
    "context too short": (good(context="0" * 31, user_id=..., history=...), "context"),
    "context with a line feed": (good(context="0" * 32 + "\n", user_id=..., history=...), "context"),
}
MALFORMED: dict[str, bytes] = {
    "text": MARK.encode(),
    "empty": b"",
    "garbage": b"{} x",
    "trailing comma": b'{"user_id": 1,}',
    "NaN": b'{"user_id": NaN}',
    "infinite as a double": b'{"impression_ts": 1e999}',
    "an integer that is infinite as a double": b'{"user_id": %b}' % (b"9" * 400),
    "leading zero": b'{"user_id": 01}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"user_id": 1}'.encode("utf-16"),
    "lone high surrogate": b'{"user_id": "\\ud800zq9marker"}',
    "bad UTF-8": b'{"user_id": "zq9marker\xff"}',
    "a lone surrogate in a key": b'{"\\ud800": 1}',
    "control character": b'{"user_id": "\x00"}',
    "cut off": b'{"user_id": 1, "candidates": [{"post_id": 1',
    "deep arrays": b'{"candidates": ' + b"[" * 20_000,
    "deep objects": b'{"x":' * 2_000 + b"1" + b"}" * 2_000,
    "malformed behind what is invalid": b'{"user_id": true, "candidates": [} ',
}
LARGE: dict[str, Any] = {
    "many candidates": good(candidates=[POST] * 3001),
    "many candidates in arrays": good(candidates=in_columns([POST] * 3001)),
    "long history": good(history=[POST] * 201),
    "many values": good(history={"post_id": [1] * 40_000, "author_id": [1]}),
}
CASES = (
    {f"422 {name}": (json.dumps(body).encode(), 422, "invalid_request") for name, (body, _) in INVALID.items()}
    | {f"400 {name}": (body, 400, "malformed_json") for name, body in MALFORMED.items()}
    | {f"413 {name}": (json.dumps(body).encode(), 413, "too_large") for name, body in LARGE.items()}
)


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_has_status_and_code_and_echoes_nothing(running: tuple[TestClient, LocalService], name: str) -> None:
    client, ranker = running
    body, status, code = CASES[name]
    with structlog.testing.capture_logs() as lines:
        reply = client.post("/rank", content=body, headers=JSON)
    content = reply.json()
    assert (reply.status_code, content["status"], content["code"]) == (status, status, code)
    assert reply.headers["content-type"] == "application/problem+json"
    assert len(reply.content) <= 1024
    assert MARK not in reply.text + str(reply.headers) + str(lines)
    if status == 422:
        ((field,),) = [[error["field"] for error in content["errors"]]]
        assert field == INVALID[name.removeprefix("422 ")][1]
        assert content["detail"] == f"{field}: {content['errors'][0]['message']}".removeprefix(": ")
        if "unknown field" in name:
            known = "post_id, author_id" if field else "user_id, history"
            assert content["errors"][0]["message"].startswith(f"has an unknown field; known are {known}")
        if name.endswith("in ms"):
            assert "Unix seconds" in content["detail"]
            assert "milliseconds" in content["detail"]
    else:
        assert "errors" not in content
    assert figure(ranker, "ranker_queue_requests") == 0


def test_what_the_refused_were_made_of_is_good(client: TestClient) -> None:
    for body in (good(), candidate(), event(actions=["favorite"]), good(history=[POST] * 200)):
        assert client.post("/rank", json=body).status_code == 200


@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strategies.mutated() | strategies.nearly_valid().map(lambda body: json.dumps(body).encode()))
def test_no_body_is_a_fault(client: TestClient, raw: bytes) -> None:
    reply = client.post("/rank", content=raw, headers=JSON)
    assert reply.status_code in (200, 400, 412, 422), reply.text
    results = client.post("/rank/batch", content=b"[%b]" % raw, headers=JSON)
    assert results.status_code in (200, 400, 413, 422), results.text
    if results.status_code == 200 and len(results.json()) == 1:
        assert results.json()[0].get("error", {}).get("status", 200) == reply.status_code


# ids that are texts


def test_texts_are_echoed_and_nothing_else_is_an_id() -> None:
    posts = [
        {"post_id": name, "author_id": "a"} for name in ("64f1c0ffee0ddba11ab1e042", "7", "a,b", "],[", "\\", 'é"\x00')
    ]
    body: dict[str, Any] = {"user_id": "user:1", "history": posts[:2], "candidates": posts}
    with served(load=fake_loader(ids="text")) as (client, _):
        assert [row["post_id"] for row in rows_of(client, body)] == [post["post_id"] for post in posts]
        assert rows_of(client, body | {"candidates": in_columns(posts)}) == rows_of(client, body)
        for changes in (
            {"user_id": 7},
            {"user_id": ""},
            {"candidates": [POST]},
            {"history": [posts[0] | {"author_id": "x" * 129}]},
        ):
            reply = client.post("/rank", json=body | changes)
            assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")
