"""The whole application around a fake engine, and requests that are right. Not a test itself."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from app.assembly import build_server
from app.engine.loading import RetrievalLoader
from app.http.application import create_app
from app.request.body import decode
from app.request.validate import Request, check
from app.request.vocabulary import Vocabulary
from app.server.process import RankingServer
from app.service.service import RankingService
from app.settings import Grpc, Limits, Settings
from app.telemetry.metrics import Metrics
from tests.app.fakes import FakeEngine, loaded, loader
from tests.reliability.live import wait_until

GOOD: dict[str, Any] = {
    "user_id": "1868434417286410240",
    "history": [
        {"post_id": 17, "author_id": 5, "actions": ["favorite", "2"], "product_surface": 3, "dwell_time": 12.5},
        {"post_id": "18", "author_id": 0, "actions": {"reply": 0.5}},
        {"post_id": 0, "author_id": 9},
    ],
    "candidates": [
        {"post_id": 90, "author_id": 7, "product_surface": 15, "created_at": 1779990000},
        {"post_id": "9223372036854775809", "author_id": "18446744073709551615"},
        {"post_id": 0, "author_id": 0},
    ],
    "impression_ts": 1780000000,
    "weights": {"favorite": 1.0, "report": -20},
    "top_k": 3,
    "actions_wanted": ["report", "favorite"],
    "request_id": "page-7",
}


VOCABULARY = Vocabulary.of(loaded(FakeEngine()).checkpoint.manifest)


def good(**changes: Any) -> dict[str, Any]:
    """A valid request with top-level fields replaced; `...` takes one out."""
    body = copy.deepcopy(GOOD) | changes
    return {name: value for name, value in body.items() if value is not ...}


def until_ready(client: TestClient) -> None:
    """Wait until it serves, with its second checkpoint where it has one."""
    wait_until(lambda: client.get("/readyz").status_code == 200)
    wait_until(lambda: client.get("/readyz").json().get("second") != "The second checkpoint is being loaded.")


@contextmanager
def served(
    engine: Any = None, settings: Settings | None = None, retrieval: RetrievalLoader | None = None, *manifest: Any
) -> Iterator[tuple[TestClient, RankingService]]:
    """A client of an application that is ready. Faults of the server come back as replies. `manifest`: as of `loader`."""
    settings = settings or Settings()
    service = RankingService(loader(engine or FakeEngine(), *manifest), settings, Metrics(), retrieval=retrieval)
    app = create_app(settings, service)
    with TestClient(app, raise_server_exceptions=False) as client:
        until_ready(client)
        yield client, service


@contextmanager
def listening(engine: Any = None, settings: Settings | None = None, second: Any = None) -> Iterator[RankingServer]:
    """A ready server on real sockets, in a thread, over HTTP and gRPC; with the loader of a second checkpoint where one is given."""
    settings = settings or Settings(port=0, grpc=Grpc(port=0))
    service = RankingService(loader(engine or FakeEngine()), settings, Metrics(), second=second)
    server = build_server(settings, service)
    thread = threading.Thread(target=server.run)
    thread.start()
    for _ in range(1000):
        if server.started and service.health().ready and (second is None or service.second.answers):
            break
        time.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(30)


def port_of(server: RankingServer) -> int:
    """Where it speaks HTTP."""
    port: int = server.listeners[0].socket.getsockname()[1]
    return port


def checked(body: Any, vocabulary: Vocabulary = VOCABULARY) -> Request:
    """What the service makes of a body, by default around the fake engine's checkpoint. Raises what it raises."""
    return check(decode(json.dumps(body).encode(), Limits()), vocabulary)


def value_of(exposition: str, series: str) -> float:
    """One sample, 0 where it is missing."""
    lines = [line for line in exposition.splitlines() if line.startswith(series + " ")]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


async def ask(
    app: Any, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, path: str = "/rank"
) -> list[dict[str, Any]]:
    """Play these ASGI messages to a path; after them, silence. Returns what was sent."""
    sent: list[dict[str, Any]] = []
    given = iter(messages)
    silence = asyncio.Event()

    async def receive() -> dict[str, Any]:
        for message in given:
            return message
        await silence.wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [
        (name.encode(), value.encode())
        for name, value in ({"content-type": "application/json"} | (headers or {})).items()
    ]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": raw,
        "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


def chunk(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}
