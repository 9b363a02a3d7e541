"""The client: what it sends, what it makes of replies, when it tries again. Replies are scripted here; tests/e2e asks a real server."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import httpx
import orjson
import pytest
from phoenix_ranker_client import (
    AsyncRankerClient,
    Candidate,
    DeadlineExceeded,
    Event,
    RankerClient,
    RankerError,
    Ranking,
    RequestRefused,
    ServerFault,
    Unavailable,
    routing_key,
)

CANDIDATES = [Candidate("90", 7, 1, 1779990000), Candidate(2**64 - 1, 5)]
HISTORY = [Event(17, 5, ["favorite"], 3, 12.5), Event(18, 6, {"reply": 0.5})]
GOOD: dict[str, Any] = {
    "model": {"name": "m", "version": "v"},
    "actions": ["favorite"],
    "candidates": [{"post_id": 1, "score": 0.5, "rank": 1, "probabilities": [0.5], "continuous": {}, "new": 1}],
    "history_used": 0,
    "history_dropped": 0,
    "timings_ms": {},
    "context": "h1",
}
UNKNOWN = httpx.Response(412, json={"code": "context_unknown", "detail": "unknown"})


class Scripted:
    """Replies in turn; `requests` are those that came."""

    def __init__(self, *replies: httpx.Response | Exception) -> None:
        self.requests: list[httpx.Request] = []
        self._replies = iter(replies)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = next(self._replies)
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(
            reply.status_code, headers=reply.headers, content=reply.content
        )  # a fresh one, for either client

    def bodies(self) -> list[dict[str, Any]]:
        return [orjson.loads(request.content) for request in self.requests]


def good(**changes: Any) -> httpx.Response:
    return httpx.Response(200, json=GOOD | changes)


def refusal(status: int, code: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"code": code, "detail": "why", "status": status}, headers=headers)


def client(script: Scripted, **options: Any) -> RankerClient:
    return RankerClient("http://ranker", http=httpx.Client(transport=httpx.MockTransport(script)), **options)


def ask(script: Scripted, *, is_async: bool = False, **options: Any) -> Ranking:
    if not is_async:
        return client(script, **options).rank(7, CANDIDATES, HISTORY)
    http = httpx.AsyncClient(transport=httpx.MockTransport(script))
    return asyncio.run(AsyncRankerClient("http://ranker", http=http, **options).rank(7, CANDIDATES, HISTORY))


both = pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])


@both
def test_a_call_sends_columns_its_deadline_its_name_and_its_routing_key(is_async: bool) -> None:
    script = Scripted(good())
    ranking = ask(script, is_async=is_async, api_key="secret")
    [request] = script.requests
    assert script.bodies() == [
        {
            "user_id": 7,
            "history": {
                "post_id": [17, 18], "author_id": [5, 6], "actions": [["favorite"], {"reply": 0.5}],
                "product_surface": [3, 0], "dwell_time": [12.5, 0.0],
            },
            "candidates": {"post_id": ["90", 2**64 - 1], "author_id": [7, 5], "product_surface": [1, 0], "created_at": [1779990000, 0]},
        }
    ]  # fmt: skip
    assert request.headers["authorization"] == "Bearer secret"
    assert 0 < int(request.headers["x-request-timeout-ms"]) <= 2000
    assert len(request.headers["x-request-id"]) == 32
    assert request.headers["x-routing-key"] == routing_key("7") == routing_key(7) != routing_key(7, b"salt")
    assert (ranking.model_name, ranking.context, ranking.candidates[0].score) == ("m", "h1", 0.5)


@both
def test_a_refusal_for_want_of_room_and_a_broken_connection_are_tried_again(is_async: bool) -> None:
    script = Scripted(refusal(429, "overloaded", **{"retry-after": "0"}), httpx.ReadError("gone"), good())
    assert ask(script, is_async=is_async).candidates
    assert len({request.headers["x-request-id"] for request in script.requests}) == 1


def test_attempts_are_counted() -> None:
    script = Scripted(*[refusal(503, "not_ready", **{"retry-after": "0"}) for _ in range(5)])
    with pytest.raises(Unavailable) as raised:
        ask(script, attempts=2)
    assert (raised.value.code, len(script.requests)) == ("not_ready", 2)


@pytest.mark.parametrize("is_date", [False, True])
def test_a_retry_that_cannot_begin_before_the_deadline_is_not_waited_for(is_date: bool) -> None:
    after = formatdate(time.time() + 30, usegmt=True) if is_date else "30"
    began = time.monotonic()
    with pytest.raises(Unavailable):
        ask(Scripted(refusal(429, "overloaded", **{"retry-after": after}), good()))
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refusal(401, "unauthorized"), RequestRefused),
        (refusal(422, "invalid_request"), RequestRefused),
        (refusal(504, "deadline_exceeded"), DeadlineExceeded),
        (refusal(500, "non_finite_scores"), ServerFault),
        (httpx.Response(404, text="<html>a proxy's page</html>"), RequestRefused),
        (httpx.Response(200, text="not JSON"), ServerFault),
        (httpx.Response(200, json={"candidates": 5}), ServerFault),
        (httpx.UnsupportedProtocol("ftp"), ServerFault),
    ],
)
@both
def test_other_failures_are_raised_at_once(
    reply: httpx.Response | Exception, kind: type[RankerError], is_async: bool
) -> None:
    script = Scripted(reply)
    with pytest.raises(kind) as raised:
        ask(script, is_async=is_async)
    assert len(script.requests) == 1
    assert raised.value.request_id


def test_a_context_is_named_by_its_handle_and_sent_whole_where_it_is_unknown() -> None:
    script = Scripted(good(), UNKNOWN, good(context="h2"))
    ranker = client(script)
    ranker.rank(7, CANDIDATES, HISTORY, context="h1")
    ranking = ranker.rank(7, CANDIDATES, HISTORY, context="h1", request_id="page-2")
    first, second, third = script.bodies()
    assert first["context"] == second["context"] == "h1"
    assert not {"user_id", "history"} & {*first, *second}
    assert (third["user_id"], len(third["history"]["post_id"]), "context" in third) == (7, 2, False)
    assert script.requests[2].headers["x-request-id"] == "page-2"
    assert ranking.context == "h2"
    script = Scripted(UNKNOWN, good())
    client(script).rank(7, CANDIDATES, (), context="h1")
    assert script.bodies()[1]["history"]["post_id"] == [], "an empty history is one"


def test_a_replica_that_is_behind_is_asked_again() -> None:
    posts = {"model": GOOD["model"], "corpus": {}, "posts": [], "visible": 0, "timings_ms": {}}
    script = Scripted(refusal(503, "corpus_behind", **{"retry-after": "0"}), httpx.Response(200, json=posts))
    assert client(script).retrieve(7, HISTORY, k=5, at_least=12).posts == []
    assert script.requests[1].headers["x-corpus-at-least"] == "12"


@pytest.mark.parametrize("key", ["", "k\n", " k", "ключ"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="api_key must be printable ASCII") as raised:
        RankerClient("http://ranker", api_key=key)
    assert not key.strip() or key not in str(raised.value)


def test_what_no_json_can_hold_is_refused_unsent() -> None:
    script = Scripted()
    with pytest.raises(RequestRefused):
        client(script).rank(7, CANDIDATES, HISTORY, weights={"favorite": object()})
    assert script.requests == []


def test_one_async_client_serves_the_event_loops_of_several_threads(listener: str) -> None:
    ranker = AsyncRankerClient(listener)
    found: list[float] = []
    threads = [
        threading.Thread(target=lambda: found.append(asyncio.run(ranker.rank(7, CANDIDATES)).candidates[0].score))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [0.5] * 4


def test_connections_end_with_their_event_loop(listener: str) -> None:
    ranker = AsyncRankerClient(listener)
    before = open_sockets()
    for _ in range(8):
        asyncio.run(ranker.rank(7, CANDIDATES))
    few_are_open(before)
    for _ in range(8):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(ranker.rank(7, CANDIDATES))
        loop.close()  # leaves generators as they are
    few_are_open(before)


def few_are_open(before: int) -> None:
    """Wait until at most one connection, with both its ends, is open beside those before."""
    until = time.monotonic() + 5
    while (now := open_sockets()) > before + 2:
        gc.collect()
        assert time.monotonic() < until, now - before
        time.sleep(0.01)


def open_sockets() -> int:
    """Sockets of this process, those of the test's server among them."""
    return sum("socket:" in os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))


def test_after_a_fork_no_connection_is_shared(listener: str) -> None:
    ranker = RankerClient(listener)
    ranker.rank(7, CANDIDATES)
    child = os.fork()
    if not child:
        os._exit(0 if ranker.rank(7, CANDIDATES).candidates[0].score == 0.5 else 1)
    assert ranker.rank(7, CANDIDATES).candidates[0].score == 0.5
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("no_proxy", [None, "localhost,[::1]"])
def test_the_environments_proxy_is_not_used_unless_asked(
    listener: str, monkeypatch: pytest.MonkeyPatch, no_proxy: str | None
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    if no_proxy is not None:
        monkeypatch.setenv("NO_PROXY", no_proxy)
    with RankerClient(listener) as ranker:
        assert ranker.rank(7, CANDIDATES).candidates
    if no_proxy is None:
        with (
            pytest.raises(Unavailable, match=f"{listener}.*proxy"),
            RankerClient(listener, trust_env=True, attempts=1) as ranker,
        ):
            ranker.rank(7, CANDIDATES)


@both
@pytest.mark.parametrize(
    "url", ["http://anna:se:c@ret@127.0.0.1:1", "http://anna:9/secret@127.0.0.1:x", "http://:secret@[::1"]
)
def test_no_error_shows_a_password_of_the_address(url: str, is_async: bool) -> None:
    def call() -> object:
        if is_async:
            return asyncio.run(AsyncRankerClient(url, attempts=1).rank(7, CANDIDATES))
        return RankerClient(url, attempts=1).rank(7, CANDIDATES)

    with pytest.raises(RankerError) as caught:
        call()
    assert not any(piece in str(caught.value) for piece in ("anna", "se:c", "ret", "'9'"))


def test_proxies_of_the_environment_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "localhost,[::1]")
    with pytest.raises(RequestRefused, match="NO_PROXY"):
        RankerClient("http://ranker", trust_env=True).rank(7, CANDIDATES)


@both
def test_the_deadline_bounds_a_server_that_hangs(is_async: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()

        def call() -> Any:
            if is_async:
                return asyncio.run(AsyncRankerClient(url).rank(7, CANDIDATES, timeout_seconds=0.3))
            return RankerClient(url).rank(7, CANDIDATES, timeout_seconds=0.3)

        with pytest.raises(DeadlineExceeded, match=url):
            call()
        assert time.monotonic() - began < 2


@pytest.fixture
def listener() -> Iterator[str]:
    """The URL of a server that answers every request, on connections that stay open."""
    body = orjson.dumps(GOOD)
    reply = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    def answer(connection: socket.socket) -> None:
        held = b""
        with connection:
            while chunk := connection.recv(65536):
                held += chunk
                head, gap, rest = held.partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0) if gap else -1
                if gap and len(rest) >= length:
                    held = rest[length:]
                    connection.sendall(reply)

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
