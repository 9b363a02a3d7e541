"""More work than the engine can do: the excess is refused with Retry-After, what is admitted is answered in time, probes go on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from app.settings import Auth, Queue, Settings
from loadtest.server import DEMO, PLAIN, Server, example, serving, wait_until
from tests.app.api.live import QUIET, Live, ready
from tests.support.clients import at_once, callers

PROBE_SECONDS = 0.5


def body(user: int, candidates: int = 64) -> bytes:
    return json.dumps(example(candidates) | {"user_id": user}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(threads=1, queue__max_wait_seconds=0.2) as server:
        yield server


KEYS = {name: f"key-of-{name}" for name in ("greedy", "modest")}


@pytest.fixture(scope="module")
def waiting() -> Iterator[Live]:
    """A server whose queue is bounded by nothing but its size and deadlines, for two callers with keys."""
    auth = Auth(keys={name: SecretStr(hashlib.sha256(key.encode()).hexdigest()) for name, key in KEYS.items()})
    queue = Queue(max_wait_seconds=0)
    with ready(Settings(port=0, checkpoint=DEMO, threads=1, queue=queue, auth=auth, logs=QUIET)) as live:
        yield live


def authorization(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def peak_kib(server: Server) -> int:
    """The most memory since the last call, in KiB."""
    peak = server.status_field("VmHWM")
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    return peak


@pytest.mark.slow
def test_the_excess_is_refused_and_the_admitted_are_in_time(server: Server, duration: float) -> None:
    bodies = [body(user, 800) for user in range(48)]
    with callers(server, lambda turn: bodies[turn % 48], 4) as light:
        time.sleep(duration / 2)
    with callers(server, lambda turn: bodies[turn % 48], 48, pause=0.02, impatient=True) as heavy:
        time.sleep(duration / 2)
    with callers(server, lambda turn: bodies[turn % 48], 4) as after:
        time.sleep(duration / 2)
    seconds = sorted(reply.seconds for reply in heavy.of(200))
    assert heavy.statuses == {200, 429}
    assert light.of(429) == []
    assert all(float(reply.headers["retry-after"]) >= 0 for reply in heavy.of(429))
    usual = statistics.median(reply.seconds for reply in light.of(200))  # 0.03 s; ten times that while other tests run
    assert seconds[int(0.99 * len(seconds))] < 1.0 + 20 * usual
    assert len(after.of(200)) > 0.25 * len(light.of(200))  # other jobs of the machine may halve its speed meanwhile
    assert len(after.of(429)) <= 0.05 * len(after.all)  # it recovers at once
    assert server.metric("ranker_queue_requests") == 0


def test_probes_and_metrics_answer_while_the_engine_is_busy(waiting: Live, duration: float) -> None:
    large = [body(user, 2000) for user in range(4)]
    with callers(waiting, lambda turn: large[turn % 4], 4, headers=authorization("greedy")) as replies:
        taken, until = [], time.monotonic() + duration / 3
        while time.monotonic() < until:
            for path in ("/livez", "/readyz", "/metrics"):
                began = time.monotonic()
                assert httpx.get(waiting.url + path, timeout=30, verify=PLAIN).status_code == 200
                taken.append(time.monotonic() - began)
    assert statistics.median(taken) < PROBE_SECONDS
    assert replies.of(200)


def test_a_deadline_that_passes_in_the_queue_drops_the_work(waiting: Live) -> None:
    before = waiting.figure("ranker_candidates_scored_total")
    bodies = [body(user, 1000) for user in range(16)]
    replies = at_once(waiting, bodies, x_request_timeout_ms="80", **authorization("greedy"))
    late = [reply for reply in replies if reply.status == 504]
    assert {reply.status for reply in replies} <= {200, 504}
    assert late
    assert all(reply.json()["code"] == "deadline_exceeded" for reply in late)
    scored = waiting.figure("ranker_candidates_scored_total") - before
    assert scored < 1000 * len(replies)  # some were never computed
    assert scored >= 1000 * (len(replies) - len(late))


@pytest.mark.slow
def test_one_caller_cannot_keep_another_from_the_engine(waiting: Live) -> None:
    large = [body(user, 1500) for user in range(16)]
    greedy, modest = authorization("greedy"), authorization("modest")
    with (
        callers(waiting, lambda turn: large[turn % 16], 16, pause=0.02, impatient=True, headers=greedy) as refused,
        httpx.Client(base_url=waiting.url, headers=modest, timeout=30, verify=PLAIN) as client,
    ):
        wait_until(lambda: refused.of(429))
        replies = [client.post("/rank", json=example(8) | {"user_id": user}) for user in range(20)]
        assert [reply.status_code for reply in replies] == [200] * 20
        assert client.get("/readyz").status_code == 200


@pytest.mark.slow
def test_slow_senders_are_cut_off_and_others_are_served(server: Server) -> None:
    line = b"POST /rank HTTP/1.1\r\nhost: localhost\r\n"
    sent = {
        "silent": b"",
        "trickling": line,
        "half a body": line + b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{",
    }
    with contextlib.ExitStack() as stack:
        held = {kind: [stack.enter_context(server.connect(40)) for _ in range(50)] for kind in sent}
        for kind, beginning in sent.items():
            for sock in held[kind]:
                sock.sendall(beginning)
        assert server.post("/rank", example()).status_code == 200
        until = time.monotonic() + 12
        while time.monotonic() < until and not is_closed(held["trickling"][0]):
            time.sleep(0.5)
        assert is_closed(held["trickling"][0])
        assert server.post("/rank", example()).status_code == 200


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has closed: a header that is sent is not taken any more."""
    try:
        sock.sendall(b"x-a: b\r\n")
        sock.setblocking(False)
        return sock.recv(100) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        sock.setblocking(True)


@pytest.mark.slow
def test_memory_is_bounded_under_256_most_expensive_bodies(server: Server) -> None:
    for user in range(8):
        server.post("/rank", body(user))
    before = server.status_field("VmRSS")
    peak_kib(server)
    expensive = json.dumps(example(4000) | {"user_id": 1}).encode()
    for _ in range(2):
        replies = at_once(server, [expensive] * 256)
        assert {reply.status for reply in replies} <= {200, 413, 429, 503}
    assert peak_kib(server) - before < 900 * 1024
    assert server.post("/rank", example()).status_code == 200


def test_a_body_over_the_limit_is_refused_without_being_held(server: Server) -> None:
    server.post("/rank", example())
    peak_kib(server)
    before = peak_kib(server)
    head = b"POST /rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(head)
        try:
            for _ in range(300):
                sock.sendall(b"%x\r\n%b\r\n" % (65536, b" " * 65536))
        except OSError:
            pass
        reply = b""
        with contextlib.suppress(OSError):
            reply = sock.recv(4096)
    assert b" 413 " in reply.split(b"\r\n")[0] or reply == b""
    assert peak_kib(server) - before < 24 * 1024
    assert server.post("/rank", example()).status_code == 200


def test_callers_that_vanish_leave_nothing_behind(server: Server) -> None:
    sent = body(1, 16)
    head = b"POST /rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    for _ in range(200):
        with server.connect() as sock:
            sock.sendall(head % len(sent) + sent)
    wait_until(lambda: server.metric("ranker_queue_requests") == 0 and server.metric("ranker_queue_candidates") == 0)
    assert server.post("/rank", example()).status_code == 200
    assert server.status_field("Threads") < 40
