"""The endpoints that rank get the same replies, metrics and problems with FastAPI's layers as without them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from app.settings import Limits, Settings
from tests.app.fakes import FakeEngine
from tests.app.serving import ask, chunk, good, served

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
    "fault": ("/rank", json.dumps(good()).encode(), {}),
}
STATUSES = {
    "broken JSON": 400, "wrong field": 422, "too long": 413, "media type": 415, "deadline": 422, "no requests": 422, "fault": 500,
}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served(FakeEngine(), Settings(limits=Limits(max_body_bytes=20_000))) as (client, _):
        yield client


def counted(client: TestClient, route: str) -> float:
    """Replies on this route, by the metrics."""
    (family,) = client.app.service.metrics.http_requests.collect()
    return sum(sample.value for sample in family.samples if sample.labels["route"] == route)


@pytest.mark.parametrize("name", CALLS)
def test_every_reply_is_counted_once_and_named(client: TestClient, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "fault":
        monkeypatch.setattr("app.request.codec.Packed.unpack", lambda *_: 1 / 0)
    path, body, headers = CALLS[name]
    before = counted(client, path)
    start, _ = client.portal.call(ask, client.app, [chunk(body, False)], headers, path)  # in the service's own loop
    assert start["status"] == STATUSES.get(name, 200)
    assert counted(client, path) == before + 1
    given = dict(start["headers"])[b"x-request-id"]
    assert given == headers.get("x-request-id", given.decode()).encode() != b""


def test_other_methods_are_fastapis() -> None:
    with served() as (client, _):
        for path in (
            "/rank",
            "/rank/batch",
            "/rank/fake",
            "/context",
            "/explain",
            "/retrieve",
            "/v2/models/fake/infer",
        ):
            for method in ("GET", "HEAD", "PUT"):
                answer = client.request(method, path)
                assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert client.post("/rank/").status_code == 404
        assert set(client.get("/openapi.json").json()["paths"]) >= {"/rank", "/rank/batch"}


def test_the_lifespan_starts_the_service_and_stops_it() -> None:
    with served() as (_, service):
        assert service.health().ready
    assert service.health().draining
