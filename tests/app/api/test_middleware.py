"""What one request leaves behind on each path that ranks: its name, its log line, its counters, its problem."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from app.main import create_app
from app.service.local import LocalService
from app.settings import Auth, Logs, Settings, Tracing
from app.telemetry import logs
from model.inputs import Context
from tests.app.api.collector import collecting
from tests.app.api.live import BODY, Live, head, listening
from tests.app.api.test_caller import play
from tests.support import corpora, rankers
from tests.support.asgi import served
from tests.support.bodies import good
from tests.support.fakes import FakeEngine, Gate

KEY = "feed-key"
EVENT = {"post_id": 17, "author_id": 5, "actions": ["favorite"]}
LONG = [EVENT] * 20  # of which the fake ranker reads 16 and the towers 8
CONTEXT = {"user_id": "7", "history": [EVENT] * 3}
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
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, LocalService]]:
    auth = Auth(keys={"feed": hashlib.sha256(KEY.encode()).hexdigest()})  # type: ignore[dict-item]
    with served(auth=auth, retrieval=corpora.setting(tmp_path_factory.mktemp("retrieval"))) as both:
        both[0].headers["x-api-key"] = KEY
        yield both


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served() as (client, _):
        yield client


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with listening() as live:
        yield live


def samples(ranker: LocalService) -> dict[str, float]:
    text = ranker.metrics.render().decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, value in lines}


Running = tuple[TestClient, LocalService]


def asked(running: Running, path: str, body: dict[str, Any]) -> tuple[Any, dict[str, float], dict[str, Any]]:
    """The reply, what each sample grew by, and the log line."""
    client, ranker = running
    before = samples(ranker)
    with structlog.testing.capture_logs() as lines:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    [line] = [line for line in lines if line["event"] == "request"]
    return reply, {name: value - before.get(name, 0.0) for name, value in samples(ranker).items()}, line


def test_the_time_of_a_refused_request_is_told_from_others() -> None:
    name = 'ranker_http_request_duration_seconds_count{method="POST",refused="%s",route="/rank"}'
    with served() as (client, ranker):
        for body in (good(), {}, {}):
            client.post("/rank", json=body)
        assert [samples(ranker)[name % refused] for refused in ("false", "true")] == [1, 2]


@pytest.mark.parametrize("path", CALLS)
def test_a_request_is_named_counted_and_timed(running: Running, path: str) -> None:
    body, _, stages, said, replies = CALLS[path]
    reply, grown, line = asked(running, path, body)
    for name, value in {"route": path, "method": "POST", "status": 200, "key": "feed", "version": "v1", **said}.items():
        assert line[name] == value, name
    assert line["request_id"] == reply.headers["x-request-id"]
    assert (line["request_id"] == "page-7") == (path != "/rank/batch"), "a batch is not named after one of its requests"
    assert line["cache"] == reply.headers["x-context-cache"] in ("hit", "miss")
    assert "code" not in line
    timed = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", reply.headers["server-timing"])}
    assert timed.keys() == line["stages_ms"].keys() == {"read", *stages, "serialize"}
    assert all(0 <= ms <= line["duration_ms"] for ms in timed.values())
    assert timed["parse"] > 0 < timed["serialize"]
    told = reply.json()["timings_ms"] if path != "/rank/batch" else reply.json()["results"][0]["timings_ms"]
    assert list(told) == stages
    labels = f'{{code="200",method="POST",route="{path}"}}'
    assert grown[f"ranker_http_requests_total{labels}"] == 1
    timed_as = f'{{method="POST",refused="false",route="{path}"}}'
    assert grown[f"ranker_http_request_duration_seconds_count{timed_as}"] == 1
    for stage in {"read", "parse", "queue", "serialize", "attention"} & {"read", *stages, "serialize"}:
        assert grown[f'ranker_stage_duration_seconds_count{{stage="{stage}"}}'] == 1
        seconds = grown[f'ranker_stage_duration_seconds_sum{{stage="{stage}"}}']
        assert seconds == pytest.approx(line["stages_ms"][stage] / 1e3, abs=1e-6), stage
    for action in ("favorite", "reply", "report"):
        name = f'ranker_reply_probability_count{{action="{action}"}}'
        assert grown.get(name, 0) == replies, name
    assert grown["ranker_history_truncated_total"] == 0
    assert samples(running[1])["ranker_queue_requests"] == 0


@pytest.mark.parametrize("path", CALLS)
def test_a_history_beyond_the_window_is_counted_once(running: Running, path: str) -> None:
    reply, grown, line = asked(running, path, CALLS[path][1])
    assert grown["ranker_history_truncated_total"] == 1
    assert line["history"] == len(LONG)
    content = reply.json()["results"][0] if path == "/rank/batch" else reply.json()
    used = 8 if path == "/retrieve" else 16
    assert (content["history_used"], content["history_dropped"]) == (used, len(LONG) - used)


@pytest.mark.parametrize("path", CALLS)
def test_a_name_in_a_header_comes_before_one_in_the_body(running: Running, path: str) -> None:
    with structlog.testing.capture_logs() as lines:
        reply = running[0].post(path, json=CALLS[path][0], headers={"x-request-id": "mine"})
    assert reply.headers["x-request-id"] == "mine"
    assert [line["request_id"] for line in lines if line["event"] == "request"] == ["mine"]


ODD: list[tuple[dict[str, str], int, str]] = [
    ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
    ({"content-encoding": "br"}, 415, "unsupported_media_type"),
    ({"content-length": "1000000000"}, 413, "too_large"),
    ({"x-request-timeout-ms": "soon"}, 422, "invalid_request"),
    ({"x-request-timeout-ms": "0"}, 504, "deadline_exceeded"),
    ({"x-api-key": "wrong"}, 401, "unauthorized"),
]


@pytest.mark.parametrize(("headers", "status", "code"), ODD, ids=[code for _, _, code in ODD])
@pytest.mark.parametrize("path", CALLS)
def test_odd_headers_are_refused_counted_and_hold_nothing(
    running: Running, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    client, ranker = running
    before = samples(ranker)
    with structlog.testing.capture_logs() as lines:
        reply = client.post(path, json=CALLS[path][0], headers=headers)
    problem = reply.json()
    if (path, code) == ("/rank/batch", "deadline_exceeded"):  # each of its requests says so
        assert [result["error"]["code"] for result in problem["results"]] == [code] * 2
    else:
        assert (reply.status_code, problem["code"]) == (status, code)
        assert reply.headers["content-type"] == "application/problem+json"
        assert problem["request_id"] == reply.headers["x-request-id"]
        assert [line["code"] for line in lines if line["event"] == "request"] == [code]
    after = samples(ranker)
    labels = f'{{code="{reply.status_code}",method="POST",route="{path}"}}'
    assert after[f"ranker_http_requests_total{labels}"] == before.get(f"ranker_http_requests_total{labels}", 0) + 1
    name = 'ranker_rejected_total{reason="too_large"}'
    assert after.get(name, 0) - before.get(name, 0) == (code == "too_large")
    assert after["ranker_queue_requests"] == after["ranker_queue_candidates"] == 0


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("path", ["/rank", "/rank/batch", "/explain"])
def test_neither_answers_nor_lost_clients_keep_tasks_or_places(path: str, leaves: bool) -> None:
    async def scenario() -> None:
        gate = Gate()
        if not leaves:
            gate.opened.set()
        async with rankers.running(FakeEngine(before=gate)) as ranker:
            app = create_app(Settings(), ranker)
            before = asyncio.all_tasks()
            body = {"type": "http.request", "body": json.dumps(CALLS[path][0]).encode(), "more_body": False}
            asking = asyncio.ensure_future(play(app, [body], path))
            if leaves:
                await asyncio.to_thread(gate.entered.wait, 10)
                asking.cancel()
            ended = await asyncio.gather(asking, return_exceptions=True)
            assert isinstance(ended[0], asyncio.CancelledError) == leaves
            await rankers.until(lambda: rankers.figure(ranker, "ranker_queue_requests") == 0)
            await rankers.until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})
            gate.opened.set()
            start, *_ = await play(app, [body], path)
            assert start["status"] == 200, "there is room for the next one"

    asyncio.run(scenario())


def test_ids_are_made_where_the_callers_may_not_go_into_headers(client: TestClient) -> None:
    taken = {"a", "A9_.:@/+=-", "x" * 128}
    for sent in (*taken, "", "x" * 129, "a b", "ä", 'a"', "a\tb"):
        given = client.get("/livez", headers={"x-request-id": sent.encode("utf-8")}).headers["x-request-id"]
        assert (given == sent) == (sent in taken)
        assert sent in taken or re.fullmatch(r"[0-9a-f]{32}", given)
    assert len({client.get("/livez").headers["x-request-id"] for _ in range(100)}) == 100


def test_a_forked_process_gives_other_ids() -> None:
    with served() as (client, _):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            from app.api.middleware import new_request_id

            os.write(writer, new_request_id().encode())
            os._exit(0)
        os.waitpid(child, 0)
        theirs = os.read(reader, 1000).decode()
        os.close(reader)
        os.close(writer)
        assert re.fullmatch(r"[0-9a-f]{32}", theirs)
        assert theirs != client.get("/livez").headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/rank%2fbatch", 404),
        ("POST", "/rank%2Fbatch", 404),
        ("POST", "/%72ank", 200),
        ("POST", "/rank%0a", 404),
        ("POST", "/rank/", 404),
        ("POST", "//rank", 404),
        ("GET", "/rank", 405),
        ("PUT", "/rank", 405),
        ("POST", "/livez", 405),
        ("HEAD", "/rank", 405),
        ("HEAD", "/livez", 200),
        ("HEAD", "/nowhere", 404),
        ("GET", "/config", 404),
        ("GET", "/v2/config", 404),
        ("GET", "/v2/models/fake/stats", 404),
        ("POST", "/v2/repository/index", 404),
        ("GET", "/redoc", 404),
    ],
)
def test_a_path_is_what_a_proxy_takes_it_for(live: Live, method: str, path: str, status: int) -> None:
    text = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    with live.connect() as connection:
        connection.sendall(f"{text}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
        reply = b""
        while piece := connection.recv(65536):
            reply += piece
    line, _, rest = reply.partition(b"\r\n")
    assert int(line.split()[1]) == status, reply
    headers, _, body = rest.partition(b"\r\n\r\n")
    assert (body == b"") == (method == "HEAD")
    if status == 405:
        assert re.search(rb"allow: (POST|GET, HEAD)\r\n", headers)
    if status >= 400 and body:
        assert b"content-type: application/problem+json" in headers
        problem = json.loads(body)
        assert problem["status"] == status
        assert problem.get("error") == (problem["detail"] if path.startswith("/v2") else None)


@pytest.mark.one_process("it is about the series of the HTTP side")
def test_paths_make_no_series(running: Running) -> None:
    client, ranker = running

    def visit(number: int) -> None:
        client.request(f"M{number}", f"/{number}")
        client.get(f"/rank/{number}?x={number}", headers={"x-request-id": str(number)})
        client.post(f"/rank/{number}", json=good(user_id=number))
        client.post("/rank", json=good(user_id=number))
        client.get(f"/v2/{number}")
        client.get(f"/v2/models/fake/versions/{number}")
        client.post(f"/v2/models/m{number}/infer", json={})

    visit(0)
    before = samples(ranker).keys()
    for number in range(1, 10):
        visit(number)
    assert samples(ranker).keys() == before
    assert any('route="unmatched"' in name for name in before)
    client.put("/rank")
    refused = samples(ranker).keys()
    assert refused != before  # a series that is new would have been noticed
    for method in ("GET", "HEAD", "PATCH", "DELETE", "OPTIONS"):
        client.request(method, "/rank")
    assert samples(ranker).keys() == refused


@pytest.mark.one_process("the engine process does not know the id of the request")
def test_our_own_fault_is_a_bare_500_and_a_line_with_its_place() -> None:
    class Faulty(FakeEngine):
        def context_of(self, handle: str, caller: str) -> Context | None:
            raise KeyError("what the caller sent")

    with served(Faulty()) as (client, _), structlog.testing.capture_logs() as lines:
        reply = client.post("/rank", json={"context": "0" * 32, "candidates": good()["candidates"]})
    assert (reply.status_code, reply.json()["code"]) == (500, "internal")
    fault, request = lines
    assert (fault["event"], fault["error"], fault["request_id"]) == ("fault", "KeyError", request["request_id"])
    assert any("test_middleware.py" in frame for frame in fault["trace"])
    assert "what the caller sent" not in str(fault) + reply.text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:1", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200),
        ("evil.example", 400), ("evil.example:8000", 400), ("localhost.evil.example", 400), ("127.0.0.1.evil.example", 400),
        ("www.localhost", 400), ("", 400),
    ],
)  # fmt: skip
def test_on_loopback_only_its_own_names_are_answered(client: TestClient, host: str, status: int) -> None:
    reply = client.get("/livez", headers={"host": host})
    assert reply.status_code == status
    assert "x-request-id" in reply.headers


def test_successes_are_sampled_and_failures_are_not() -> None:
    with served(logs=Logs(success_sample=0.0)) as (client, _), structlog.testing.capture_logs() as lines:
        assert client.post("/rank", json=good()).status_code == 200
        assert client.post("/rank", json={}).status_code == 422
    assert [(line["status"], line["log_level"]) for line in lines if line["event"] == "request"] == [(422, "warning")]


SECRET = "700000000000000007"
evil = st.sampled_from(
    ["\r\n", "\n", "\x1b[31m", "\x00", "\x7f", "\u2028", '"', "\\", "{}", "é", "x" * 65_536]
) | st.text(max_size=20)
text = st.lists(evil, min_size=1, max_size=4).map("".join)


@pytest.fixture
def lines() -> io.StringIO:
    stream = io.StringIO()
    logs.configure(Logs(format="json"), stream)
    return stream


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request_id=text, name=text)
def test_every_request_is_one_ascii_line_without_its_body(lines: io.StringIO, request_id: str, name: str) -> None:
    async def scenario() -> list[dict[str, Any]]:
        async with rankers.running() as ranker:
            app = create_app(Settings(), ranker)
            body = good(history=[EVENT | {"post_id": SECRET}], user_id=SECRET, **{name: SECRET})
            headers = [(b"x-request-id", request_id.encode("utf-8", "replace"))]
            message = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
            lines.truncate(lines.seek(0))
            return await play(app, [message], headers=headers)

    start, _ = asyncio.run(scenario())
    [line] = [each for each in lines.getvalue().splitlines() if '"event":"request"' in each]
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 1000
    said = json.loads(line)
    assert said["status"] == start["status"]
    assert said["request_id"] == dict(start["headers"])[b"x-request-id"].decode()
    assert SECRET not in line


def test_a_request_over_http_has_its_spans() -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the tracing extra is not installed")
    with collecting() as spans:
        with served(tracing=Tracing(enabled=True)) as (client, _):
            began = time.monotonic()
            reply = client.post("/rank", json=good(), headers={"traceparent": f"00-{7:032x}-{5:016x}-01"})
            took = time.monotonic() - began
        assert set(spans) >= {"POST /rank", "parse", "queue", "forward", "serialize"}, "what waits is sent at the end"
    root = spans["POST /rank"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (f"{7:032x}", f"{5:016x}")
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["ranker.request_id"].string_value == reply.headers["x-request-id"]
    assert 0 < root.end_time_unix_nano - root.start_time_unix_nano < took * 1e9
    assert spans["forward"].parent_span_id == root.span_id
    assert spans["queue"].end_time_unix_nano == spans["forward"].start_time_unix_nano


@pytest.mark.parametrize("path", ["/retrieve", "/recommend", "/rank/batch", "/context"])
def test_a_span_has_a_child_for_each_stage_of_its_line(
    path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the tracing extra is not installed")
    bodies = {"/rank/batch": {"requests": [good(), good()]}, "/context": CONTEXT}
    with (
        collecting() as spans,
        served(tracing=Tracing(enabled=True), retrieval=corpora.setting(tmp_path)) as (client, _),
    ):
        reply = client.post(path, json=bodies.get(path, POSTS))
        assert reply.status_code == 200, reply.text
    root = spans.pop(f"POST {path}")
    stages = re.findall(r"(\w+);dur=", reply.headers["server-timing"])
    assert set(spans) - {"serialize"} == set(stages) - {"serialize"}
    for span in spans.values():
        assert span.parent_span_id == root.span_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano


def test_a_span_shows_waiting_where_it_was() -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the tracing extra is not installed")
    waited = 0.5
    with collecting() as spans, listening(tracing=Tracing(enabled=True)) as live, live.connect() as caller:
        caller.sendall(b"POST /rank HTTP/1.1\r\n")
        time.sleep(waited)
        caller.sendall(head(headers={"connection": "close"}).partition(b"\r\n")[2])
        time.sleep(waited)
        caller.sendall(BODY)
        while caller.recv(65536):
            pass
    read = spans["read"].end_time_unix_nano - spans["read"].start_time_unix_nano
    assert read > 1.2 * waited * 1e9, "from the first bytes"
    assert spans["parse"].start_time_unix_nano - spans["POST /rank"].start_time_unix_nano >= read


def test_probes_and_scrapes_make_no_spans() -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the tracing extra is not installed")
    with collecting() as spans, served(tracing=Tracing(enabled=True)) as (client, _):
        for path in ("/livez", "/readyz", "/health", "/startupz", "/metrics", "/v2/health/live", "/v2/health/ready"):
            assert client.get(path).status_code == 200
        assert client.get("/info").status_code == 200
    assert set(spans) == {"GET /info"}
