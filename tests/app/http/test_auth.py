"""API keys: who is let in, and what needs none."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from starlette.testclient import TestClient

from app.settings import Auth, Queue, Settings
from tests.app.fakes import FakeEngine
from tests.app.serving import good, served

KEYS = {name: hashlib.sha256(f"{name}-key".encode()).hexdigest() for name in ("feed", "search")}


@pytest.fixture(scope="module")
def locked() -> Iterator[TestClient]:
    with served(settings=Settings(auth=Auth(keys=KEYS))) as (client, _):  # type: ignore[arg-type]
        yield client


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic feed-key"}, 401),
        ({"authorization": f"Bearer {KEYS['feed']}"}, 401),  # the hash is no key
        ({"authorization": "Bearer feed-key"}, 200),
        ({"authorization": "bearer search-key"}, 200),
        ({"x-api-key": "feed-key"}, 200),
        ({"x-api-key": "wrong"}, 401),
    ],
)
def test_keys(locked: TestClient, headers: dict[str, str], status: int) -> None:
    reply = locked.post("/rank", json=good(), headers=headers)
    assert reply.status_code == status
    if status == 401:
        assert reply.json()["code"] == "unauthorized"
        assert reply.headers["www-authenticate"] == "Bearer"


def test_probes_and_metrics_need_no_key(locked: TestClient) -> None:
    assert [locked.get(path).status_code for path in ("/livez", "/readyz", "/startupz", "/metrics")] == [200] * 4


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_key_cannot_fill_the_queue_for_others(share: float) -> None:
    gate = threading.Event()
    engine = FakeEngine(before=lambda items: (gate.wait(10), None)[1])
    queue = Queue(max_candidates=20, max_share_per_key=share, max_wait_seconds=0)
    settings = Settings(auth=Auth(keys=KEYS), queue=queue)  # type: ignore[arg-type]
    with served(engine, settings) as (client, service), ThreadPoolExecutor() as pool:

        def ask(name: str, candidates: int) -> Future[httpx.Response]:
            waiting, posts = service.admission.requests, [{"post_id": n, "author_id": 1} for n in range(candidates)]
            headers = {"authorization": f"Bearer {name}-key"}
            reply = pool.submit(client.post, "/rank", json=good(candidates=posts), headers=headers)
            while not reply.done() and service.admission.requests == waiting:
                time.sleep(0.002)
            return reply

        first, more, other = ask("feed", 8), ask("feed", 5), ask("search", 5)
        gate.set()
        wanted = [200, 429, 200] if share == 0.5 else [200, 200, 200]  # without the limit nobody is refused
        assert [reply.result(10).status_code for reply in (first, more, other)] == wanted
