"""The application as a guest of other ASGI servers: the same replies, HEAD, disconnects and bodies without end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import StreamingResponse

from app.assembly import build_app
from app.settings import Settings
from loadtest.servers import launch
from loadtest.servers.target import get
from tests.app.serving import served
from tests.reliability.live import wait_until

ROOT = Path(__file__).parents[3]
BODY = json.loads((ROOT / "weights/demo/example.json").read_bytes())
APP = "tests.app.http.test_asgi:demo"
RUN = "import runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
SERVERS = {
    "uvicorn": f"--port {{}} --factory {APP}",
    "hypercorn": f"--workers 0 --bind 127.0.0.1:{{}} {APP}()",
    "granian": f"--interface asgi --port {{}} --factory {APP}",
}


def demo() -> Any:
    """The service around the demo's checkpoint, as `uvicorn --factory` makes it."""
    return build_app(Settings(checkpoint=ROOT / "weights" / "demo", threads=1))


@contextmanager
def hosted(name: str) -> Iterator[str]:
    """The address of another server's process around `demo`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", RUN, name, "--log-level", "error", *SERVERS[name].format(port).split()]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"stdout": sys.__stderr__, "stderr": sys.__stderr__, "start_new_session": True}
    process = launch.start_process(command, cwd=ROOT, env=variables, **options)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None
        try:
            return get(url + "/readyz", 2).status_code == 200
        except OSError:
            return False

    try:
        wait_until(is_ready, 60)
        yield url
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15)


@pytest.fixture(scope="module")
def ours() -> list[float]:
    """The scores of our own server."""
    with launch.ranking_server(checkpoint=ROOT / "weights" / "demo", threads=1) as server:
        return [one["score"] for one in httpx.post(server.url + "/rank", json=BODY).json()["candidates"]]


@pytest.mark.parametrize("name", SERVERS)
def test_another_server_gives_the_same_scores(name: str, ours: list[float]) -> None:
    with hosted(name) as url:
        reply = httpx.post(url + "/rank", json=BODY)
        refused = httpx.post(url + "/rank", json={"user_id": 1})
        head = httpx.head(url + "/info")
    assert (reply.status_code, refused.status_code, head.status_code) == (200, 422, 200)
    assert (head.content, int(head.headers["content-length"]) > 100) == (b"", True)
    assert refused.headers["content-type"] == "application/problem+json"
    assert [one["score"] for one in reply.json()["candidates"]] == ours


def test_a_page_in_pieces_is_whole() -> None:
    """While it is written, such a page watches for the end of a client who is still there."""

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"a", b"b"):
            yield piece
            await asyncio.sleep(0.01)

    with served() as (client, _):
        client.app.pages.add_route("/pieces", lambda request: StreamingResponse(pieces()))
        assert client.get("/pieces").content == b"ab"
