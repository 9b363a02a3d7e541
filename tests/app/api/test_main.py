"""The application as a whole: its document, clients made from it, and other servers."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from anyio.from_thread import start_blocking_portal
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from app.main import create_app
from app.settings import Settings
from loadtest.server import example, free_port, running, stop, wait_until
from tests.support import corpora
from tests.support.asgi import ADDRESS, served
from tests.support.bodies import good

pytestmark = pytest.mark.one_process("other servers run one process")

OPERATIONS = ("/livez", "/readyz", "/startupz", "/health", "/metrics", "/info", "/version")
RANKING = ("/context", "/rank", "/rank/{name}", "/rank/batch", "/explain", "/retrieve", "/recommend")
MODEL = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
INFERENCE = ("/v2", "/v2/health/live", "/v2/health/ready", *MODEL, *(f"{path}/ready" for path in MODEL))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with served(retrieval=corpora.setting(tmp_path_factory.mktemp("retrieval"))) as (client, _):
        yield client


@pytest.fixture(scope="module")
def document(client: TestClient) -> dict[str, Any]:
    content: dict[str, Any] = client.get("/openapi.json").json()
    return content


def test_every_endpoint_is_a_route_of_a_fastapi_application(client: TestClient) -> None:
    assert isinstance(client.app, FastAPI)
    posts = {route.path for route in client.app.routes if isinstance(route, APIRoute) and route.methods == {"POST"}}
    assert posts == {*RANKING, *(f"{path}/infer" for path in MODEL)}


def test_every_path_is_there_and_described(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {*OPERATIONS, *RANKING, *INFERENCE, *(f"{path}/infer" for path in MODEL)}
    names = []
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert len(operation["description"]) > 20, path
            assert operation["tags"], path
            names.append(operation["operationId"])
    assert all(re.fullmatch(r"\w+", name) for name in names), "code that is made from the document takes it for a name"
    assert len(set(names)) == len(names)
    assert {"rank", "rank_batch", "retrieve", "explain", "info", "v2_models_infer"} <= set(names)
    assert not any(name.endswith(("_get", "_post")) for name in names), "every name is chosen, none is generated"
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{}, {"key": []}], "a key is asked for where keys are set"
    assert document["info"]["description"], "what the whole is for"
    assert document["info"]["title"] == "Phoenix ranking server"
    assert document["info"]["version"] == version("phoenix-ranking-server")


def test_every_field_is_described(document: dict[str, Any]) -> None:
    fields = {
        f"{name}.{key}": schema
        for name, model in document["components"]["schemas"].items()
        for key, schema in model.get("properties", {}).items()
    }
    assert len(fields) > 40
    assert [path for path, schema in fields.items() if len(schema.get("description", "")) < 10] == []
    assert [name for name, model in document["components"]["schemas"].items() if not model.get("description")] == []


@pytest.mark.parametrize("path", RANKING)
def test_every_refusal_is_listed_as_a_problem(document: dict[str, Any], path: str) -> None:
    operation = document["paths"][path]["post"]
    wanted = {"400", "401", "404", "412", "413", "415", "422", "429", "500", "503", "504"}
    assert set(operation["responses"]) == {"200", *wanted}
    for status in wanted:
        content = operation["responses"][status]["content"]
        assert content == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}, status
    assert {each["name"] for each in operation["parameters"]} >= {"X-Request-ID", "X-Request-Timeout-Ms", "traceparent"}
    text = str(operation["responses"])
    for codes in (
        "malformed_json unauthorized context_unknown too_large unsupported_media_type invalid_request overloaded",
        "not_ready draining engine_down deadline_exceeded non_finite_scores",
    ):
        assert [code for code in codes.split() if code not in text] == []


@pytest.mark.parametrize(("root_path", "url"), [("", "."), ("/ranker", "/ranker")])
def test_the_document_leads_to_where_a_proxy_has_put_the_service(root_path: str, url: str) -> None:
    with served(root_path=root_path) as (client, _):
        for below in {"", root_path}:  # a proxy may take its prefix off, or leave it
            assert client.get(f"{below}/openapi.json").json()["servers"] == [{"url": url}]
            assert client.post(f"{below}/rank", json=good()).status_code == 200
            assert client.get(f"{below}/docs").status_code == 200


def test_a_root_path_is_none_of_the_services_own(document: dict[str, Any]) -> None:
    """A proxy may take it off or not, and nobody could tell `/rank/a` from `/a` below `/rank`."""
    for path in {
        "/" + each.split("/")[1] for each in ("/admin/reload", "/explore", "/docs", "/assets", *document["paths"])
    } - {"/"}:
        with pytest.raises(ValueError, match="the service's own"):
            Settings(root_path=f"{path}/a")
        Settings(root_path=f"{path}er")


@pytest.fixture
def described(tmp_path: Path, document: dict[str, Any]) -> Path:
    place = tmp_path / "openapi.json"
    place.write_text(json.dumps(document))
    return place


@pytest.mark.slow
@pytest.mark.skipif(find_spec("openapi_python_client") is None, reason="needs openapi-python-client")
def test_a_client_that_openapi_python_client_makes_ranks(
    described: Path, tmp_path: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none", "--path", str(described)]
    made = subprocess.run([*command, "--output-path", str(tmp_path / "made")], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "Unable to" not in made.stdout + made.stderr, "it leaves out what it cannot read"
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module("made")
    rank = importlib.import_module("made.api.ranking.rank")
    request = importlib.import_module("made.models.rank_request").RankRequest
    caller = package.Client(base_url=ADDRESS)
    caller.set_httpx_client(client)
    reply = rank.sync(client=caller, body=request.from_dict(good()))
    assert [row.rank for row in reply.candidates] == [1, 2, 3]
    problem = rank.sync(client=caller, body=request.from_dict(good(candidates=[])))
    assert problem.code == "invalid_request"


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("openapi_generator_cli") is None or shutil.which("java") is None,
    reason="needs openapi-generator-cli and a JDK",
)
def test_openapi_generator_reads_the_document(described: Path, tmp_path: Path) -> None:
    run = "import sys, openapi_generator_cli; sys.exit(openapi_generator_cli.cli())"
    command = [sys.executable, "-c", run, "generate", "-g", "python", "-i", str(described)]
    made = subprocess.run(
        [*command, "-o", str(tmp_path / "made")],
        env=os.environ | {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"},  # it runs for seconds
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert (tmp_path / "made/openapi_client/api/ranking_api.py").is_file()
    assert (tmp_path / "made/openapi_client/models/rank_request.py").is_file()


async def with_uvicorn(port: int, stopped: asyncio.Event) -> None:
    server = uvicorn.Server(uvicorn.Config("app.main:create_app", factory=True, port=port, log_config=None))
    serving = asyncio.ensure_future(server.serve())
    await stopped.wait()
    server.should_exit = True
    await serving


async def with_hypercorn(port: int, stopped: asyncio.Event) -> None:
    hypercorn = pytest.importorskip("hypercorn.asyncio")
    config = hypercorn.Config.from_mapping(bind=f"127.0.0.1:{port}")
    await hypercorn.serve(create_app(), config, shutdown_trigger=stopped.wait)


@pytest.mark.parametrize("serve", [with_uvicorn, with_hypercorn])
def test_other_servers_serve_the_same_application(
    serve: Callable[[int, asyncio.Event], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKER_THREADS", "1")
    port = free_port()
    with start_blocking_portal() as portal:
        stopped = portal.call(asyncio.Event)
        served = portal.start_task_soon(serve, port, stopped)
        try:
            wait_until(lambda: served.done() or is_ready(port), 60)
            ranks_as_ours_does(f"http://127.0.0.1:{port}")
        finally:
            portal.call(stopped.set)
            served.result(30)


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(find_spec("granian") is None, reason="needs granian")
def test_granian_serves_it_with_its_log() -> None:
    command = [sys.executable, "-m", "granian", "--interface", "asgi", "--factory", "app.main:create_app"]
    settings = {"RANKER_THREADS": "1", "RANKER_DRAIN__TIMEOUT_SECONDS": "5"}
    with running([*command, "--port", "{port}"], settings) as server:
        ranks_as_ours_does(server.url)
        wait_until(lambda: '"event":"request"' in server.log_text, 10)
        stop(server)
        assert "Traceback" not in server.log_text


def ranks_as_ours_does(url: str) -> None:
    body = example()
    with httpx.Client(base_url=url, timeout=30) as client:
        replies = {path: client.get(path).status_code for path in ("/readyz", "/docs", "/metrics", "/nowhere")}
        assert replies == {"/readyz": 200, "/docs": 200, "/metrics": 200, "/nowhere": 404}
        assert ((head := client.head("/livez")).status_code, head.content) == (200, b"")
        ranked = client.post("/rank", json=body)
        assert (ranked.status_code, len(ranked.json()["candidates"])) == (200, len(body["candidates"]))
        assert client.post("/rank", json={}).json()["code"] == "invalid_request"


def test_without_settings_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKER_ROOT_PATH", "/below")
    assert create_app().openapi()["servers"] == [{"url": "/below"}]
    assert create_app(Settings(root_path="/other")).openapi()["servers"] == [{"url": "/other"}]
