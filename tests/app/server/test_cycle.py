"""Requests without ASGI: one write a reply, disconnects as a call, no timer a connection, nothing left to collect."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app import budgets
from app.http.rank import RankCall, RankEndpoint
from app.loop_lag import LoopLag
from app.server import connection, cycle
from app.server.connection import Connection
from app.server.cycle import Cycle
from loadtest.generate.broken_requests import CHUNKED
from loadtest.generate.payload import post, rank_body, rank_request
from loadtest.generate.tensors import inference_of
from loadtest.soak.fake_engine import ACTIONS, FakeEngine
from tests.app.bounds import overrun
from tests.app.fakes import Gate
from tests.app.retrieving import loader as retrieval
from tests.reliability.live import (
    Live,
    asked,
    closed,
    connect,
    exchange,
    live,
    one_reply,
    read_all,
    statuses,
    wait_until,
)


class Recorded:
    """A transport that notes what is written."""

    def __init__(self, transport: Any, writes: list[bytes]) -> None:
        self._transport = transport
        self._writes = writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._writes.append(bytes(data))
        self._transport.write(data)


def record(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every write of the connections that are made from now on."""
    writes: list[bytes] = []
    made = Connection.connection_made
    monkeypatch.setattr(
        Connection, "connection_made", lambda protocol, transport: made(protocol, Recorded(transport, writes))
    )
    return writes


def test_a_reply_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = record(monkeypatch)
    with live(FakeEngine()) as server:
        last = rank_request(2, headers={"Connection": "close"})
        replies = exchange(server.port, rank_request(1) + rank_request(-1) + last)
        assert statuses(replies) == [200, 422, 200]
        assert b"".join(writes) == replies
        assert [write.count(b"\r\n\r\n{") for write in writes] == [1, 1, 1]  # head and body
        assert [b"\r\nconnection: close\r\n" in write for write in writes] == [False, False, True]
        assert all(b"\r\ndate: " in write and b"\r\nx-request-id: " in write for write in writes)


INFER, VERSION = "/v2/models/fake/infer", "/v2/models/fake/versions/v1/infer"
NAMED = {"X-Request-ID": "page-7"}


def inference(path: str, *, binary: bool = False, **headers: str) -> bytes:
    """A whole request in tensors, named."""
    body, fields = inference_of(json.loads(rank_body(1)), ACTIONS).body(binary=binary)
    return post("localhost", path, body, fields | NAMED | headers)


ALIKE = {
    "objects": rank_request(1, headers=NAMED),
    "a wrong value": rank_request(-1, headers=NAMED),
    "no object": post("localhost", "/rank", b"{", NAMED),
    "tensors": inference(INFER),
    "tensors of a version": inference(VERSION, **{"Content-Type": ""}),
    "binary tensors": inference(INFER, binary=True),
    "compressed tensors": post("localhost", INFER, gzip.compress(b"{}"), NAMED | {"Content-Encoding": "gzip"}),
    "no tensors": post("localhost", INFER, b"{}", NAMED),
    "no inference header": post("localhost", INFER, b"{}", NAMED | {"Inference-Header-Content-Length": "3"}),
    "another model": inference(INFER.replace("fake", "other")),
    "another version": inference(VERSION.replace("v1", "v2")),
    "text": inference(INFER, **{"Content-Type": "text/plain"}),
}


def test_a_guest_of_uvicorn_gives_the_same_reply() -> None:
    with live(FakeEngine()) as server, server.stock_server() as port:
        for name, request in ALIKE.items():
            sent = request.replace(b"Host:", b"Connection: close\r\nHost:")
            ours, guest = exchange(server.port, sent), exchange(port, sent)
            assert set(names(ours)) == set(names(guest)) - {b"server"}, name
            assert without_times(guest) == without_times(ours), name


def without_times(reply: bytes) -> tuple[list[int], bytes]:
    """Status and body of a reply, without what it says of time."""
    return statuses(reply), re.sub(rb'"(parse|queue|forward)(_ms)?":[^,}]+', b"", reply.partition(b"\r\n\r\n")[2])


def names(reply: bytes) -> list[bytes]:
    """The names of a reply's headers, sorted."""
    return sorted(line.partition(b":")[0] for line in reply.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:])


def leave(server: Live, gate: Gate) -> float:
    """One request holds the engine, and the client of another disconnects; how many were cancelled in the queue."""
    with connect(server.port) as first:
        first.sendall(rank_request(1))
        assert gate.entered.wait(10)
        with connect(server.port) as second:
            second.sendall(rank_request(2))
            wait_until(lambda: server.service.admission.requests == 2)
        with suppress(TimeoutError):  # not with the control
            wait_until(lambda: server.service.admission.requests == 1, 2)
        gate.opened.set()
        assert statuses(one_reply(first)) == [200]
        wait_until(lambda: server.service.admission.requests == 0)
    return server.sample("ranker_cancelled_total", stage="queue") or 0.0


def test_a_disconnect_cancels_what_waits() -> None:
    gate = Gate()
    engine = FakeEngine(before=gate)
    with live(engine) as server:
        assert leave(server, gate) == 1
        assert engine.forwards == [[1]]  # never computed
        assert server.sample("ranker_http_requests_total", method="POST", route="/rank", code="499") == 1


def test_without_the_call_the_work_is_done_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cycle, "disconnect", lambda *_: None)
    gate = Gate()
    engine = FakeEngine(before=gate)
    with live(engine) as server:
        assert leave(server, gate) == 0
        assert engine.forwards == [[1], [2]]


def timers(requests: int) -> int:
    """Timers that the event loop makes for the connections of a server, beside those of its clocks."""
    with live(FakeEngine()) as server, connect(server.port) as sock:
        made, call_at = [], server.loop.call_at

        def counting(when: float, callback: Any, *arguments: Any, **named: Any) -> asyncio.TimerHandle:
            if isinstance(getattr(callback, "__self__", None), Connection):
                made.append(callback)
            return call_at(when, callback, *arguments, **named)

        server.loop.call_at = counting  # type: ignore[method-assign]
        for user in range(requests):
            assert asked(sock, rank_request(user)) == 200
        return len(made)


def test_a_deadline_takes_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timers(20) == 0
    monkeypatch.setattr(connection, "rest_seconds", lambda seconds: 0.001)
    monkeypatch.setattr(cycle, "SHORT_BYTES", 0)
    assert timers(20) >= 20  # the control: a rest takes one


def kept_objects() -> int:
    return sum(type(found) in (Cycle, RankCall, Connection) for found in gc.get_objects())


def left_over(bodies: Sequence[bytes]) -> int:
    """How many requests and connections are still in memory after their end, without the garbage collector."""
    with live(FakeEngine()) as server:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                exchange(server.port, b"".join(bodies))
            wait_until(lambda: not server.server.observer.open)
            with suppress(TimeoutError):
                wait_until(lambda: not kept_objects(), 2)
            return kept_objects()
        finally:
            gc.enable()


def test_a_request_leaves_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = rank_request(1), rank_request(-1), rank_request(2, headers={"Connection": "close"})
    assert left_over(bodies) == 0
    kept = []
    begin = RankEndpoint.begin
    monkeypatch.setattr(RankEndpoint, "begin", lambda *call: kept.append(begin(*call)) or kept[-1])
    assert left_over(bodies) == 15  # the control


def test_a_refusal_leaves_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    overrun(monkeypatch)
    assert left_over([rank_request(1), rank_request(2, headers={"Connection": "close"})]) == 0
    monkeypatch.setattr(LoopLag, "is_short_of_time", True)
    monkeypatch.setattr("app.server.observer.HELD_REFUSALS", 0)
    with live(FakeEngine()) as server, connect(server.port) as sock:
        gc.collect()
        gc.disable()
        try:
            for _ in range(100):  # all but the first as a repeated one
                assert asked(sock, rank_request(1)) == 429
            assert gc.collect() < 100
        finally:
            gc.enable()


def test_a_fault_of_a_head_request_has_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.http.operations.describe", lambda *_: 1 / 0)
    with live(FakeEngine()) as server:
        head = b" /info HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert b'"code":"internal"' in exchange(server.port, b"GET" + head)
        reply = exchange(server.port, b"HEAD" + head)
        assert statuses(reply) == [500]
        assert reply.endswith(b"\r\n\r\n")


def test_every_request_is_counted_once(tmp_path: Path) -> None:
    """Before its reply is written, or behind it."""
    sent = {
        ("/rank", "200"): rank_request(1),
        ("/rank", "422"): rank_request(-1),
        ("/retrieve", "200"): post("localhost", "/retrieve", b'{"user_id":1}'),
    }
    with live(FakeEngine(), retrieval(tmp_path)) as server, connect(server.port) as sock:

        def counted() -> list[float | None]:
            return [
                server.sample("ranker_http_requests_total", method="POST", route=route, code=code)
                for route, code in sent
            ]

        for (_, code), request in sent.items():
            assert asked(sock, request) == int(code)
        wait_until(lambda: counted()[-1])
        assert counted() == [1, 1, 1]


def test_only_what_may_be_long_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []
    monkeypatch.setattr(connection, "rest_seconds", lambda seconds: held.append(seconds) or 0.0)
    body = gzip.compress(rank_request(1).partition(b"\r\n\r\n")[2])
    coded = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
    with live(FakeEngine()) as server, connect(server.port, 5) as sock:
        for request, times in ((rank_request(1), 0), (coded + b"Content-Length: %d\r\n\r\n%b" % (len(body), body), 1)):
            assert asked(sock, request) == 200
            assert len(held) == times


def test_a_connection_rests_after_a_long_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client of paths of escapes, or of lists in `Accept`, took the event loop from all others: only bodies were timed."""
    shared, own = list[float](), list[float]()
    monkeypatch.setattr(connection, "shared_rest_seconds", lambda held, resting: shared.append(held) or 0.001)
    monkeypatch.setattr(connection, "rest_seconds", lambda held: own.append(held) or 0.001)
    with live(FakeEngine()) as server, connect(server.port, 5) as sock:
        for value, count in (("a" * 1000, 0), ("a," * 1500, 1)):
            assert asked(sock, rank_request(1, headers={"X-Any": value})) == 200
            assert (len(shared), len(own)) == (count, count), "of its headers, and of its body with them"
        path = b"/" + b"%41/" * 6000
        assert asked(sock, post("localhost", path.decode(), b"")) == 404
        assert max(shared[1:]) > cycle.REFUSED_SECONDS, "of the path itself"


def test_a_connection_rests_after_a_request_for_posts_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body, rests = post("localhost", "/retrieve", b'{"user_id":1}'), []
    monkeypatch.setattr(connection, "rest_seconds", lambda held: rests.append(held) or 0.05)
    monkeypatch.setattr(connection, "shared_rest_seconds", lambda held, resting: rests.append(held) or 0.05)
    monkeypatch.setattr(cycle, "SHORT_BYTES", 0)
    with live(FakeEngine(), retrieval(tmp_path)) as server, connect(server.port, 30) as sock:
        began = time.monotonic()
        for sent, status in ((body, 200), (body.replace(b"user_id", b"userXid"), 422), (body, 200)):
            assert asked(sock, sent) == status
        assert time.monotonic() - began > 2 * 0.05
    assert len(rests) == 4, "a refused one rests as well: for its refusal, and for its body"


def test_a_connection_that_held_the_loop_rests_and_then_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rest, read = [0.0], list[float]()
    monkeypatch.setattr(connection, "rest_seconds", lambda held: read.append(time.monotonic()) or rest[0])
    monkeypatch.setattr(cycle, "SHORT_BYTES", 0)
    for rest[0] in (0.0, 0.0003, 0.05):
        read.clear()
        with live(FakeEngine()) as server, connect(server.port, 5) as sock:
            for user in range(10):
                assert asked(sock, rank_request(user)) == 200
            sock.sendall(b"".join(map(rank_request, range(9))) + rank_request(9, headers={"Connection": "close"}))
            assert statuses(read_all(sock)) == [200] * 10
        gaps = [after - before for before, after in pairwise(read)]
        assert len(gaps) == 19
        assert min(gaps) >= rest[0]
        assert (statistics.median(gaps) >= 0.05) == (rest[0] == 0.05)


def no_memory(*_: object) -> None:
    raise MemoryError


def test_a_reply_that_cannot_be_written_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would answer: its client waited for as long as it liked, past its deadline."""
    with live(FakeEngine()) as server:
        monkeypatch.setattr(Cycle, "_write", no_memory)
        for request in (rank_request(1), rank_request(-1), b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with connect(server.port, 5) as sock:
                sock.sendall(request)
                assert read_all(sock) == b""
        monkeypatch.undo()
        assert closed(server, "fault") == 3
        with connect(server.port, 5) as sock:
            assert asked(sock, rank_request(1)) == 200
        assert server.sample("ranker_queue_requests") == 0


def test_a_request_that_finds_no_memory_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cycle, "feed", no_memory)
    with live(FakeEngine()) as server, connect(server.port, 5) as sock:
        sock.sendall(rank_request(1))
        assert statuses(read_all(sock)) == [429]


def test_a_read_of_many_chunks_is_one_piece_and_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each chunk was a call, and libuv went on reading, one connection held the loop for a second at a time."""
    fed, rests, feed = list[tuple[int, int]](), list[float](), Cycle.feed

    def count(found: Cycle, data: bytes, pieces: int) -> None:
        fed.append((len(data), pieces))
        feed(found, data, pieces)

    monkeypatch.setattr(Cycle, "feed", count)
    monkeypatch.setattr(connection, "shared_rest_seconds", lambda held, resting: rests.append(held) or 0.001)
    body = rank_body(1).rjust(100_000)
    with live(FakeEngine()) as server, connect(server.port) as sock:
        sock.sendall(CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert statuses(one_reply(sock)) == [200]
    assert sum(size for size, _ in fed) == sum(pieces for _, pieces in fed) == 100_000
    assert len(fed) < 100_000 // 6
    assert len(rests) == len([pieces for _, pieces in fed if pieces > cycle.MANY_PIECES]) > 0


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET /no HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (rank_request(-1), 422),
    ],
)
def test_who_ranks_nothing_rests_the_longer_the_more_there_are(
    monkeypatch: pytest.MonkeyPatch, request_: bytes, status: int
) -> None:
    """Also within one read; a ranking in between waits on its own connection, and on no other."""
    told: list[tuple[float, int]] = []
    rests = [0.3]

    def rest(held: float, resting: int) -> float:
        told.append((held, resting))
        return rests[0]

    monkeypatch.setattr(connection, "shared_rest_seconds", rest)
    with live(FakeEngine()) as server, connect(server.port, 5) as one, connect(server.port, 5) as other:
        began = time.monotonic()
        one.sendall(request_ * 3 + rank_request(1, headers={"Connection": "close"}))
        assert asked(other, rank_request(2)) == 200
        assert len(told) < 3, "the first connection still rests"
        assert statuses(read_all(one)) == [status] * 3 + [200]
        assert time.monotonic() - began > 3 * 0.3
        assert [resting for _, resting in told] == [0, 0, 0]
        assert all(0 < held < 0.3 for held, _ in told), "without the rest before"
        wait_until(lambda: server.server.observer.resting == 0)
        rests[0] = 1.0
        with connect(server.port, 5) as third:
            for number, sock in enumerate((other, third), 4):
                assert asked(sock, request_) == status
                wait_until(lambda number=number: len(told) == number)
            assert [resting for _, resting in told[3:]] == [0, 1]
        wait_until(lambda: server.server.observer.resting == 0)


def test_all_who_rest_leave_four_fifths_of_the_loop_to_others() -> None:
    assert budgets.shared_rest_seconds(0.001, 0) == budgets.shared_rest_seconds(0.001, 1) == 0.004
    assert budgets.shared_rest_seconds(0.001, 8) == 0.032
    assert budgets.shared_rest_seconds(0.01, 1000) == budgets.MOST_REST_SECONDS


def test_a_fault_of_ours_while_a_request_is_read_is_no_fault_of_its_caller(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def begin(*arguments: Any) -> Any:
        raise RuntimeError("planted")

    seen: list[str] = []
    with live(FakeEngine()) as server:
        with monkeypatch.context() as patch:
            patch.setattr(RankEndpoint, "begin", begin)
            reply = exchange(server.port, rank_request(1) + rank_request(2))
        assert (statuses(reply), b'"code":"internal"' in reply) == ([500], True)
        assert statuses(exchange(server.port, rank_request(1, headers={"Connection": "close"}))) == [200]

        def is_told() -> bool:
            seen.append(capfd.readouterr().err)
            return "RuntimeError" in "".join(seen) and "planted" not in "".join(seen)

        wait_until(is_told)


@pytest.mark.parametrize("count", [connection.MAX_PIPELINED - 1, 2000])
def test_upgrades_in_one_read_are_declined_one_after_another(count: int) -> None:
    """As many as may be pipelined; a recursion over more would end anywhere."""
    asking = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 0\r\n\r\n"
    with live(FakeEngine()) as server:
        reply = exchange(server.port, asking * count + asking.replace(b"upgrade\r", b"close, upgrade\r"))
        *others, last = statuses(reply)
        assert set(others) == {415}
        assert (len(others), last) == (count, 415) or count > connection.MAX_PIPELINED


def status_of(port: int, path: str, method: str = "POST") -> list[int]:
    request = post("localhost", path, rank_body(1), {"Connection": "close"})
    return statuses(exchange(port, request.replace(b"POST", method.encode(), 1)))


@pytest.mark.parametrize(("path", "status"), [("/rank", 200), ("/rank/fake", 200), ("/rank/none", 404), (INFER, 422)])
def test_a_target_with_scheme_and_host_is_its_path(path: str, status: int) -> None:
    with live(FakeEngine()) as server:
        for target in (path, f"http://localhost{path}", f"HTTP://localhost:80{path}?next=http://b/c"):
            assert status_of(server.port, target) == [status]


def test_what_is_nearly_a_path_is_not_found() -> None:
    with live(FakeEngine()) as server:
        for path in ("/rank%0A", "/rank/batch%0A", f"{INFER}%0A", "/x://localhost/rank"):
            assert status_of(server.port, path) == [404]
        assert status_of(server.port, "/x://localhost/livez", "GET") == [404]
        assert status_of(server.port, "http://localhost/livez", "GET") == [200]


@pytest.mark.parametrize(("version", "begins"), [(b"1.1", b"HTTP/1.1 100 "), (b"1.0", b"HTTP/1.1 200 ")])
def test_a_client_of_http_1_0_gets_no_interim_reply(version: bytes, begins: bytes) -> None:
    head, _, body = rank_request(1, headers={"Expect": "100-continue", "Connection": "close"}).partition(b"\r\n\r\n")
    with live(FakeEngine()) as server, connect(server.port) as sock:
        sock.sendall(head.replace(b"HTTP/1.1", b"HTTP/" + version) + b"\r\n\r\n")
        if version == b"1.1":
            assert sock.recv(100).startswith(begins)
            sock.sendall(body)
        else:
            sock.sendall(body)
            assert read_all(sock).startswith(begins)


@pytest.mark.parametrize("path", ["/rank", "/rank/batch", "/retrieve", "/recommend"])
def test_accept_in_two_fields_is_one_list(path: str) -> None:
    def status_with(*accepts: str) -> list[int]:
        fields = {"Accept": "\r\nAccept: ".join(accepts), "Connection": "close"}
        return statuses(
            exchange(server.port, post("localhost", path, rank_body(1) if path == "/rank" else b"[]", fields))
        )

    with live(FakeEngine()) as server:
        assert status_with("application/json, text/html") == status_with("application/json", "text/html") != [406]
        assert status_with("text/html", "text/*") == [406]
