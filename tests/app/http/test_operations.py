"""What runs here, and metrics that no caller can make grow."""

from __future__ import annotations

import httpx
import pytest
from starlette.testclient import TestClient

from app.assembly import build_server
from app.http.application import create_app
from app.http.asgi import Guest
from app.settings import Probes, Settings
from tests.app.fakes import FakeEngine, running
from tests.app.serving import good

pytestmark = pytest.mark.anyio


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


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        *((path, "application/json") for path in ("/livez", "/readyz", "/startupz", "/info", "/openapi.json")),
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8"),
        ("/docs", "text/html"),
    ],
)
def test_a_get_route_says_what_it_is_and_answers_head_with_the_same_headers_and_no_body(
    client: TestClient, path: str, media_type: str
) -> None:
    def headers(reply: httpx.Response) -> dict[str, str]:
        changing = {"x-request-id"} | ({"content-length"} if path == "/metrics" else set())
        return {name: value for name, value in reply.headers.items() if name not in changing}

    got, head = client.get(path), client.head(path)
    assert (head.status_code, headers(head)) == (200, headers(got))
    assert got.headers["content-type"] == media_type
    assert int(head.headers["content-length"]) > 0
    assert got.content
    assert head.content == b""
    assert f'method="HEAD",route="{path}"' in client.get("/metrics").text


def test_head_is_refused_where_get_is(client: TestClient) -> None:
    for path, status in (("/rank", 405), ("/nowhere", 404)):
        got, head = client.get(path), client.head(path)
        assert (got.status_code, head.status_code, head.content) == (status, status, b"")
    assert client.get("/rank").headers["allow"] == "POST"
    assert client.post("/readyz").headers["allow"] == "GET, HEAD"


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


async def test_metrics_move_to_a_port_of_their_own() -> None:
    settings = Settings(probes=Probes(port=9100))
    async with running(FakeEngine()) as service:
        app = create_app(settings, service)
        _, port = build_server(settings, service).ports
        assert (port.host, port.port, port.is_counted) == ("127.0.0.1", 9100, False)
        side = Guest(port.routes, lambda: None, lambda: None)  # type: ignore[arg-type]
        moved = {"/metrics": 404, "/readyz": 200, "/rank": 405, "/redoc": 404}
        there = {"/metrics": 200, "/readyz": 200, "/info": 200, "/rank": 404, "/docs": 404, "/openapi.json": 404}
        for given, paths in ((app, moved), (side, there)):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(given), base_url="http://test") as client:
                for path, status in paths.items():
                    assert (await client.get(path)).status_code == status
