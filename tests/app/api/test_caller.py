"""Who is let in, which bodies are read, and how much of them: what every endpoint that ranks asks before it looks at a request."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from starlette.testclient import TestClient

from app.api.caller import MOST_MEMBERS
from app.main import create_app
from app.settings import Auth, Batching, Deadline, Limits, Queue, Settings
from model.inputs import Context
from tests.app.api.live import BODY, head, listening, read_reply, until
from tests.support import rankers
from tests.support.asgi import served
from tests.support.bodies import good
from tests.support.fakes import FakeEngine, Gate
from tests.support.replies import CheckedClient

KEYS = {name: hashlib.sha256(f"{name}-key".encode()).hexdigest() for name in ("feed", "search")}
AUTH = Auth(keys=KEYS)  # type: ignore[arg-type]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served(limits=Limits(max_body_bytes=4096)) as (client, _):
        yield client


@pytest.fixture(scope="module")
def locked() -> Iterator[TestClient]:
    with served(auth=AUTH) as (client, _):
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
        ({"x-api-key": "feed-key", "authorization": "Bearer wrong"}, 200),
    ],
)
def test_keys(locked: TestClient, headers: dict[str, str], status: int) -> None:
    reply = locked.post("/rank", json=good(), headers=headers)
    assert reply.status_code == status
    if status == 401:
        assert reply.json()["code"] == "unauthorized"
        assert reply.headers["www-authenticate"] == "Bearer"


def test_keys_that_change_while_a_process_starts_are_not_missed(tmp_path: Path) -> None:
    """It cannot be told of them yet: whoever changes them sends SIGHUP to the process that runs."""
    (file := tmp_path / "keys.json").write_text(json.dumps({"feed": KEYS["feed"]}))

    def begun() -> asyncio.AbstractEventLoop:
        file.write_text(json.dumps({"search": KEYS["search"]}))
        return uvloop.new_event_loop()

    with listening(loop=begun, auth=Auth(keys_file=file)) as live:
        replies = [
            httpx.post(f"{live.url}/rank", json=good(), headers={"x-api-key": f"{name}-key"})
            for name in ("feed", "search")
        ]
    assert [reply.status_code for reply in replies] == [401, 200]


def test_probes_and_metrics_need_no_key(locked: TestClient) -> None:
    assert [locked.get(path).status_code for path in ("/livez", "/readyz", "/startupz", "/metrics")] == [200] * 4


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_key_cannot_fill_the_queue_for_others(share: float) -> None:
    gate = threading.Event()
    engine = FakeEngine(before=lambda items: (gate.wait(10), None)[1])
    queue = Queue(max_candidates=20, max_share_per_key=share, max_wait_seconds=0)
    with served(engine, auth=AUTH, queue=queue) as (client, ranker), ThreadPoolExecutor() as pool:

        def ask(name: str, candidates: int) -> Future[httpx.Response]:
            waiting = rankers.figure(ranker, "ranker_queue_requests")
            posts = [{"post_id": n, "author_id": 1} for n in range(candidates)]
            headers = {"authorization": f"Bearer {name}-key"}
            reply = pool.submit(client.post, "/rank", json=good(candidates=posts), headers=headers)
            while not reply.done() and rankers.figure(ranker, "ranker_queue_requests") == waiting:
                time.sleep(0.002)
            return reply

        first, more, other = ask("feed", 8), ask("feed", 5), ask("search", 5)
        gate.set()
        wanted = [200, 429, 200] if share == 0.5 else [200, 200, 200]  # without the limit nobody is refused
        assert [reply.result(10).status_code for reply in (first, more, other)] == wanted


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; Charset=UTF-8", 200),
        ("application/json;\tcharset=utf8", 200),
        ("application/json; v=1", 200),
        ('application/json;profile="https://example.org/p"', 200),
        ("application/json; charset=utf-16", 415),
        ("text/plain", 415),
        ("application/jsonp", 415),
        ("", 415),
    ],
)
def test_json_in_utf_8_is_taken_whatever_its_parameters(client: TestClient, sent: str, status: int) -> None:
    reply = client.post("/rank", content=BODY, headers={"content-type": sent})
    assert reply.status_code == status
    assert status == 200 or reply.json()["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("body", "coding", "status"),
    [
        (gzip.compress(BODY), "gzip", 200),
        (gzip.compress(BODY), "x-gzip", 200),
        (gzip.compress(BODY), "GZIP", 200),
        (gzip.compress(BODY), "gzip, identity", 200),
        (gzip.compress(BODY[:100]) + gzip.compress(BODY[100:200]) + gzip.compress(BODY[200:]), "gzip", 200),
        (BODY, "identity", 200),
        (BODY, "", 200),
        (BODY, "br", 415),
        (gzip.compress(gzip.compress(BODY)), "gzip, gzip", 415),
        (BODY, "gzip", 400),
        (b"", "gzip", 400),
        (gzip.compress(BODY)[:-1], "gzip", 400),
        (gzip.compress(BODY) + b"rest", "gzip", 400),
        (gzip.compress(b"") * MOST_MEMBERS + gzip.compress(BODY), "gzip", 400),
        (gzip.compress(b" " * 10_000_000), "gzip", 413),
        (gzip.compress(b" " * 3000) + gzip.compress(b" " * 3000), "gzip", 413),
    ],
    ids=range(16),
)
def test_gzip_of_any_number_of_members_is_inflated_to_the_limit(
    client: TestClient, body: bytes, coding: str, status: int
) -> None:
    reply = client.post("/rank", content=body, headers=JSON | {"content-encoding": coding})
    assert reply.status_code == status, reply.text
    assert ("accept-encoding" in reply.headers) == (status == 415)


@pytest.mark.parametrize("length", ["4097", "x", "-1", "9" * 30])
def test_a_long_or_absent_length_is_refused_before_the_body(client: TestClient, length: str) -> None:
    reply = client.post("/rank", content=b"{}", headers=JSON | {"content-length": length})
    assert (reply.status_code, reply.json()["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-request-timeout-ms": "20000"}, 200),
        ({"x-request-timeout-ms": "20000  "}, 200),  # blanks around a value are none of it
        ({"x-request-timeout-ms": "0"}, 504),
        ({"x-request-timeout-ms": "soon"}, 422),
        ({"x-request-timeout-ms": "9999999999999"}, 422),
        ({"x-request-timeout-ms": ""}, 422),
        ({"x-envoy-expected-rq-timeout-ms": "20000"}, 200),
        ({"x-envoy-expected-rq-timeout-ms": "0"}, 200),  # no limit there
        ({"x-envoy-expected-rq-timeout-ms": "soon"}, 200),  # a proxy's fault
        ({"x-request-timeout-ms": "0", "x-envoy-expected-rq-timeout-ms": "20000"}, 504),  # the shorter one counts
    ],
)
def test_a_deadline_comes_by_header(client: TestClient, headers: dict[str, str], status: int) -> None:
    reply = client.post("/rank", content=BODY, headers=JSON | headers)
    assert reply.status_code == status
    if status == 422:
        assert reply.json()["errors"] == [
            {"field": "X-Request-Timeout-Ms", "message": "must be whole milliseconds, at most 12 digits"}
        ]


def test_the_shorter_of_two_timeouts_counts() -> None:
    gate = Gate()
    with served(FakeEngine(before=gate)) as (client, _):
        headers = JSON | {"x-request-timeout-ms": "20000", "x-envoy-expected-rq-timeout-ms": "50"}
        began = time.monotonic()
        assert client.post("/rank", content=BODY, headers=headers).status_code == 504
        assert time.monotonic() - began < 5
        gate.opened.set()


def test_all_bodies_together_have_a_limit_and_give_it_back() -> None:
    gate = Gate()
    with listening(FakeEngine(before=gate), limits=Limits(max_body_bytes=1024)) as live:
        body = BODY + (1024 - len(BODY)) * b" "
        clients = [live.connect() for _ in range(65)]
        for client in clients[:64]:
            client.sendall(head(length=1024) + body)
        until(lambda: live.figure("ranker_queue_requests") == 64)
        clients[64].sendall(head(length=1024) + body)
        status, headers, reply = read_reply(clients[64])
        assert (status, json.loads(reply)["code"], headers["retry-after"]) == (429, "overloaded", "1")
        gate.opened.set()
        assert [read_reply(client)[0] for client in clients[:64]] == [200] * 64
        clients[64].sendall(head(length=1024) + body)
        assert read_reply(clients[64])[0] == 200
        for client in clients:
            client.close()


async def play(
    app: Any,
    messages: Iterable[dict[str, Any]],
    path: str = "/rank",
    headers: Sequence[tuple[bytes, bytes]] = (),
    method: str = "POST",
) -> list[dict[str, Any]]:
    """Play these ASGI messages to a path, as a server that cancels nothing; after them, silence. Returns what was sent."""
    sent: list[dict[str, Any]] = []
    given = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in given:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost"), *headers], "http_version": "1.1",
        "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("within_body", [True, False])
def test_a_disconnect_message_alone_drops_the_request(within_body: bool) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with rankers.running(FakeEngine(before=gate)) as ranker:
            app = create_app(ranker.settings, ranker)
            body = {"type": "http.request", "body": BODY, "more_body": within_body}
            assert await play(app, [body, {"type": "http.disconnect"}]) == []
            await rankers.until(lambda: rankers.figure(ranker, "ranker_queue_requests") == 0)
            gone = rankers.figure(ranker, 'ranker_http_requests_total{code="499",method="POST",route="/rank"}')
            assert gone == 1
            assert rankers.figure(ranker, 'ranker_cancelled_total{stage="body"}') == within_body
            gate.opened.set()

    asyncio.run(scenario())


@pytest.mark.parametrize(("seconds", "headers"), [(10.0, {"x-request-timeout-ms": "60000"}), (60.0, {})])
@pytest.mark.parametrize("path", ["/rank", "/rank/batch", "/explain"])
def test_no_request_gets_longer_than_the_settings_allow(path: str, seconds: float, headers: dict[str, str]) -> None:
    gate = Gate()
    with served(FakeEngine(before=gate), deadline=Deadline(default_seconds=seconds, max_seconds=0.1)) as (client, _):
        body = {"/rank": good(), "/rank/batch": {"requests": [good()]}, "/explain": good(explain=[90])}[path]
        reply = client.post(path, json=body, headers=headers)
        codes = [result["error"] for result in reply.json().get("results", [{"error": reply.json()}])]
        assert [code["code"] for code in codes] == ["deadline_exceeded"]
        gate.opened.set()


def test_a_batch_and_an_explanation_end_in_time() -> None:
    with served(
        FakeEngine(before=lambda items: time.sleep(0.1)),
        batching=Batching(max_requests=1),
        deadline=Deadline(max_seconds=0.35),
    ) as (client, _):
        began = time.monotonic()
        results = client.post("/rank/batch", json=[good(user_id=user) for user in range(1, 17)]).json()
        assert 0 < sum("error" in result for result in results) < 16
        events = [{"post_id": number, "author_id": 1} for number in range(1, 17)]
        assert client.post("/explain", json=good(explain=[90], history=events)).status_code == 504
        assert time.monotonic() - began < 2 * (0.35 + 0.2) + 0.5


@pytest.mark.parametrize("limits", [{"default_seconds": 0.3}, {"max_seconds": 0.3}])
def test_a_time_that_nobody_asked_for_begins_with_the_first_byte(limits: dict[str, float]) -> None:
    with listening(FakeEngine(), deadline=Deadline(**limits)) as live, live.connect() as slow:
        slow.sendall(head())
        time.sleep(0.5)
        slow.sendall(BODY)
        assert read_reply(slow)[0] == 504


def test_a_body_in_pieces_is_read_and_a_long_one_cut_off() -> None:
    async def scenario() -> None:
        async with rankers.running() as ranker:
            app = create_app(Settings(limits=Limits(max_body_bytes=10_000)), ranker)
            pieces = [{"type": "http.request", "body": bytes([letter]), "more_body": True} for letter in BODY]
            start, _ = await play(app, [*pieces, {"type": "http.request", "body": b"", "more_body": False}])
            assert start["status"] == 200
            pulled = 0

            def endless() -> Iterator[dict[str, Any]]:
                nonlocal pulled
                while True:
                    pulled += 1
                    yield {"type": "http.request", "body": b" " * 1000, "more_body": True}

            start, _ = await play(app, endless())
            assert (start["status"], pulled) == (413, 11)

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/rank", "/rank/batch"])
def test_a_request_without_memory_gets_an_error_and_no_place(path: str) -> None:
    class Full(FakeEngine):
        def context_of(self, handle: str, caller: str) -> Context | None:
            raise MemoryError

    with served(Full()) as (client, ranker):
        body = {"context": "0" * 32, "candidates": good()["candidates"]}
        reply = client.post(path, json=body if path == "/rank" else {"requests": [body]})
        problem = reply.json() if path == "/rank" else reply.json()["results"][0]["error"]
        assert (problem["status"], problem["code"]) == (503, "engine_down")
        assert path != "/rank" or reply.headers["retry-after"] == "1"
        assert rankers.figure(ranker, "ranker_queue_requests") == 0


def test_refused_before_its_body_is_read_a_request_reads_none() -> None:
    """A ranker that is not open says so at once, however long the body would take."""
    ranker = rankers.create()
    app = create_app(ranker.settings, ranker)
    start, body = asyncio.run(play(app, []))
    assert (start["status"], json.loads(body["body"])["code"]) == (503, "not_ready")


def test_a_long_body_sent_while_the_queue_filled_is_not_decoded() -> None:
    """It is not JSON, and nobody finds out."""
    gate, stop, long = Gate(), threading.Event(), b"{" * 100_000
    with listening(FakeEngine(before=gate), queue=Queue(max_requests=1)) as live, ThreadPoolExecutor() as pool:

        def fill() -> None:
            with live.connect() as others:
                while not stop.is_set():
                    others.sendall(head() + BODY)
                    assert read_reply(others)[0] == 429

        with live.connect() as first, live.connect() as slow, live.connect() as short:
            slow.sendall(head(length=len(long)) + long[:10])
            first.sendall(head() + BODY)
            assert gate.entered.wait(10)
            short.sendall(head(length=10) + long[:10])
            assert read_reply(short)[0] == 400
            filling = pool.submit(fill)
            try:
                until(lambda: live.figure('ranker_rejected_total{reason="queue_full"}') > 0)
                slow.sendall(long[10:])
                assert read_reply(slow)[0] == 429
            finally:
                stop.set()
            filling.result(10)
            gate.opened.set()
            assert read_reply(first)[0] == 200


LONG = b" " * 1_000_000
HONEST, SHORT_LAST = gzip.compress(LONG), gzip.compress(LONG) + gzip.compress(b"")  # whose end says that it is empty


@pytest.mark.one_process("it is about the HTTP side alone")
@pytest.mark.parametrize("body", [HONEST, SHORT_LAST], ids=["honest", "short end"])
def test_others_have_turns_between_long_gzip_bodies(body: bytes) -> None:
    """A thousand bytes may hold a million, which take milliseconds to read."""
    with served(auth=AUTH, queue=Queue(max_wait_seconds=0)) as (client, _):
        turns, turns_of_replies = 0, []

        async def one() -> None:
            message = {"type": "http.request", "body": body, "more_body": False}
            key = (b"x-api-key", b"feed-key")
            start, _ = await play(client.app, [message], headers=[(b"content-encoding", b"gzip"), key])
            assert start["status"] == 400  # blanks are no JSON
            turns_of_replies.append(turns)

        async def crowd() -> None:
            nonlocal turns
            for count in (1, 8):  # by the first it is learned how long a byte takes
                requests = [asyncio.ensure_future(one()) for _ in range(count)]
                while not all(request.done() for request in requests):
                    await asyncio.sleep(0)
                    turns += 1
                await asyncio.gather(*requests)

        assert client.portal is not None
        client.portal.call(crowd)
        assert len({*turns_of_replies[1:]}) > 4  # how many share a turn follows from how long the first one took


Request = tuple[str, bytes, list[tuple[bytes, bytes]]]
GZIPPED: Request = ("feed", HONEST, [(b"content-encoding", b"gzip")])


def replies_to(client: CheckedClient, *requests: Request) -> list[tuple[str, int]]:
    """Whose key each reply is for, and its status, in the order in which they come. Of 64 long bodies one is read before, so that it is
    learned how long a byte takes."""
    replies: list[tuple[str, int]] = []

    async def one(name: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        message = {"type": "http.request", "body": body, "more_body": False}
        key = (b"x-api-key", f"{name}-key".encode())
        start, _ = await play(client.app, [message], headers=[key, *headers])
        replies.append((name, start["status"]))

    async def crowd() -> None:
        await one(*GZIPPED)
        await asyncio.sleep(0.01)
        replies.clear()
        await asyncio.gather(*(one(*request) for request in [GZIPPED] * 64 + [*requests]))

    assert client.portal is not None
    client.portal.call(crowd)
    return replies


WAITS = {
    "longest wait": ({"queue": Queue(max_wait_seconds=0.01)}, 429),
    "deadline": ({"queue": Queue(max_wait_seconds=0), "deadline": Deadline(default_seconds=0.02)}, 504),
}


@pytest.mark.one_process("it is about the HTTP side alone")
@pytest.mark.parametrize("bound", WAITS)
def test_long_gzip_bodies_wait_no_longer_than_they_may(bound: str) -> None:
    groups, refused = WAITS[bound]
    with served(auth=AUTH, **groups) as (client, _):
        assert {status for _, status in replies_to(client)} == {400, refused}  # blanks are no JSON


@pytest.mark.one_process("it is about the HTTP side alone")
@pytest.mark.parametrize("longest_seconds", [0.0, 0.01])
def test_long_gzip_bodies_of_one_key_keep_out_no_other(longest_seconds: float) -> None:
    other = BODY.ljust(40_000)
    asked: Request = ("search", other, [(b"content-length", b"40000")])
    with served(auth=AUTH, queue=Queue(max_wait_seconds=longest_seconds)) as (client, _):
        read = [reply for reply in replies_to(client, asked) if reply[1] != 429]
        assert ("search", 200) in read
        assert longest_seconds or read.index(("search", 200)) < 32, "it came last, and waited for half of the others"
