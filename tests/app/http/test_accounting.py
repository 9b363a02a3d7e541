"""What one request leaves behind on each path that ranks: its log line, its counters, its stages in header, reply and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from starlette.testclient import TestClient

from app.http.application import Application, create_app
from app.http.call import Fields, Steps
from app.service.service import RankingService
from app.settings import Auth, Settings, Tracing
from app.telemetry.tracing import create_tracer
from tests.app import retrieving
from tests.app.fakes import FakeEngine, Gate, until
from tests.app.fakes import running as serving
from tests.app.serving import ask, chunk, good, served

KEY = "feed-key"
EVENT = {"post_id": 17, "author_id": 5, "actions": ["favorite"]}
LONG = [EVENT] * 20  # of which the fake ranker reads 16 and the towers 8
POSTS = {"user_id": "7", "history": [EVENT] * 3, "k": 5, "request_id": "page-7"}
VIEWER = {name: value for name, value in POSTS.items() if name != "k"}
RANKED, FOUND = ["parse", "queue", "forward"], ["parse", "queue", "encode", "search"]

# path: the request, the same beyond the window, stages of the reply, what the log line says, replies in the distributions
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], dict[str, Any], int]] = {
    "/context": (VIEWER, VIEWER | {"history": LONG}, RANKED, {"history": 3}, 0),
    "/rank": (good(), good(history=LONG), RANKED, {"candidates": 3, "history": 3}, 1),
    "/rank/batch": (
        {"requests": [good(), good(history=[])]},
        {"requests": [good(history=LONG)]},
        RANKED,
        {"candidates": 6, "history": 3, "requests": 2},
        2,
    ),
    "/explain": (
        good(explain=[90]),
        good(explain=[90], history=LONG),
        [*RANKED, "attention"],
        {"candidates": 3, "history": 3, "requests": 6},
        0,
    ),
    "/retrieve": (POSTS, POSTS | {"history": LONG}, FOUND, {"candidates": 5, "history": 3}, 0),
    "/recommend": (POSTS, POSTS | {"history": LONG}, [*FOUND, "forward"], {"candidates": 5, "history": 3}, 1),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, RankingService]]:
    auth = Auth(keys={"feed": hashlib.sha256(KEY.encode()).hexdigest()})  # type: ignore[dict-item]
    with served(
        settings=Settings(auth=auth), retrieval=retrieving.loader(tmp_path_factory.mktemp("retrieval"))
    ) as both:
        both[0].headers["x-api-key"] = KEY
        yield both


def samples(client: TestClient) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, value in lines}


def asked(client: TestClient, path: str, body: dict[str, Any]) -> tuple[Any, dict[str, float], dict[str, Any]]:
    """The reply, what each sample grew by, and the log line."""
    before = samples(client)
    with structlog.testing.capture_logs() as lines:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    [line] = [line for line in lines if line["event"] == "request"]
    return reply, {name: value - before.get(name, 0.0) for name, value in samples(client).items()}, line


@pytest.mark.parametrize("path", CALLS)
def test_a_request_is_named_counted_and_timed(running: tuple[TestClient, RankingService], path: str) -> None:
    client, service = running
    body, _, stages, said, replies = CALLS[path]
    reply, grown, line = asked(client, path, body)
    for name, value in {"route": path, "method": "POST", "status": 200, "key": "feed", "version": "v1", **said}.items():
        assert line[name] == value, name
    assert line["request_id"] == reply.headers["x-request-id"]
    assert (line["request_id"] == "page-7") == (path != "/rank/batch"), "a batch is not named after one of its requests"
    assert line["cache"] == reply.headers["x-context-cache"] in ("hit", "miss")
    assert "code" not in line
    timed = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", reply.headers["server-timing"])}
    assert timed.keys() == line["stages_ms"].keys() == {*stages, "serialize"}
    assert all(0 <= ms <= line["duration_ms"] for ms in timed.values())
    assert timed["parse"] > 0 < timed["serialize"]
    told = reply.json()["timings_ms"] if path != "/rank/batch" else reply.json()["results"][0]["timings_ms"]
    assert list(told) == stages
    labels = f'{{code="200",method="POST",route="{path}"}}'
    assert grown[f"ranker_http_requests_total{labels}"] == 1
    assert grown[f'ranker_http_request_duration_seconds_count{{method="POST",route="{path}"}}'] == 1
    for stage in {"parse", "serialize", "attention"} & {*stages, "serialize"}:
        assert grown[f'ranker_stage_duration_seconds_count{{stage="{stage}"}}'] == 1
        seconds = grown[f'ranker_stage_duration_seconds_sum{{stage="{stage}"}}']
        assert seconds == pytest.approx(line["stages_ms"][stage] / 1e3, abs=1e-6), stage
    for action in ("favorite", "reply", "report"):
        name = f'ranker_reply_probability_count{{action="{action}"}}'
        assert grown.get(name, 0) == replies, name
    assert grown["ranker_history_truncated_total"] == 0
    assert service.admission.requests == service.admission.candidates == 0


@pytest.mark.parametrize("path", CALLS)
def test_a_history_beyond_the_window_is_counted_once(running: tuple[TestClient, RankingService], path: str) -> None:
    reply, grown, line = asked(running[0], path, CALLS[path][1])
    assert grown["ranker_history_truncated_total"] == 1
    assert line["history"] == len(LONG)
    assert line.get("requests") == {"/rank/batch": 1, "/explain": 1 + 16 + 2}.get(path)
    content = reply.json()["results"][0] if path == "/rank/batch" else reply.json()
    used = 8 if path == "/retrieve" else 16
    assert (content["history_used"], content["history_dropped"]) == (used, len(LONG) - used)


@pytest.mark.parametrize("path", CALLS)
def test_a_name_in_a_header_comes_before_one_in_the_body(running: tuple[TestClient, RankingService], path: str) -> None:
    client = running[0]
    with structlog.testing.capture_logs() as lines:
        reply = client.post(path, json=CALLS[path][0], headers={"x-request-id": "mine"})
    assert reply.headers["x-request-id"] == "mine"
    assert [line["request_id"] for line in lines if line["event"] == "request"] == ["mine"]


ODD: list[tuple[dict[str, str], int, str]] = [
    ({"accept": "text/html"}, 406, "not_acceptable"),
    ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
    ({"content-encoding": "br"}, 415, "unsupported_media_type"),
    ({"content-length": "1000000000"}, 413, "too_large"),
    ({"x-request-timeout-ms": "soon"}, 422, "invalid_request"),
    ({"x-request-timeout-ms": "0"}, 504, "deadline_exceeded"),
    ({"x-api-key": "wrong"}, 401, "unauthorized"),
]


@pytest.mark.parametrize(("headers", "status", "code"), ODD, ids=[code for _, _, code in ODD])
@pytest.mark.parametrize("path", CALLS)
def test_a_request_with_odd_headers_is_refused_counted_and_holds_nothing(
    running: tuple[TestClient, RankingService], path: str, headers: dict[str, str], status: int, code: str
) -> None:
    client, service = running
    before = samples(client)
    with structlog.testing.capture_logs() as lines:
        reply = client.post(path, json=CALLS[path][0], headers=headers)
    problem = reply.json()
    if (path, code) == ("/rank/batch", "deadline_exceeded"):  # each of its requests says so
        assert [result["error"]["code"] for result in problem["results"]] == [code] * 2
    else:
        assert (reply.status_code, problem["code"]) == (status, code)
        assert [line["code"] for line in lines if line["event"] == "request"] == [code]
    after = samples(client)
    labels = f'{{code="{reply.status_code}",method="POST",route="{path}"}}'
    assert after[f"ranker_http_requests_total{labels}"] == before.get(f"ranker_http_requests_total{labels}", 0) + 1
    name = 'ranker_rejected_total{reason="too_large"}'
    assert after.get(name, 0) - before.get(name, 0) == (code == "too_large")
    assert service.admission.requests == service.admission.candidates == 0


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("path", ["/rank", "/rank/batch", "/explain"])
def test_neither_an_answer_nor_a_client_that_leaves_keeps_a_task_or_a_place(path: str, leaves: bool) -> None:
    async def scenario() -> None:
        gate = Gate()
        if not leaves:
            gate.opened.set()
        async with serving(FakeEngine(before=gate)) as service:
            app = create_app(Settings(), service)
            before = asyncio.all_tasks()
            body = chunk(json.dumps(CALLS[path][0]).encode(), False)
            asking = asyncio.ensure_future(ask(app, [body], path=path))
            if leaves:
                await gate.reached()
                asking.cancel()
            ended = await asyncio.gather(asking, return_exceptions=True)
            assert isinstance(ended[0], asyncio.CancelledError) == leaves
            await until(lambda: service.admission.requests == 0)
            assert not (leaves and gate.left.is_set()), "it is free while the engine is held"
            await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})
            gate.opened.set()

    asyncio.run(scenario())


@pytest.mark.parametrize("path", CALLS)
def test_a_call_is_answered_and_counted_once_whatever_comes_afterwards(
    running: tuple[TestClient, RankingService], path: str
) -> None:
    client, replies = running[0], list[tuple[int, bytes | None]]()
    assert isinstance(client.app, Application)
    assert client.portal is not None
    endpoint = client.app.endpoints[path]
    fields = [(b"content-type", b"application/json"), (b"x-api-key", KEY.encode())]

    async def scenario() -> None:
        def reply(status: int, headers: Fields, *_: Any) -> None:
            replies.append((status, dict(headers).get(b"retry-after")))

        calls = [endpoint.begin(fields, reply) for _ in range(4)]
        calls[0].abandon()
        calls[1].no_room()
        calls[2].too_long()
        calls[3].finish(json.dumps(CALLS[path][0]).encode())
        await until(lambda: len(replies) == 3)
        for call in calls:
            call.abandon()

    with structlog.testing.capture_logs() as lines:
        client.portal.call(scenario)
    assert replies == [(429, b"1"), (413, None), (200, None)]
    assert [line["status"] for line in lines if line["event"] == "request"] == [499, 429, 413, 200]


def test_a_request_over_http_has_its_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the tracing extra is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, settings = InMemorySpanExporter(), Settings(tracing=Tracing(enabled=True))
    tracer = create_tracer(settings.tracing, SimpleSpanProcessor(memory))
    monkeypatch.setattr("app.http.application.create_tracer", lambda asked: tracer if asked.enabled else None)
    with served(settings=settings) as (client, _):
        memory.clear()
        began = time.monotonic()
        reply = client.post("/rank", json=good(), headers={"traceparent": f"00-{7:032x}-{5:016x}-01"})
        took = time.monotonic() - began
    assert memory.export(()) is SpanExportResult.FAILURE, "it has been closed, after what waited in it was sent"
    spans = {span.name: span for span in memory.get_finished_spans()}
    assert set(spans) >= {"POST /rank", "parse", "queue", "forward", "serialize"}
    root = spans["POST /rank"]
    assert (root.context.trace_id, root.parent.span_id) == (7, 5)
    assert root.attributes["ranker.request_id"] == reply.headers["x-request-id"]
    assert 0 < root.end_time - root.start_time < took * 1e9


@pytest.mark.parametrize("path", CALLS)
def test_every_place_in_a_queue_is_taken_for_the_key_of_its_caller(
    running: tuple[TestClient, RankingService], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one caller could fill it under no name."""
    client, service = running
    keys: list[object] = []
    for queue in (service.queue, service.retrieval.queue):
        join = queue.join

        def noted(job: Any, *given: Any, join: Any = join, **named: Any) -> Any:
            keys.append(job.key)
            return join(job, *given, **named)

        monkeypatch.setattr(queue, "join", noted)
    assert client.post(path, json=CALLS[path][0]).status_code == 200
    assert set(keys) == {"feed"}
    assert len(keys) == {"/rank/batch": 2, "/explain": 6, "/recommend": 2}.get(path, 1)


def test_of_a_task_the_longest_step_counts_and_not_the_last() -> None:
    def work(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    async def scenario() -> float:
        steps = Steps()

        async def several() -> float:
            work(0.05)
            await asyncio.sleep(0)
            work(0.001)
            return steps.held_seconds()

        return await steps.run(several())

    assert 0.05 <= asyncio.run(scenario()) < 0.2
