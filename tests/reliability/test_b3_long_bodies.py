"""B3: a client that writes its whole long body before it reads still gets the reply that refuses it."""

from __future__ import annotations

import http.client
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import pytest

from app.server import arrival
from app.server.connection import Connection
from app.server.cycle import Cycle
from loadtest.generate.payload import rank_request
from loadtest.soak.fake_engine import FakeEngine
from tests.app.bounds import overrun
from tests.e2e.process import DEMO, Server, serving
from tests.reliability.live import Live, asked, closed, connect, live, one_reply, read_all, statuses, wait_until

MIB = 2**20
BODY = b" " * 20 * MIB
TRIES = 10
SECONDS = 20.0
HEADERS = {"Content-Type": "application/json"}


def by_urllib(port: int, chunked: bool) -> int:
    """Asks for the end of the connection, as urllib always does."""
    data = chunks() if chunked else BODY
    request = urllib.request.Request(f"http://127.0.0.1:{port}/rank", data, HEADERS)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def by_http_client(port: int, chunked: bool) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("POST", "/rank", chunks() if chunked else BODY, HEADERS, encode_chunked=chunked)
    status = connection.getresponse().status
    connection.close()
    return status


def by_curl(port: int, chunked: bool) -> int:
    """Without Expect, which would let it wait for the refusal before it sends anything."""
    headers = [f"Content-Type: {HEADERS['Content-Type']}", "Expect:", *["Transfer-Encoding: chunked"] * chunked]
    options = [part for header in headers for part in ("-H", header)]
    command = ["curl", "-s", "-m", str(SECONDS), "-w", "%{http_code}", "-o", "/dev/null", "--data-binary", "@-"]
    url = f"http://127.0.0.1:{port}/rank"
    return int(subprocess.run([*command, *options, url], input=BODY, capture_output=True).stdout)


def by_socket(port: int, chunked: bool) -> int:
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(BODY)
    head = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: %b\r\n%b\r\n\r\n"
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    with connect(port, SECONDS) as sock:
        sock.sendall(head % (HEADERS["Content-Type"].encode(), framing))
        sock.sendall(body)
        return statuses(read_all(sock))[0]


def chunks() -> Iterator[bytes]:
    for start in range(0, len(BODY), MIB):
        yield BODY[start : start + MIB]


CLIENTS = {"urllib": by_urllib, "http.client": by_http_client, "curl": by_curl, "socket": by_socket}
HERE = {name: ask for name, ask in CLIENTS.items() if name != "curl" or shutil.which("curl")}
clients = pytest.mark.parametrize("ask", HERE.values(), ids=HERE)
Client = Callable[[int, bool], int]


def outcomes(ask: Client, port: int, tries: int) -> Counter[str]:
    """The statuses of that many refused bodies, every other one in chunks; an error counts under its name."""
    found: Counter[str] = Counter()
    for number in range(tries):
        try:
            found[str(ask(port, number % 2 == 1))] += 1
        except (OSError, IndexError, http.client.HTTPException) as error:
            found[type(error).__name__] += 1
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(DEMO, threads=1) as found:
        yield found


@clients
def test_a_body_that_is_too_long_is_told_so_every_time(server: Server, ask: Client) -> None:
    assert outcomes(ask, server.port, TRIES) == {"413": TRIES}


@pytest.fixture(scope="module")
def opened() -> Iterator[Live]:
    with live(FakeEngine()) as found:
        yield found


@clients
def test_every_other_early_refusal_is_read_too(opened: Live, ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(FakeEngine(), auth={"keys": {"feed": "0" * 64}}) as guarded:
        assert outcomes(ask, guarded.port, 2) == {"401": 2}
    with monkeypatch.context() as patched:
        patched.setitem(HEADERS, "Content-Type", "text/plain")
        assert outcomes(ask, opened.port, 2) == {"415": 2}
    with monkeypatch.context() as patched:
        overrun(patched)
        assert outcomes(ask, opened.port, 2) == {"429": 2}
    with monkeypatch.context() as patched:
        patched.setattr(opened.service, "_refusing", True)
        assert outcomes(ask, opened.port, 2) == {"503": 2}


def test_where_reading_stays_paused_the_refusal_is_lost(opened: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(arrival, "TURN_SECONDS", 0.3)
    monkeypatch.setattr(Connection, "_resume", lambda connection: None)
    reply = Cycle._reply

    def reply_and_pause(cycle: Cycle, *content: Any) -> None:
        reply(cycle, *content)
        cycle._connection._pause()  # type: ignore[attr-defined]

    monkeypatch.setattr(Cycle, "_reply", reply_and_pause)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012  # one in three may get through
        for _ in range(20):
            by_socket(opened.port, False)


ENDLESS = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 99999999999\r\n"
CLOSE = b"Connection: close\r\n"


def sent_until_cut(port: int, head: bytes, pieces: Iterator[bytes], pause_seconds: float = 0.0) -> tuple[int, float]:
    """Bytes that a client got rid of that writes and never stops by itself, and for how many seconds it could."""
    sent, began = 0, time.monotonic()
    with connect(port) as sock:
        sock.sendall(head + b"\r\n")
        try:
            for piece in pieces:
                sock.sendall(piece)
                sent += len(piece)
                time.sleep(pause_seconds)
        except OSError:
            return sent, time.monotonic() - began
    raise AssertionError("the client was never cut")


@pytest.mark.parametrize("head", [ENDLESS + CLOSE, ENDLESS], ids=["closing", "keep-alive"])
def test_a_client_that_never_stops_is_cut_at_the_bound_in_bytes(opened: Live, head: bytes) -> None:
    before = closed(opened, "endless_body")
    sent, _ = sent_until_cut(opened.port, head, repeat(bytes(MIB), 1000))
    assert arrival.MOST_BYTES <= sent < arrival.MOST_BYTES + 16 * MIB  # what the sockets hold
    assert closed(opened, "endless_body") == before + 1


def test_one_that_sends_on_slowly_is_cut_at_the_bound_in_seconds(opened: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "MOST_SECONDS", 1.0)
    monkeypatch.setattr(arrival, "TURN_SECONDS", 0.3)
    monkeypatch.setattr(arrival, "MOST_BYTES", 10**12)
    _, seconds = sent_until_cut(opened.port, ENDLESS + CLOSE, repeat(bytes(MIB // 8), 1000), 0.05)
    assert seconds > 0.9


def test_one_that_only_trickles_is_cut_when_it_makes_no_progress(opened: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "TURN_SECONDS", 0.3)
    _, seconds = sent_until_cut(opened.port, ENDLESS + CLOSE, repeat(b" ", 1000), 0.05)
    assert 0.2 < seconds < arrival.MOST_SECONDS


def test_a_drain_does_not_wait_longer_for_those_who_send_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "TURN_SECONDS", 0.2)
    monkeypatch.setattr(arrival, "DRAIN_SECONDS", 0.5)
    with live(FakeEngine(), drain={"delay_seconds": 0.0, "timeout_seconds": 10.0}) as server:

        def pieces() -> Iterator[bytes]:
            yield bytes(MIB)
            server.loop.call_soon_threadsafe(server.server.drain)
            yield from repeat(bytes(MIB // 8), 1000)

        _, seconds = sent_until_cut(server.port, ENDLESS + CLOSE, pieces(), 0.05)
        assert 0.4 < seconds < 8
    assert server.server.exit_code == 0


def test_a_connection_whose_refused_body_ended_is_used_again_and_then_has_a_deadline() -> None:
    with live(FakeEngine(), connections={"keep_alive_seconds": 0.5}) as server, connect(server.port, 5) as sock:
        sock.sendall(
            b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 200000\r\n\r\n"
        )
        assert statuses(one_reply(sock)) == [415]
        assert asked(sock, bytes(200_000) + rank_request(1)) == 200
        assert (
            asked(
                sock, b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\n"
            )
            == 415
        )
        sock.sendall(b"abcde")
        wait_until(lambda: closed(server, "keep_alive") == 1, 3)
