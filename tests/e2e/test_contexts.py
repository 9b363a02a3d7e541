"""Requests that name their context by a handle: the replies of the whole requests, bit for bit, or 412."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loadtest.server import example, free_port
from tests.app.api.live import demo

EXAMPLE = example()
VIEWER = {name: EXAMPLE[name] for name in ("user_id", "history")}
REST = {name: value for name, value in EXAMPLE.items() if name not in VIEWER}
EXPLAIN = {**REST, "explain": [EXAMPLE["candidates"][0]["post_id"]]}
UNKNOWN = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, admin_port: int) -> Iterator[httpx.Client]:
    """Of a service with two callers, `feed` and `other`, and an administrator."""
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("feed", "other", "admin")}
    groups = {
        "auth": {"keys": {name: digests[name] for name in ("feed", "other")}},
        "admin": {"port": admin_port, "token_sha256": digests["admin"]},
        "explore": {"enabled": True},
    }
    with (
        demo(tmp_path_factory.mktemp("demo"), **groups) as live,
        httpx.Client(base_url=live.url, headers={"X-API-Key": "feed"}, timeout=60) as client,
    ):
        yield client


def said(reply: httpx.Response) -> Any:
    """What a reply says, but for its times."""
    assert reply.status_code == 200, reply.text
    body = reply.json()
    for one in body.get("results", [body]):
        one.pop("timings_ms", None)
    body.get("parameters", {}).clear()
    return body


def handle_of(client: httpx.Client) -> str:
    handle: str = client.post("/context", json=VIEWER).json()["context"]
    return handle


def test_the_next_request_hits_a_context_computed_ahead(client: httpx.Client) -> None:
    viewer = VIEWER | {"user_id": 424242}
    ahead = client.post("/context", json=viewer)
    body = ahead.json()
    assert ahead.headers["X-Context-Cache"] == "miss"
    assert (len(body["context"]), body["context"]) == (32, ahead.headers["X-Context"])
    assert (body["history_used"], body["history_dropped"]) == (len(VIEWER["history"]), 0)
    whole = client.post("/rank", json={**REST, **viewer})
    named = client.post("/rank", json={**REST, "context": body["context"]})
    assert [reply.headers["X-Context-Cache"] for reply in (whole, named)] == ["hit", "hit"]
    assert [reply.headers["X-Context"] for reply in (whole, named)] == [body["context"]] * 2
    assert handle_of(client) != body["context"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/rank", {**REST, "reply": "columns", "top_k": 3, "request_id": "page-2"}),
        ("/explain", EXPLAIN),
        ("/retrieve", {"k": 20, "exclude_history": False, "exclude": ["1"]}),
        ("/recommend", {"k": 20, "top_k": 5}),
    ],
)
def test_a_request_by_handle_is_answered_as_the_whole_is(client: httpx.Client, path: str, more: Any) -> None:
    handle = handle_of(client)
    whole, named = (said(client.post(path, json={**more, **viewer})) for viewer in (VIEWER, {"context": handle}))
    assert named.pop("context") == handle
    assert whole.pop("context", handle) == handle
    assert named == whole


def test_a_batch_takes_whole_requests_and_handles(client: httpx.Client) -> None:
    bodies = [{**REST, "context": handle_of(client)}, EXAMPLE, {**REST, "context": UNKNOWN}]
    named, whole, unknown = said(client.post("/rank/batch", json={"requests": bodies}))["results"]
    names = [ranking.pop("request_id") for ranking in (named, whole)]
    assert names[0] != names[1]
    assert named == whole
    assert unknown["error"]["code"] == "context_unknown"


@pytest.mark.parametrize(
    ("path", "more"), [("/rank", REST), ("/retrieve", {}), ("/recommend", {}), ("/explain", EXPLAIN)]
)
def test_a_handle_belongs_to_the_api_key_that_made_it(client: httpx.Client, path: str, more: Any) -> None:
    body = {**more, "context": handle_of(client)}
    other = client.post(path, json=body, headers={"X-API-Key": "other"})
    assert (other.status_code, other.json()["code"]) == (412, "context_unknown")
    assert client.post(path, json=body).status_code == 200
    assert client.post("/context", json=VIEWER, headers={"X-API-Key": "nobody's"}).status_code == 401


def test_no_handle_survives_a_reload(client: httpx.Client, admin_port: int) -> None:
    """Not even of the same checkpoint."""
    body = {**REST, "context": handle_of(client)}
    assert client.post("/rank", json=body).status_code == 200
    admin = {"authorization": "Bearer admin"}
    httpx.post(f"http://127.0.0.1:{admin_port}/admin/reload", json={}, headers=admin, timeout=60).raise_for_status()
    refused = client.post("/rank", json=body)
    assert (refused.status_code, refused.json()["code"]) == (412, "context_unknown")
    assert client.post("/rank", json=EXAMPLE).json()["context"] != body["context"]
