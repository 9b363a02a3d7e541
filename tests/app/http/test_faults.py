"""Faults of ours, bodies that are too long, clients that leave, servers that are not ready."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from app.errors import Overloaded
from app.http.application import create_app
from app.loop_lag import TICK_SECONDS
from app.service.service import RankingService
from app.settings import Deadline, Limits, Settings
from model.retrieval.inputs import PostChange, PostRows
from tests.app import retrieving
from tests.app.fakes import FakeEngine, loaded, loader, running
from tests.app.serving import ask, chunk, good, served, value_of
from tests.reliability.live import wait_until

pytestmark = pytest.mark.anyio


def test_a_fault_of_ours_is_a_problem_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the history holds a secret")

    with served() as (client, service):
        monkeypatch.setattr("app.request.codec.Packed.unpack", fail)
        reply = client.post("/rank", json=good())
        assert (reply.status_code, reply.json()["code"]) == (500, "internal")
        assert reply.headers["x-request-id"] == reply.json()["request_id"]
        assert "secret" not in reply.text
        counted = 'ranker_http_requests_total{code="500",method="POST",route="/rank"}'
        assert value_of(client.get("/metrics").text, counted) == 1
        assert service.admission.requests == 0  # its place in the queue is free again
        monkeypatch.undo()
        assert client.post("/rank", json=good()).status_code == 200
    out = capsys.readouterr()
    assert "RuntimeError" in out.out + out.err
    assert "secret" not in out.out + out.err


@pytest.mark.parametrize("path", ["/rank", "/rank/batch", "/retrieve", "/recommend"])
def test_a_request_that_gets_no_memory_is_told_so(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    bodies: dict[str, Any] = {"/rank": good(), "/rank/batch": {"requests": [good()]}}
    body = bodies.get(path, {"user_id": 1, "history": [], "k": 5})
    with served(retrieval=retrieving.loader(tmp_path)) as (client, service):
        assert client.post(path, json=body).status_code == 200
        for place in ("app.request.codec.Packed.unpack", "app.service.retrieval.SearchJob"):
            monkeypatch.setattr(place, fail)
        reply = client.post(path, json=body)
        assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (503, "engine_down", "1")
        monkeypatch.undo()
        assert service.admission.requests == 0
        assert client.post(path, json=body).status_code == 200


def test_scores_that_get_no_memory_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with served() as (client, _):
        monkeypatch.setattr("app.engine.job.RankJob.result", fail)
        reply = client.post("/rank", json=good())
    assert (reply.status_code, reply.json()["code"]) == (503, "engine_down")


def test_readiness_says_that_the_log_of_changes_is_gone(tmp_path: Path) -> None:
    change = PostChange(np.array([1], np.uint64), PostRows(*[np.empty(0, np.uint64)] * 2, np.empty(0, np.int64), []))
    with served(retrieval=retrieving.loader(tmp_path)) as (client, service):
        assert client.portal is not None
        client.portal.call(service.retrieval.change, change)
        (log,) = (tmp_path / "corpus-v1").glob("changes-*.log")
        log.unlink()
        wait_until(lambda: client.get("/readyz").status_code == 503)
        assert "was deleted, cut or replaced" in client.get("/readyz").json()["detail"]
        assert client.post("/retrieve", json={"user_id": 1, "history": [], "k": 5}).status_code == 200


def test_no_reply_comes_from_a_file_that_was_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tables.post.safetensors"
    path.write_bytes(b"numbers")
    with served() as (client, service), path.open("rb", buffering=0) as file:
        assert service.versions.current is not None
        service.versions.current.model.checkpoint.mapped.add(path.name, file, os.fstat(file.fileno()))
        assert client.post("/rank", json=good()).status_code == 200
        os.utime(path, ns=(1, 1))
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["code"]) == (503, "engine_down")
        assert "tables.post.safetensors was written to while it was served" in ready.json()["detail"]
        time.sleep(5 * TICK_SECONDS)
        refused = client.post("/rank", json=good())
        assert (refused.status_code, refused.json()["code"]) == (503, "engine_down")
        assert refused.headers["retry-after"]
        # admitted before it was seen
        monkeypatch.setattr(service.watchdog, "stall", lambda: "")
        time.sleep(5 * TICK_SECONDS)
        late = client.post("/rank", json=good())
        assert (late.status_code, late.json()["detail"]) == (503, "The engine failed on this request.")
        monkeypatch.undo()
        assert client.portal is not None
        client.portal.call(service.swap, loader(FakeEngine()))
        time.sleep(5 * TICK_SECONDS)
        assert client.post("/rank", json=good()).status_code == 200
        assert client.get("/readyz").status_code == 200


def test_readiness_names_the_way_of_computing_and_metrics_count_the_steps_down() -> None:
    with served() as (client, _):
        assert client.get("/readyz").json() == {"status": "ready"}
        assert "ranker_engine_steps_down 0.0" in client.get("/metrics").text, "an engine that has one way"
    engine = FakeEngine()
    engine.info.notes.update(rung="portable", steps_down=[{"rung": "recorded", "reason": "no compiler"}])
    with served(engine=engine) as (client, _):
        assert client.get("/readyz").json() == {"status": "ready", "engine": "portable"}
        assert "\nranker_engine_steps_down 1.0" in client.get("/metrics").text
        assert client.get("/info").json()["engine"]["steps_down"][0]["reason"] == "no compiler"


def test_before_the_checkpoint_is_there_nothing_is_ranked() -> None:
    gate = threading.Event()
    engine = FakeEngine()

    def load(steps: Any) -> Any:
        gate.wait(10)
        return loaded(engine)

    from app.telemetry.metrics import Metrics

    service = RankingService(load, Settings(), Metrics())
    with TestClient(create_app(Settings(), service)) as client:
        assert client.get("/livez").status_code == 200
        for method, path in (("GET", "/readyz"), ("GET", "/startupz"), ("GET", "/info"), ("POST", "/rank")):
            reply = client.request(method, path, json=good() if method == "POST" else None)
            assert (reply.status_code, reply.json()["code"]) == (503, "not_ready"), path
            assert int(reply.headers["retry-after"]) >= 1
        assert client.get("/openapi.json").status_code == 200
        gate.set()
        wait_until(lambda: client.get("/readyz").status_code == 200)
        service.begin_drain()
        reply = client.get("/readyz")
        assert (reply.status_code, reply.json()["code"]) == (503, "draining")
        assert client.get("/startupz").status_code == 200
        assert client.post("/rank", json=good()).status_code == 200  # still served during the delay
        service.refuse_new()
        reply = client.post("/rank", json=good())
        assert (reply.status_code, reply.json()["code"]) == (503, "draining")


def test_a_retry_is_never_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as (client, service):
        for seconds, told in ((0.0, "1"), (0.2, "1"), (1.2, "2"), (1e9, "3600"), (None, None)):

            def refuse(key: str | None, seconds: float | None = seconds) -> None:
                raise Overloaded(retry_after_seconds=seconds)

            monkeypatch.setattr(service, "check_open", refuse)
            reply = client.post("/rank", json=good())
            assert (reply.status_code, reply.headers.get("retry-after")) == (429, told)


@pytest.mark.parametrize(("seconds", "headers"), [(10.0, {"x-request-timeout-ms": "60000"}), (60.0, {})])
@pytest.mark.parametrize("path", ["/rank", "/rank/batch", "/explain"])
def test_no_request_gets_longer_than_the_settings_allow(path: str, seconds: float, headers: dict[str, str]) -> None:
    held = threading.Event()
    settings = Settings(deadline=Deadline(default_seconds=seconds, max_seconds=0.1))
    with served(FakeEngine(before=lambda items: held.wait(3) and None), settings) as (client, _):
        body = {"/rank": good(), "/rank/batch": {"requests": [good()]}, "/explain": good(explain=[90])}[path]
        reply = client.post(path, json=body, headers=headers)
        codes = [result["error"] for result in reply.json().get("results", [{"error": reply.json()}])]
        assert [code["code"] for code in codes] == ["deadline_exceeded"]
        held.set()


def test_a_long_body_is_refused_while_it_is_read() -> None:
    pulled = 0

    def endless() -> Iterator[dict[str, Any]]:
        nonlocal pulled
        while True:
            pulled += 1
            yield chunk(b" " * 1000, True)

    async def main() -> None:
        async with running(FakeEngine()) as service:
            app = create_app(Settings(limits=Limits(max_body_bytes=10_000)), service)
            sent = await ask(app, endless())  # type: ignore[arg-type]
            assert sent[0]["status"] == 413
            assert pulled == 11
            sent = await ask(app, [], {"content-length": "10001"})
            assert sent[0]["status"] == 413

    asyncio.run(main())


async def test_a_body_in_many_chunks_is_one_body() -> None:
    async with running(FakeEngine()) as service:
        app = create_app(Settings(), service)
        raw = json.dumps(good()).encode()
        pieces = [chunk(raw[place : place + 1], True) for place in range(len(raw))]
        sent = await ask(app, [*pieces, chunk(b"", False)])
        assert sent[0]["status"] == 200


async def test_a_client_that_leaves_costs_nothing_more() -> None:
    gate = threading.Event()
    engine = FakeEngine(before=lambda items: (gate.wait(10), None)[1])
    async with running(engine) as service:
        app = create_app(Settings(), service)
        raw = json.dumps(good(user_id=1)).encode()
        first = asyncio.create_task(ask(app, [chunk(raw, False)]))
        await asyncio.sleep(0.05)  # in its forward
        leaver = json.dumps(good(user_id=2)).encode()
        gone = await ask(app, [chunk(leaver, False), {"type": "http.disconnect"}])
        assert gone == []  # nobody to answer
        left_early = await ask(app, [chunk(b"{", True), {"type": "http.disconnect"}])
        assert left_early == []
        gate.set()
        assert (await first)[0]["status"] == 200
        assert engine.forwards == [[1]]  # never computed
        assert service.admission.requests == 0
        text = service.metrics.render().decode()
        assert value_of(text, 'ranker_http_requests_total{code="499",method="POST",route="/rank"}') == 2
        assert value_of(text, 'ranker_cancelled_total{stage="queue"}') == 1
        assert value_of(text, 'ranker_cancelled_total{stage="body"}') == 1
