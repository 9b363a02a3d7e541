"""The endpoints that rank get the same replies, metrics and problems with FastAPI's layers as without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from app.http.application import Application
from app.settings import Limits, Settings
from tests.app.fakes import FakeEngine
from tests.app.serving import ask, chunk, good, served

VARY = (b"x-request-id", b"server-timing", b"x-context-cache", b"content-length")  # ids and timings, and their lengths
JSON = "application/json"
CALLS: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "one": ("/rank", json.dumps(good(request_id=...)).encode(), {}),
    "named": ("/rank", json.dumps(good()).encode(), {"x-request-id": "page-9"}),
    "batch": ("/rank/batch", json.dumps([good(), good(user_id=-1)]).encode(), {}),
    "broken JSON": ("/rank", b"{", {}),
    "wrong field": ("/rank", json.dumps(good(user_id=-1)).encode(), {}),
    "too long": ("/rank", b" " * 20_001, {}),
    "media type": ("/rank", b"{}", {"content-type": "text/plain"}),
    "deadline": ("/rank", b"{}", {"x-request-timeout-ms": "soon"}),
    "no requests": ("/rank/batch", b"[]", {}),
    "fault": ("/rank", json.dumps(good(request_id="fault")).encode(), {}),
}


@pytest.fixture(scope="module")
def app() -> Iterator[Application]:
    with served(FakeEngine(), Settings(limits=Limits(max_body_bytes=20_000))) as (client, _):
        assert isinstance(client.app, Application)
        yield client.app


def reply(app: Application, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, list[Any], Any]:
    """Status, headers and body without what differs from one call to the next."""
    start, sent = asyncio.run(ask(app, [chunk(body, False)], headers, path))
    found = [(name, value) for name, value in start["headers"] if name not in VARY]
    content = json.loads(sent["body"])
    for part in content if type(content) is list else [content]:
        for name in ("timings_ms", "request_id"):
            part.pop(name, None)
    assert any(name == b"x-request-id" for name, _ in start["headers"])
    return start["status"], sorted(found), content


def counted(app: Application, route: str) -> float:
    """Replies on this route, by the metrics."""
    (family,) = app.state.metrics.http_requests.collect()
    return sum(sample.value for sample in family.samples if sample.labels["route"] == route)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_reply_is_counted_once_and_named(
    app: Application, call: tuple[str, bytes, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if b'"fault"' in call[1]:
        monkeypatch.setattr("app.request.codec.Packed.unpack", lambda *_: 1 / 0)
    before = counted(app, call[0])
    status, headers, _ = reply(app, *call)
    assert counted(app, call[0]) == before + 1
    assert (b"x-request-id" in dict(headers)) == (b"x-request-id" not in VARY)
    assert (status == 500) == (b'"fault"' in call[1])


def test_other_methods_are_fastapis() -> None:
    with served() as (client, _):
        for path in ("/rank", "/rank/batch"):
            for method in ("GET", "HEAD", "PUT"):
                answer = client.request(method, path)
                assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert client.post("/rank/").status_code == 404
        assert set(client.get("/openapi.json").json()["paths"]) >= {"/rank", "/rank/batch"}
