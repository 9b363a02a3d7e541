"""Bad requests: each has its status and code, none is a fault of the server, and no reply shows what was sent."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from starlette.testclient import TestClient

from app.settings import Limits, Settings
from loadtest.fuzz.bodies import in_arrays
from loadtest.generate.tensors import inference_of
from tests.app.bounds import bounded
from tests.app.fakes import ACTIONS
from tests.app.serving import good, served

MARK = "zq9marker"
JSON = {"content-type": "application/json"}
POST: dict[str, Any] = {"post_id": 1, "author_id": 2}
INFER = "/v2/models/fake/infer"
BOMB = gzip.compress(bytes(10_000_000))
TENSORS = inference_of(good(), ACTIONS).body(binary=False)[0]
LIMITS = bounded(Limits(max_body_bytes=50_000, max_candidates=100, max_history=200), max_batch_requests=3)


def candidate(**changes: Any) -> dict[str, Any]:
    return good(candidates=[POST, POST | changes])


def event(**changes: Any) -> dict[str, Any]:
    return good(history=[POST | changes])


INVALID: dict[str, tuple[Any, str]] = {
    "not an object": ([MARK], ""),
    "a string": (MARK, ""),
    "null": (None, ""),
    "user missing": (good(user_id=...), "user_id"),
    "user negative": (good(user_id=-1), "user_id"),
    "user 2^64": (good(user_id=2**64), "user_id"),
    "user text": (good(user_id=MARK), "user_id"),
    "user leading zero": (good(user_id="007"), "user_id"),
    "unknown field": (good(**{MARK: 1}), ""),
    "unknown field, close": (good(canditates=[]), ""),
    "no candidates": (good(candidates=[]), "candidates"),
    "candidates missing": (good(candidates=...), "candidates"),
    "candidates null": (good(candidates=None), "candidates"),
    "candidates text": (good(candidates=MARK), "candidates"),
    "candidates empty arrays": (good(candidates={"post_id": [], "author_id": []}), "candidates"),
    "candidates empty arrays, one missing": (good(candidates={"author_id": []}), "candidates.post_id"),
    "candidate no object": (good(candidates=[POST, MARK]), "candidates[1]"),
    "candidate unknown field": (candidate(**{MARK: 1}), "candidates[1]"),
    "candidate post missing": (good(candidates=[{"author_id": 1}]), "candidates[0].post_id"),
    "candidate author missing": (good(candidates=[POST, {"post_id": 1}]), "candidates[1].author_id"),
    "candidate post text": (candidate(post_id=MARK), "candidates[1].post_id"),
    "candidate post true": (candidate(post_id=True), "candidates[1].post_id"),
    "candidate post null": (candidate(post_id=None), "candidates[1].post_id"),
    "candidate post comma": (candidate(post_id="1,2"), "candidates[1].post_id"),
    "candidate post empty": (candidate(post_id=""), "candidates[1].post_id"),
    "candidate author 2^64": (candidate(author_id=2**64), "candidates[1].author_id"),
    "candidate surface too high": (candidate(product_surface=16), "candidates[1].product_surface"),
    "candidate surface negative": (candidate(product_surface=-1), "candidates[1].product_surface"),
    "candidate surface true": (candidate(product_surface=True), "candidates[1].product_surface"),
    "candidate surface text": (candidate(product_surface="0"), "candidates[1].product_surface"),
    "candidate created fraction": (candidate(created_at=1.5), "candidates[1].created_at"),
    "candidate created in ms": (candidate(created_at=1_779_990_000_000), "candidates[1].created_at"),
    "candidate created null": (candidate(created_at=None), "candidates[1].created_at"),
    "candidate with dwell": (candidate(dwell_time=3), "candidates[1]"),
    "arrays unequal": (good(candidates={"post_id": [1, 2], "author_id": [1]}), "candidates"),
    "arrays unequal, optional": (good(candidates={"post_id": [1], "author_id": [1], "created_at": []}), "candidates"),
    "arrays with a scalar": (good(candidates={"post_id": 1, "author_id": [1]}), "candidates.post_id"),
    "arrays missing one": (good(candidates={"post_id": [1]}), "candidates.author_id"),
    "arrays unknown one": (good(candidates={"post_id": [1], "author_id": [1], MARK: [1]}), "candidates"),
    "arrays bad entry": (good(candidates={"post_id": [1, MARK], "author_id": [1, 2]}), "candidates.post_id[1]"),
    "history text": (good(history=MARK), "history"),
    "history null": (good(history=None), "history"),
    "history no objects": (good(history=[[1, 2]]), "history[0]"),
    "history dwell negative": (event(dwell_time=-0.1), "history[0].dwell_time"),
    "history dwell text": (event(dwell_time=MARK), "history[0].dwell_time"),
    "history dwell true": (event(dwell_time=True), "history[0].dwell_time"),
    "history created": (event(created_at=5), "history[0]"),
    "action unknown": (event(actions=["favorite", MARK]), "history[0].actions[1]"),
    "action empty": (event(actions=[""]), "history[0].actions[0]"),
    "action index too high": (event(actions=["3"]), "history[0].actions[0]"),
    "action index negative": (event(actions=["-1"]), "history[0].actions[0]"),
    "action index with zero": (event(actions=["00"]), "history[0].actions[0]"),
    "action index number": (event(actions=[1]), "history[0].actions[0]"),
    "action list": (event(actions=[["favorite"]]), "history[0].actions[0]"),
    "action text": (event(actions="favorite"), "history[0].actions"),
    "action map unknown": (event(actions={MARK: 1}), "history[0].actions"),
    "action map text": (event(actions={"favorite": MARK}), "history[0].actions"),
    "action map true": (event(actions={"favorite": True}), "history[0].actions"),
    "action map null": (event(actions={"favorite": None}), "history[0].actions"),
    "action map huge": (event(actions={"favorite": 1e300}), "history[0].actions"),
    "action map twice": (event(actions={"favorite": 1, "0": 0}), "history[0].actions"),
    "impression negative": (good(impression_ts=-1), "impression_ts"),
    "impression text": (good(impression_ts=MARK), "impression_ts"),
    "impression in ms": (good(impression_ts=1_780_000_000_000), "impression_ts"),
    "weights list": (good(weights=[1]), "weights"),
    "weights unknown action": (good(weights={MARK: 1}), "weights"),
    "weights text": (good(weights={"favorite": MARK}), "weights"),
    "weights huge": (good(weights={"favorite": 1e308}), "weights"),
    "weights twice": (good(weights={"favorite": 1, "0": 1}), "weights"),
    "top_k zero": (good(top_k=0), "top_k"),
    "top_k text": (good(top_k="3"), "top_k"),
    "top_k true": (good(top_k=True), "top_k"),
    "top_k null": (good(top_k=None), "top_k"),
    "wanted text": (good(actions_wanted="favorite"), "actions_wanted"),
    "wanted unknown": (good(actions_wanted=[MARK]), "actions_wanted[0]"),
    "wanted number": (good(actions_wanted=[0]), "actions_wanted[0]"),
    "wanted twice": (good(actions_wanted=["favorite", "0"]), "actions_wanted"),
    "request id empty": (good(request_id=""), "request_id"),
    "request id with line feed": (good(request_id=f"{MARK}\r\nX-Evil: 1"), "request_id"),
    "request id long": (good(request_id=MARK * 100), "request_id"),
    "request id number": (good(request_id=5), "request_id"),
}  # fmt: skip

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "text": MARK.encode(),
    "cut off": b'{"user_id": 1',
    "duplicate key": b'{"user_id": 1, "zq9marker": 1, "zq9marker": 2}',
    "lone surrogate": b'{"user_id": "\\ud800zq9marker"}',
    "bad UTF-8": b'{"user_id": "zq9marker\xff"}',
    "deep": b"[" * 20_000 + b"]" * 20_000,
}

OTHER: dict[str, tuple[str, str, bytes, dict[str, str], int, str]] = {
    "no media type": ("POST", "/rank", b"{}", {}, 415, "unsupported_media_type"),
    "form": ("POST", "/rank", b"a=1", {"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
    "text": ("POST", "/rank", b"{}", {"content-type": f"text/plain; x={MARK}"}, 415, "unsupported_media_type"),
    "charset": ("POST", "/rank", b"{}", {"content-type": "application/json; charset=utf-16"}, 415, "unsupported_media_type"),
    "deflate": ("POST", "/rank", b"{}", JSON | {"content-encoding": "deflate"}, 415, "unsupported_media_type"),
    "no gzip": ("POST", "/rank", MARK.encode(), JSON | {"content-encoding": "gzip"}, 400, "bad_request"),
    "gzip bomb": ("POST", "/rank", BOMB, JSON | {"content-encoding": "gzip"}, 413, "too_large"),
    "gzip bomb, batch": ("POST", "/rank/batch", BOMB, JSON | {"content-encoding": "gzip"}, 413, "too_large"),
    "gzip bomb, tensors": ("POST", INFER, BOMB, {"content-encoding": "gzip"}, 413, "too_large"),
    "accept": ("POST", "/rank", json.dumps(good()).encode(), JSON | {"accept": "text/html"}, 406, "not_acceptable"),
    "reply as a map, accept": (
        "POST", "/rank", json.dumps(good(reply={MARK: 1})).encode(), JSON | {"accept": "application/json"}, 422, "invalid_request",
    ),
    "a line feed behind a page": ("GET", "/metrics%0A", b"", {}, 404, "not_found"),
    "a line feed behind a probe": ("GET", "/livez%0A", b"", {}, 404, "not_found"),
    "accept, batch": ("POST", "/rank/batch", b"[]", JSON | {"accept": "text/html"}, 406, "not_acceptable"),
    "accept, tensors": ("POST", INFER, TENSORS, {"accept": "application/octet-stream"}, 406, "not_acceptable"),
    "another model": ("POST", f"/v2/models/{MARK}/infer", TENSORS, {}, 404, "not_found"),
    "another version": ("POST", f"/v2/models/fake/versions/{MARK}/infer", TENSORS, {}, 404, "not_found"),
    "another model's tensors": ("GET", f"/v2/models/{MARK}", b"", {}, 404, "not_found"),
    "another version's tensors": ("GET", f"/v2/models/fake/versions/{MARK}/ready", b"", {}, 404, "not_found"),
    "tensors of text": ("POST", INFER, b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
    "long tensors": ("POST", INFER, b" " * 50_001, {}, 413, "too_large"),
    "no tensors": ("POST", INFER, b"{}", {}, 422, "invalid_request"),
    "no JSON of tensors": ("POST", INFER, MARK.encode(), {}, 400, "malformed_json"),
    "tensors on the path of batches": (
        "POST", "/rank/batch", b"{}", {"content-type": "application/octet-stream"}, 415, "unsupported_media_type",
    ),
    "long body": ("POST", "/rank", b" " * 50_001, JSON, 413, "too_large"),
    "long body, batch": ("POST", "/rank/batch", b" " * 50_001, JSON, 413, "too_large"),
    "many candidates": ("POST", "/rank", json.dumps(good(candidates=[POST] * 101)).encode(), JSON, 413, "too_large"),
    "many candidates in arrays": (
        "POST", "/rank", json.dumps(good(candidates=in_arrays([POST] * 101))).encode(), JSON, 413, "too_large",
    ),
    "long history": ("POST", "/rank", json.dumps(good(history=[POST] * 201)).encode(), JSON, 413, "too_large"),
    "many requests": ("POST", "/rank/batch", json.dumps([good()] * 4).encode(), JSON, 413, "too_large"),
    "no requests": ("POST", "/rank/batch", b"[]", JSON, 422, "invalid_request"),
    "batch of nothing": ("POST", "/rank/batch", b"{}", JSON, 422, "invalid_request"),
    "batch text": ("POST", "/rank/batch", b'"zq9marker"', JSON, 422, "invalid_request"),
    "batch with more": ("POST", "/rank/batch", b'{"requests": [], "zq9marker": 1}', JSON, 422, "invalid_request"),
    "timeout text": ("POST", "/rank", b"{}", JSON | {"x-request-timeout-ms": MARK}, 422, "invalid_request"),
    "timeout negative": ("POST", "/rank", b"{}", JSON | {"x-request-timeout-ms": "-5"}, 422, "invalid_request"),
    "timeout nothing": ("POST", "/rank", json.dumps(good()).encode(), JSON | {"x-request-timeout-ms": "0"}, 504, "deadline_exceeded"),
    "wrong method": ("GET", "/rank", b"", {}, 405, "method_not_allowed"),
    "odd method": ("FROB", "/rank/batch", b"", {}, 405, "method_not_allowed"),
    "unknown path": ("GET", f"/{MARK}", b"", {}, 404, "not_found"),
    "path below": ("POST", f"/rank/{MARK}", b"{}", JSON, 404, "not_found"),
    "trailing slash": ("POST", "/rank/", b"{}", JSON | {"host": MARK}, 404, "not_found"),
    "encoded path": ("GET", "/%2e%2e/%00", b"", {}, 404, "not_found"),
}  # fmt: skip

CASES = (
    {f"422 {name}": ("POST", "/rank", json.dumps(body).encode(), JSON, 422, "invalid_request") for name, (body, _) in INVALID.items()}
    | {f"400 {name}": ("POST", "/rank", body, JSON, 400, "malformed_json") for name, body in MALFORMED.items()}
    | {f"{case[4]} {name}": case for name, case in OTHER.items()}
)  # fmt: skip


FIELDS = {f"422 {name}": field for name, (_, field) in INVALID.items()}
"""Which field a refusal names."""


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served(settings=Settings(limits=LIMITS)) as (client, _):
        yield client


def counted(client: TestClient, status: int) -> float:
    """Replies of this status, by the metrics."""
    (family,) = client.app.service.metrics.http_requests.collect()  # type: ignore[attr-defined]
    samples = (sample for sample in family.samples if sample.name.endswith("_total"))
    return sum(sample.value for sample in samples if sample.labels["code"] == str(status))


@pytest.mark.parametrize("name", CASES)
def test_status_code_and_silence(client: TestClient, name: str) -> None:
    method, path, body, headers, status, code = CASES[name]
    before = counted(client, status)
    with structlog.testing.capture_logs() as lines:
        reply = client.request(method, path, content=body, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert [(line["status"], line["code"]) for line in lines if line["event"] == "request"] == [(status, code)]
    assert counted(client, status) == before + 1
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["status"] == status
    assert {"type", "title", "detail"} <= reply.json().keys()
    assert len(reply.content) <= 4096
    assert reply.headers["x-request-id"] == reply.json()["request_id"]
    assert MARK not in reply.text
    assert MARK not in str(reply.headers) + str(lines)
    assert client.app.service.admission.requests == 0  # type: ignore[attr-defined]
    if name in FIELDS:
        assert [error["field"] for error in reply.json()["errors"]] == [FIELDS[name]]


def test_the_table_is_long_enough_and_its_base_is_good(client: TestClient) -> None:
    assert len(CASES) >= 40
    assert client.post("/rank", json=good()).status_code == 200  # else everything above could fail for another reason
    assert client.post("/rank", json=candidate()).status_code == 200
    assert client.post("/rank", json=event(actions=["favorite"])).status_code == 200


def test_thousands_of_problems_become_ten(client: TestClient) -> None:
    body = good(candidates=[{"post_id": MARK, "author_id": True, MARK: [MARK]} for _ in range(100)])
    reply = client.post("/rank", json=body)
    assert reply.status_code == 422
    assert len(reply.json()["errors"]) == 10
    assert len(reply.content) <= 4096
    assert MARK not in reply.text


def test_without_the_limit_the_long_body_is_read() -> None:
    with served(settings=Settings(limits=Limits(max_body_bytes=60_000))) as (client, _):
        assert client.post("/rank", content=b" " * 50_001, headers=JSON).json()["code"] == "malformed_json"
