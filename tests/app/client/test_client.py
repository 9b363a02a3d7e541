"""The client: what it sends, what it makes of replies, when it tries again. Replies are scripted, or the application's own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from email.utils import formatdate
from typing import Any

import httpx
import orjson
import phoenix_ranker_client
import pytest
from phoenix_ranker_client import (
    AsyncRankerClient,
    Candidate,
    ContextUnknown,
    DeadlineExceeded,
    Event,
    RankerClient,
    RankerError,
    Ranking,
    RankingRequest,
    RequestRefused,
    ServerFault,
    Unavailable,
    routing_key,
)

from app.http.application import create_app
from app.settings import Settings
from loadtest.soak.fake_engine import ACTIONS
from tests.app.fakes import FakeEngine, loader, running_on
from tests.app.serving import listening, port_of
from tests.reliability.live import wait_until

pytestmark = pytest.mark.anyio
CANDIDATES = [Candidate("90", 7, 1, 1779990000), Candidate(2**64 - 1, 5)]
HISTORY = [Event(17, 5, ["favorite"], 3, 12.5), Event(18, 6, {"reply": 0.5})]
GOOD = {
    "model": {"name": "m", "version": "v"},
    "actions": ["favorite"],
    "candidates": [{"post_id": 1, "score": 0.5, "rank": 1, "probabilities": [0.5], "continuous": {}, "new": 1}],
    "history_used": 0,
    "history_dropped": 0,
    "timings_ms": {},
}

Script = Iterator[httpx.Response | Exception]


def scripted(*replies: httpx.Response | Exception, **options: Any) -> tuple[RankerClient, list[httpx.Request]]:
    """A client whose service gives these replies in turn, and the requests that it saw."""
    seen: list[httpx.Request] = []
    script: Script = iter(replies)

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        reply = next(script)
        if isinstance(reply, Exception):
            raise reply
        return reply

    return RankerClient("http://test", http=httpx.Client(transport=httpx.MockTransport(handle)), **options), seen


def ok() -> httpx.Response:
    return httpx.Response(200, json=GOOD)


def refusal(status: int, code: str, retry_after: str | None = None) -> httpx.Response:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    problem = {"status": status, "code": code, "detail": "why", "errors": [{"field": "user_id", "message": "bad"}]}
    return httpx.Response(status, json=problem, headers=headers | {"x-request-id": "theirs"})


def test_a_call_names_itself_and_its_deadline() -> None:
    client, seen = scripted(ok(), api_key="secret")
    ranking = client.rank(1, CANDIDATES, HISTORY, timeout_seconds=5, request_id="mine")
    assert isinstance(ranking, Ranking)
    assert seen[0].headers["x-request-id"] == "mine"
    assert 4000 < int(seen[0].headers["x-request-timeout-ms"]) <= 5000
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert "secret" not in repr(client._calls)
    body = orjson.loads(seen[0].content)
    assert body["candidates"]["post_id"] == ["90", 2**64 - 1]
    assert body["history"]["actions"] == [["favorite"], {"reply": 0.5}]
    assert "weights" not in body


@pytest.mark.parametrize(
    "first",
    [
        refusal(429, "overloaded"),
        refusal(503, "not_ready"),
        refusal(408, "request_timeout"),
        httpx.ConnectError("no"),
        httpx.ReadError("cut"),
        httpx.Response(502, text="<html>"),  # a balancer's: the process died
        httpx.Response(504, text="<html>"),  # a balancer's, not ours: the process hangs
    ],
)
def test_a_refusal_for_want_of_room_is_tried_again(
    first: httpx.Response | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "phoenix_ranker_client.call.BACKOFF", lambda state: 0.005
    )  # by chance it is below a millisecond
    client, seen = scripted(first, ok())
    assert client.rank(1, CANDIDATES, timeout_seconds=5).model_version == "v"
    assert len(seen) == 2
    assert len({request.headers["x-request-id"] for request in seen}) == 1
    assert len({request.headers["x-routing-key"] for request in seen}) == 1
    deadlines = [int(request.headers["x-request-timeout-ms"]) for request in seen]
    assert deadlines[1] < deadlines[0]


def test_retry_after_is_honoured_unless_the_deadline_forbids() -> None:
    client, seen = scripted(refusal(429, "overloaded", "1"), ok(), refusal(503, "draining", "30"), ok())
    started = time.monotonic()
    client.rank(1, CANDIDATES, timeout_seconds=5)
    assert time.monotonic() - started >= 1.0
    assert len(seen) == 2
    seconds, error = elapsed(lambda: client.rank(1, CANDIDATES, timeout_seconds=20))
    assert seconds < 10
    assert isinstance(error, Unavailable)
    assert (error.retry_after_seconds, error.request_id, len(seen)) == (30.0, "theirs", 3)


def test_retry_after_is_a_number_or_a_date() -> None:
    now = time.time()
    dates = {formatdate(now + 60, usegmt=True): 60.0, formatdate(now - 60, usegmt=True): 0.0}
    for asked, seconds in ({"7": 7.0, "soon": None, "-1": None, "Mon, 99 Nov": None} | dates).items():
        client, _ = scripted(refusal(503, "not_ready", asked), attempts=1)
        with pytest.raises(Unavailable) as caught:
            client.rank(1, CANDIDATES)
        assert caught.value.retry_after_seconds == (seconds and pytest.approx(seconds, abs=10)), asked


def test_a_replica_that_is_behind_is_asked_again() -> None:
    posts = {"model": {"name": "t", "version": "v"}, "corpus": {}, "posts": [], "visible": 0, "timings_ms": {}, "request_id": "r",
             "history_used": 0, "history_dropped": 0}  # fmt: skip
    client, seen = scripted(refusal(503, "corpus_behind", "0"), httpx.Response(200, json=posts))
    assert client.retrieve(1, at_least="1764000000000-0", timeout_seconds=5).posts == []
    assert [request.headers["x-corpus-at-least"] for request in seen] == ["1764000000000-0"] * 2
    client, seen = scripted(refusal(422, "invalid_request"), refusal(422, "invalid_request"))
    for method, at_least in ((client.recommend, 12), (client.retrieve, None)):
        with pytest.raises(RequestRefused):
            method(1, at_least=at_least)
    assert [request.headers.get("x-corpus-at-least") for request in seen] == ["12", None]


def test_attempts_are_counted() -> None:
    client, seen = scripted(*[refusal(429, "overloaded")] * 9, attempts=4)
    with pytest.raises(Unavailable):
        client.rank(1, CANDIDATES, timeout_seconds=5)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refusal(422, "invalid_request", "1"), RequestRefused),
        (refusal(401, "unauthorized"), RequestRefused),
        (refusal(504, "deadline_exceeded"), DeadlineExceeded),
        (refusal(500, "non_finite_scores"), ServerFault),
        *((httpx.Response(status, text="<html>"), ServerFault) for status in (200, 500)),
        *((httpx.Response(200, json=body), ServerFault) for body in ({"ok": True}, [1])),
        (httpx.Response(400, json=["bad"]), RequestRefused),
        *((httpx.Response(500, json={"errors": errors}), ServerFault) for errors in (5, ["bad"])),
        (httpx.ProxyError("no"), ServerFault),
        (httpx.ReadTimeout("slow"), DeadlineExceeded),
    ],
)
def test_other_failures_are_told_at_once(reply: httpx.Response | Exception, kind: type[RankerError]) -> None:
    client, seen = scripted(reply, ok())
    with pytest.raises(kind) as caught:
        client.rank(1, CANDIDATES, timeout_seconds=5)
    assert len(seen) == 1
    if isinstance(reply, httpx.Response) and "x-request-id" in reply.headers:
        assert caught.value.errors == (("user_id", "bad"),)
        assert caught.value.code == reply.json()["code"]


def test_an_address_that_cannot_be_called_is_an_error_of_ours() -> None:
    with RankerClient("ftp://test") as client, pytest.raises(ServerFault) as caught:
        client.rank(1, CANDIDATES)
    assert (caught.value.status, caught.value.code) == (0, "transport")


def elapsed(work: Callable[[], Any]) -> tuple[float, RankerError]:
    """How long it took to fail, and how it failed."""
    started = time.monotonic()
    with pytest.raises(RankerError) as caught:
        work()
    return time.monotonic() - started, caught.value


def either(url: str, kind: type, timeout_seconds: float = 0.5, **options: Any) -> Callable[[], Any]:
    """One call of the sync or the async client."""

    async def call() -> Ranking:
        async with AsyncRankerClient(url, **options) as client:
            return await client.rank(1, CANDIDATES, timeout_seconds=timeout_seconds)

    def block() -> Ranking:
        with RankerClient(url, **options) as client:
            return client.rank(1, CANDIDATES, timeout_seconds=timeout_seconds)

    return block if kind is RankerClient else lambda: asyncio.run(call())


@contextmanager
def answering(*pieces: bytes, pause_seconds: float = 0.0) -> Iterator[str]:
    """A server that answers each connection with these bytes, one piece after a pause each; its URL."""

    def answer(connection: socket.socket) -> None:
        with connection:
            connection.recv(65_536)
            for piece in pieces:
                time.sleep(pause_seconds)
                try:
                    connection.sendall(piece)
                except OSError:
                    return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


BOTH = pytest.mark.parametrize("kind", [RankerClient, AsyncRankerClient])
LONG_SECONDS = 15.0  # far above every deadline here, and below what goes on without one
BUSY = b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"


@BOTH
def test_the_deadline_bounds_a_reply_that_comes_in_drops(kind: type) -> None:
    def drops(count: int) -> list[bytes]:
        return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % count, *[b" "] * count]

    with answering(*drops(100), pause_seconds=0.2) as url:
        seconds, error = elapsed(either(url, kind))
        assert isinstance(error, DeadlineExceeded)
        assert 0.45 < seconds < LONG_SECONDS
    with answering(*drops(5), pause_seconds=0.2) as url:
        started = time.monotonic()
        assert httpx.get(url, timeout=1.0).content == b" " * 5  # the control: httpx bounds each read alone
        assert time.monotonic() - started > 1.0


@BOTH
def test_the_deadline_bounds_all_attempts(kind: type) -> None:
    with answering(BUSY, pause_seconds=0.1) as url:
        seconds, error = elapsed(either(url, kind, attempts=1000))
    assert isinstance(error, Unavailable | DeadlineExceeded)
    assert 0.1 < seconds < LONG_SECONDS  # a thousand take a hundred seconds


@BOTH
def test_a_call_may_wait_for_ever(kind: type) -> None:
    with listening() as server:
        for seconds in (float("inf"), 1e300, 1e10, 2.0**32 / 1000):
            assert either(f"http://127.0.0.1:{port_of(server)}", kind, timeout_seconds=seconds)().model_name == "fake"
        with pytest.raises(ValueError, match="NaN"):
            either(f"http://127.0.0.1:{port_of(server)}", kind, timeout_seconds=float("nan"))()
    client, seen = scripted(ok())
    client.rank(1, CANDIDATES, timeout_seconds=2.0**32 / 1000)
    waits = {*seen[0].extensions["timeout"].values(), int(seen[0].headers["x-request-timeout-ms"]) / 1000}
    assert min(waits) > 10 * 24 * 3600
    assert max(waits) * 1000 < 2**31, "poll(2) would take it for a few milliseconds"


def test_the_deadline_bounds_the_wait_for_a_connection_too() -> None:
    with (
        answering(b"", b"", b"", pause_seconds=5) as url,
        RankerClient(url, http=httpx.Client(limits=httpx.Limits(max_connections=1))) as client,
    ):
        first = threading.Thread(target=lambda: elapsed(lambda: client.rank(1, CANDIDATES, timeout_seconds=2.0)))
        first.start()
        wait_until(lambda: bool(client._http._transport._pool.connections))  # type: ignore[attr-defined]
        seconds, error = elapsed(lambda: client.rank(1, CANDIDATES, timeout_seconds=2.5))  # 2 s of it in the pool
        first.join()
    assert isinstance(error, DeadlineExceeded)
    assert 2.0 < seconds < 4.0  # and not 4.5


FORKS = """
import os, sys
from phoenix_ranker_client import Candidate, RankerClient
client = RankerClient(sys.argv[1])
ports = lambda: [c._connection._network_stream.get_extra_info("client_addr")[1] for c in client._http._transport._pool.connections]
client.rank(1, [Candidate(2, 3)], timeout_seconds=20)
before = ports()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
client.rank(1, [Candidate(2, 3)], timeout_seconds=20)
assert (ports() == before) == bool(child), (before, ports())
"""


def test_after_a_fork_no_connection_is_shared() -> None:
    """Two processes that read one connection get each other's rankings."""
    with listening() as server:
        command = [sys.executable, "-c", FORKS, f"http://127.0.0.1:{port_of(server)}"]
        subprocess.run(command, check=True, timeout=60)


@BOTH
def test_a_reply_that_cannot_be_decoded_is_an_error_of_ours(kind: type) -> None:
    reply = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\njunk"
    with answering(reply) as url:
        assert isinstance(elapsed(either(url, kind))[1], ServerFault)


def key_in_another_process(user: int, seed: str) -> str:
    """With its own seed for Python's hashes."""
    code = f"from phoenix_ranker_client import routing_key; print(routing_key({user}))"
    path = os.path.dirname(os.path.dirname(phoenix_ranker_client.__file__))
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip()


@pytest.mark.anyio
async def test_the_routing_key_is_the_users_alone_and_the_same_everywhere() -> None:
    user = 1868434417286410240
    keys = {key_in_another_process(user, seed) for seed in ("0", "1")}
    client, seen = scripted(ok(), ok(), httpx.Response(200, json={"results": [GOOD, GOOD]}))
    client.rank(user, CANDIDATES)
    client.rank(str(user), CANDIDATES[:1], HISTORY)
    client.rank_batch([RankingRequest(user, CANDIDATES), RankingRequest(8, CANDIDATES)])  # its first user's
    keys |= {request.headers["x-routing-key"] for request in seen}
    transport = httpx.MockTransport(lambda request: (seen.append(request), ok())[1])
    async with AsyncRankerClient("http://test", http=httpx.AsyncClient(transport=transport)) as other:
        await other.rank(user, CANDIDATES)
    assert len(seen) == 4
    keys.add(seen[3].headers["x-routing-key"])
    assert keys == {"7439176c147d6a0a"}
    assert len({routing_key(user) for user in range(1000)}) == 1000
    assert routing_key(user, b"secret") not in {*keys, routing_key(user, b"other")}


@pytest.mark.parametrize("wire", ["json", "binary"])
def test_what_no_body_can_hold_is_refused_unsent(wire: str) -> None:
    client, seen = scripted(wire=wire)
    with pytest.raises(RequestRefused) as caught:
        client.rank(2**64, CANDIDATES, request_id="page-7")
    assert (caught.value.request_id, seen) == ("page-7", [])
    client, seen = scripted(refusal(412, "context_unknown"), wire=wire)
    with pytest.raises(RequestRefused, match="UTF-8"):
        client.rank("\ud800", [Candidate(90, 7)], HISTORY, context=FIRST)
    assert len(seen) == 1, "the handle stands for a user that no body can name"


@pytest.mark.parametrize("key", ["secret\n", " secret", "secret\u00e9", ""])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="api_key must be") as caught:
        RankerClient("http://test", api_key=key)
    assert "secret" not in str(caught.value)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of the application around a fake engine, on a socket."""
    with listening() as server:
        yield f"http://127.0.0.1:{port_of(server)}"


@pytest.mark.parametrize("request_id", ["page\n7", "page\u00e9"])
def test_a_name_that_no_header_can_hold_is_refused(request_id: str, url: str) -> None:
    with RankerClient(f"{url}/") as client:
        with pytest.raises(RequestRefused):
            client.rank(1, CANDIDATES, request_id=request_id)
        assert client.rank(1, CANDIDATES, request_id="page-7").model_name == "fake"  # with a slash behind the address


def test_a_batch_of_nothing_has_no_routing_key() -> None:
    client, seen = scripted(refusal(422, "invalid_request"))
    with pytest.raises(RequestRefused):
        client.rank_batch([])
    assert "x-routing-key" not in seen[0].headers


def test_no_log_line_holds_the_user_id(caplog: pytest.LogCaptureFixture) -> None:
    user = 1868434417286410240
    caplog.set_level("DEBUG")
    with answering(BUSY) as url, RankerClient(url) as client, pytest.raises(Unavailable):
        client.rank(user, CANDIDATES)
    assert caplog.records  # the libraries below do log
    assert str(user) not in caplog.text


def in_process(main: Callable[[AsyncRankerClient], Any], load: Any = None, **options: Any) -> Any:
    """Run with a client of the real application around a fake engine, or what this loads."""

    async def run() -> Any:
        async with running_on(load or loader(FakeEngine())) as service:
            http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(Settings(), service)))
            async with AsyncRankerClient("http://test", http=http, **options) as client:
                return await main(client)

    return asyncio.run(run())


def test_the_application_understands_it_and_it_the_application() -> None:
    async def main(client: AsyncRankerClient) -> None:
        options = {"weights": {"favorite": 1}, "actions_wanted": ["reply"], "impression_ts": 1780000000, "top_k": 2}
        ranking = await client.rank(7, CANDIDATES, HISTORY, **options)
        assert {candidate.post_id for candidate in ranking.candidates} == {"90", 2**64 - 1}
        assert [candidate.rank for candidate in ranking.candidates] == [1, 2]
        assert (ranking.actions, ranking.model_name, ranking.history_used) == (["reply"], "fake", 2)
        assert set(ranking.candidates[0].continuous) == {"dwell_time"}
        with pytest.raises(RequestRefused) as caught:
            await client.rank(7, [])
        assert caught.value.errors == (("candidates", "must not be empty"),)
        results = await client.rank_batch([RankingRequest(7, CANDIDATES), RankingRequest(-7, CANDIDATES)])
        assert [type(result) for result in results] == [Ranking, RequestRefused]

    in_process(main)


WEIGHED = {"weights": {"favorite": 1, "report": -2.5}, "actions_wanted": ["reply", "favorite"]}
DATED = {"impression_ts": 1780000000, "top_k": 1}


NAMED = {"weights": "x-2026-09"}
LIFTED = {"weights": {"report": -20}, "score": "offset"}


@pytest.mark.parametrize("options", [{}, WEIGHED | DATED, NAMED, LIFTED, {"weights": {}, "actions_wanted": []}])
@pytest.mark.parametrize("history", [HISTORY, [], [Event("9", 1, (), 2, 1e300)]])
def test_both_wires_give_the_same_ranking(options: dict[str, Any], history: list[Event]) -> None:
    async def main(client: AsyncRankerClient) -> Ranking:
        return await client.rank(7, CANDIDATES, history, **options)

    text, binary = (in_process(main, wire=wire) for wire in ("json", "binary"))
    assert without_time(binary) == without_time(text)
    assert options is not LIFTED or min(candidate.score for candidate in text.candidates) > 0


def without_time(ranking: Ranking) -> dict[str, Any]:
    """All that it says but for the handle, which differs between processes: numbers of the model as float32, of the time its stages."""
    said = asdict(ranking) | {"timings_ms": set(ranking.timings_ms), "context": len(ranking.context)}
    for row in said["candidates"]:
        row["probabilities"] = array("f", row["probabilities"])
        row["continuous"] = {name: array("f", [value]) for name, value in row["continuous"].items()}
    return said


@BOTH
def test_an_explanation_is_what_the_service_says(kind: type, url: str) -> None:
    async def ask() -> Any:
        client = kind(url)
        options = {"impression_ts": 1780000000, "actions_wanted": ["favorite"], "timeout_seconds": 5}
        found = client.explain("7", CANDIDATES, ["90"], HISTORY, **options)
        found = await found if kind is AsyncRankerClient else found
        await client.close() if kind is AsyncRankerClient else client.close()
        return found

    found = asyncio.run(ask())
    body = RankingRequest("7", CANDIDATES, HISTORY, 1780000000, actions_wanted=["favorite"]).to_json()
    said = httpx.post(f"{url}/explain", json=body | {"explain": ["90"]}).json()
    row = found.candidates[0]
    assert {name: getattr(row, name) for name in row.__slots__} == said["candidates"][0]
    assert (found.actions, found.events, found.history_used) == (["favorite"], said["events"], 2)
    assert (found.model_name, found.model_version) == ("fake", "v1")


def test_errors_of_the_binary_wire_are_those_of_json() -> None:
    async def main(client: AsyncRankerClient) -> list[RankerError]:
        found = []
        for user, candidates, options in (
            (7, [], {}),
            (7, CANDIDATES, {"top_k": 0}),
            (7, CANDIDATES, {"weights": {"zq9marker": 1}}),
            (-7, CANDIDATES, {}),
            ("x", CANDIDATES, {}),
            *[(wrong, CANDIDATES, {}) for wrong in ("+7", " 7", "07", 7.0, True)],
            (7, [Candidate(90.7, 7)], {}),
            (7, CANDIDATES, {"actions_wanted": ["favorite,reply"]}),
            (7, CANDIDATES, {"actions_wanted": [""]}),
            (7, [Candidate(90, 7, True)], {}),
            (7, CANDIDATES, {"history": [Event(17, 5, {"favorite": True})]}),
            (7, CANDIDATES, {"history": [Event(17, 5, dwell_time=True)]}),
            (7, CANDIDATES, {"weights": {"favorite": False}}),
        ):
            with pytest.raises(RankerError) as caught:
                await client.rank(user, candidates, **options)
            found.append(caught.value)
        return found

    for one, other in zip(in_process(main), in_process(main, wire="binary"), strict=True):
        assert (type(one), one.code) == (type(other), other.code)


@pytest.mark.parametrize("before", ["post:", ""])
@pytest.mark.parametrize("wire", ["json", "binary"])
def test_texts_are_ids_on_either_wire(wire: str, before: str) -> None:
    candidates = [Candidate(before + "1", before + "7"), Candidate("2", before + "8")]

    async def main(client: AsyncRankerClient) -> Ranking:
        return await client.rank(before + "7", candidates, [Event(before + "3", before + "7", ["favorite"])])

    for kind in ("text", "uint64") if not before else ("text",):
        ranking = in_process(main, loader(FakeEngine(), "v1", ACTIONS, kind), wire=wire)
        assert [candidate.post_id for candidate in ranking.candidates] == [before + "1", "2"]


@BOTH
def test_the_binary_wire_over_a_socket(kind: type, url: str) -> None:
    ranking = either(url, kind, wire="binary")()
    assert [candidate.post_id for candidate in ranking.candidates] == ["90", 2**64 - 1]


@pytest.mark.parametrize(
    "reply", [ok(), httpx.Response(200, content=b"xx", headers={"inference-header-content-length": "1"})]
)
def test_a_reply_that_is_not_of_the_binary_wire_is_a_fault(reply: httpx.Response) -> None:
    client, seen = scripted(reply, wire="binary")
    with pytest.raises(ServerFault):
        client.rank(1, CANDIDATES)
    assert seen[0].headers["accept"] == "application/octet-stream"


def named(status: int, handle: str, **body: Any) -> httpx.Response:
    """A reply that names a context."""
    return httpx.Response(status, json=body, headers={"x-context": handle})


FIRST, SECOND = "1" * 32, "2" * 32


def kept() -> httpx.Response:
    return named(200, FIRST, model={}, context=FIRST, history_used=2, history_dropped=0)


def test_a_context_is_named_until_it_is_unknown_and_then_sent_whole() -> None:
    unknown = refusal(412, "context_unknown")
    replies = kept(), named(200, FIRST, **GOOD), unknown, named(200, SECOND, **GOOD), named(200, "", **GOOD), ok()
    client, seen = scripted(*replies)
    context = client.context(1, HISTORY, request_id="ahead")
    assert (seen[0].url.path, seen[0].headers["x-request-id"], context.handle) == ("/context", "ahead", FIRST)
    for handle in (FIRST, SECOND, "", ""):
        assert context.rank(CANDIDATES, timeout_seconds=5, request_id="page").model_version == "v"
        assert context.handle == handle
    bodies = [orjson.loads(request.content) for request in seen]
    assert [body.get("context") for body in bodies] == [None, FIRST, FIRST, None, SECOND, None]
    assert [body.get("user_id") for body in bodies] == [1, None, None, 1, None, 1]
    assert [len(body["history"]["post_id"]) for body in bodies if "history" in body] == [2, 2, 2]
    assert len({request.headers["x-routing-key"] for request in seen}) == 1, "the user's, also without the user"
    assert {request.headers["x-request-id"] for request in seen[1:]} == {"page"}
    deadlines = [int(request.headers["x-request-timeout-ms"]) for request in seen[2:4]]
    assert deadlines[1] <= deadlines[0] <= 5000, "one for both"


def test_a_context_asks_the_model_that_keeps_it_and_is_sent_whole_where_that_is_gone() -> None:
    """In an A/B split a handle alone goes to the first model."""
    replies = [kept(), named(200, FIRST, **GOOD), refusal(404, "not_found"), named(200, SECOND, **GOOD), ok()]
    for reply, version in zip(replies, ("b1", "b1", "", "b2", "b2"), strict=True):
        reply.headers["x-model-version"] = version
    client, seen = scripted(*replies, refusal(404, "not_found"))
    context = client.context(1, HISTORY)
    for _ in range(3):
        context.rank(CANDIDATES)
    assert [request.headers.get("x-model-version") for request in seen] == [None, "b1", "b1", None, "b2"]
    assert ["context" in orjson.loads(request.content) for request in seen] == [False, True, True, False, True]
    with pytest.raises(RequestRefused) as caught:
        client.rank(1, CANDIDATES)
    assert not isinstance(caught.value, ContextUnknown)


async def test_every_call_of_a_context_is_sent_whole_where_it_is_unknown() -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        body = orjson.loads(request.content)
        if request.url.path == "/context":
            return kept()
        if "context" in body:
            return refusal(412, "context_unknown")
        posts = {"posts": [], "visible": 0, "corpus": {}, "models": {}, "events": {}}
        return named(200, SECOND, **GOOD | posts | {"candidates": []})

    http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    async with AsyncRankerClient("http://test", http=http) as client:
        for path, call in {
            "rank": lambda context: context.rank(CANDIDATES),
            "explain": lambda context: context.explain(CANDIDATES, [90]),
            "retrieve": lambda context: context.retrieve(k=3),
            "recommend": lambda context: context.recommend(k=3),
        }.items():
            context = await client.context(1, HISTORY)
            await call(context)
            assert [request.url.path for request in seen[-3:]] == ["/context", f"/{path}", f"/{path}"]
            assert context.handle == (FIRST if path == "retrieve" else SECOND)
            asked, again = (orjson.loads(request.content) for request in seen[-2:])
            assert again.keys() - asked.keys() == {"user_id", "history"}
            assert asked.keys() - again.keys() == {"context"}


def test_the_unknown_contexts_of_a_batch_are_sent_whole_and_no_others() -> None:
    unknown, wrong = (
        {"error": {"status": status, "code": code}} for status, code in ((412, "context_unknown"), (422, "x"))
    )
    first, second = GOOD | {"history_used": 1}, GOOD | {"history_used": 2}
    replies = ([first, unknown, wrong, unknown, unknown], [second, wrong], [first, second])
    client, seen = scripted(*(httpx.Response(200, json={"results": results}) for results in replies))
    requests = [RankingRequest(user, CANDIDATES, HISTORY, context=FIRST) for user in range(4)]
    requests.append(RankingRequest(4, CANDIDATES, context=FIRST))  # no history: it may not be the whole
    results = client.rank_batch(requests, timeout_seconds=5, request_id="page")
    assert [getattr(result, "history_used", type(result)) for result in results] == [
        1,
        2,
        RequestRefused,
        RequestRefused,
        ContextUnknown,
    ]
    asked, again = (orjson.loads(request.content)["requests"] for request in seen)
    assert [body.get("context") for body in asked] == [FIRST] * 5
    assert again == [RankingRequest(user, CANDIDATES, HISTORY).to_json() for user in (1, 3)]
    assert {request.headers["x-request-id"] for request in seen} == {"page"}
    deadlines = [int(request.headers["x-request-timeout-ms"]) for request in seen]
    assert deadlines[1] <= deadlines[0] <= 5000, "one for both"
    assert [result.history_used for result in client.rank_batch(requests[:2])] == [1, 2]
    assert len(seen) == 3, "where all are known nothing is sent again"


@BOTH
def test_a_batch_keeps_the_rankings_that_it_has_where_the_rest_cannot_be_sent_whole(kind: type) -> None:
    unknown = {"error": {"status": 412, "code": "context_unknown"}}
    requests = [RankingRequest(user, CANDIDATES, HISTORY, context=FIRST) for user in range(3)]
    for later, found in ((refusal(413, "too_large"), RequestRefused), (httpx.ReadTimeout("late"), DeadlineExceeded)):
        first, seen = scripted(httpx.Response(200, json={"results": [GOOD, unknown, GOOD]}), later)
        if kind is RankerClient:
            results = first.rank_batch(requests)
        else:
            http = httpx.AsyncClient(transport=first._http._transport)
            results = asyncio.run(AsyncRankerClient("http://test", http=http).rank_batch(requests))
        assert [type(result) for result in results] == [Ranking, found, Ranking]
        assert len(seen) == 2


def test_the_empty_handle_of_a_context_that_is_not_kept_names_nothing() -> None:
    replies = [ok() for _ in range(2)], httpx.Response(200, json={"results": [GOOD]})
    client, seen = scripted(*replies[0], replies[1])
    handle = client.rank(1, CANDIDATES, HISTORY).context
    assert handle == ""
    client.rank(1, CANDIDATES, [], context=handle)
    client.rank_batch([RankingRequest(1, CANDIDATES, HISTORY, context=handle)])
    bodies = [orjson.loads(request.content) for request in seen]
    assert [len(body["history"]["post_id"]) for body in (*bodies[:2], *bodies[2]["requests"])] == [2, 0, 2]


def test_a_call_without_a_history_is_not_sent_whole_and_an_empty_history_is() -> None:
    client, seen = scripted(*[refusal(412, "context_unknown")] * 12)
    for call in (
        lambda **history: client.rank(1, CANDIDATES, context=FIRST, **history),
        lambda **history: client.explain(1, CANDIDATES, [90], context=FIRST, **history),
        lambda **history: client.retrieve(1, context=FIRST, **history),
        lambda **history: client.recommend(1, context=FIRST, **history),
    ):
        with pytest.raises(ContextUnknown):
            call()
        assert ["context" in orjson.loads(request.content) for request in seen] == [True]
        seen.clear()
        with pytest.raises(ContextUnknown):
            call(history=())
        assert ["context" in orjson.loads(request.content) for request in seen] == [True, False]
        seen.clear()


def test_a_handle_alone_is_not_sent_whole_and_says_what_it_is() -> None:
    client, seen = scripted(refusal(412, "context_unknown"), refusal(412, "something_else"))
    with pytest.raises(ContextUnknown) as caught:
        client._send(client._calls._json("rank", {"context": FIRST}, [], dict, 5.0, None))
    assert isinstance(caught.value, RequestRefused)
    with pytest.raises(RequestRefused) as other:
        client.rank(1, CANDIDATES, HISTORY, context=FIRST)
    assert not isinstance(other.value, ContextUnknown)
    assert len(seen) == 2
