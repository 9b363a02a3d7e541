"""B4: silent, trickling, flooding and never-reading connections are closed in time, and others do not feel them."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from app.server import arrival, listener
from app.server import connection as module
from app.settings import Connections
from loadtest.generate.payload import rank_request
from loadtest.soak.fake_engine import FakeEngine
from tests.app.bounds import bounded
from tests.reliability.live import Live, asked, closed, connect, live, read_all, statuses, wait_until

FOR_EVER = {"header_seconds": 600.0, "body_seconds": 600.0, "keep_alive_seconds": 600.0}
LIMITS = {"header_seconds": 0.4, "body_seconds": 0.8, "keep_alive_seconds": 1.0}
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
HEAD = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def patient(*, stall_seconds: float = 600.0, **seconds: float) -> Connections:
    return bounded(Connections(**FOR_EVER | seconds), stall_seconds=stall_seconds)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(), connections=LIMITS) as found:
        yield found


def trickle(sock: socket.socket, sent: bytes) -> None:
    """One byte every 20 ms until the server has had enough."""
    for byte in sent:
        try:
            sock.sendall(bytes([byte]))
        except OSError:
            return
        time.sleep(0.02)


BODY = b" " * 9999
SLOW: dict[str, tuple[Callable[[socket.socket], None], str, list[int]]] = {
    "silent": (lambda sock: None, "header_seconds", []),
    "silent after half a line": (lambda sock: sock.sendall(b"POST /ra"), "header_seconds", [408]),
    "trickling headers": (lambda sock: trickle(sock, GET + b"A: b\r\n" * 999), "header_seconds", [408]),
    "silent body": (lambda sock: sock.sendall(HEAD + b"Content-Length: 100\r\n\r\n{"), "stall_seconds", [408]),
    "trickling body": (
        lambda sock: trickle(sock, HEAD + b"Content-Length: 9999\r\n\r\n" + BODY),
        "body_seconds",
        [408],
    ),
    "idle after a reply": (lambda sock: sock.sendall(rank_request(1)), "keep_alive_seconds", [200]),
}


@pytest.mark.parametrize(("act", "limit", "expected"), SLOW.values(), ids=SLOW)
def test_a_slow_connection_is_closed_by_its_deadline_and_no_other(
    act: Callable[[socket.socket], None], limit: str, expected: list[int]
) -> None:
    with live(FakeEngine(), connections=patient(**{limit: 0.4})) as server, connect(server.port) as sock:
        acting = threading.Thread(target=act, args=(sock,), daemon=True)
        acting.start()
        assert statuses(read_all(sock)) == expected
        acting.join(5)


def test_a_body_that_stalls_is_not_given_the_time_of_a_whole_body() -> None:
    """However much of it has come before."""
    with live(FakeEngine(), connections=patient(stall_seconds=0.3)) as server, connect(server.port) as sock:
        sock.sendall(HEAD + b"Content-Length: 99999\r\n\r\n" + b" " * 50_000)
        assert statuses(read_all(sock)) == [408]


def test_a_requests_time_begins_with_its_own_first_byte() -> None:
    with live(FakeEngine()) as server, connect(server.port) as sock:
        assert asked(sock, rank_request(1)) == 200
        [connection] = server.server.observer.open
        connection.arrival.begun -= 3600  # the first request was long ago
        sent = rank_request(2)
        sock.sendall(sent[:20])
        wait_until(lambda: connection.state is module.State.HEADERS)
        assert asked(sock, sent[20:]) == 200


def test_the_defaults_close_within_ten_seconds() -> None:
    """From the first byte: slow headers and then a slow body together, as the deadlines are set out of the box."""
    limits = Connections()
    assert limits.header_seconds + max(limits.stall_seconds, arrival.LEAST_BODY_SECONDS) <= 10
    assert listener.WRITE_SECONDS <= 10


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such deadline")
@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}], ids=["keep-alive", "closing"])
@pytest.mark.parametrize("count", [1, 12], ids=["in the kernel", "in the process"])
def test_a_client_that_does_not_read_its_replies_is_cut_off(
    count: int, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little it was sent: what the process has handed to the kernel has the same deadline."""
    monkeypatch.setattr(listener, "WRITE_SECONDS", 0.3)
    sent = rank_request(1, candidates=4000) * (count - 1) + rank_request(1, candidates=4000, headers=headers)
    with live(FakeEngine()) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(sent)
        wait_until(lambda: closed(server, "slow_reader") == 1, 5)
        wait_until(lambda: not server.server.observer.open)


def test_a_slow_reader_that_makes_progress_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """For three times the deadline it takes half a megabyte a second of ten."""
    monkeypatch.setattr(listener, "WRITE_SECONDS", 1.0)
    last = rank_request(1, candidates=4000, headers={"Connection": "close"})
    with live(FakeEngine()) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(rank_request(1, candidates=4000) * 11 + last)
        found, slow_until = b"", time.monotonic() + 3.0
        while piece := sock.recv(50_000):
            found += piece
            if time.monotonic() < slow_until:
                time.sleep(0.1)
        assert statuses(found) == [200] * 12


def test_others_do_not_feel_fifty_slow_connections(server: Live) -> None:
    quiet = latencies(server)
    slow = [connect(server.port) for _ in range(50)]
    for number, sock in enumerate(slow):
        sock.sendall((b"", b"GET /li", HEAD + b"Content-Length: 5000\r\n\r\n{", b"GET / HTTP/1.1\r\nA: b")[number % 4])
    beside = latencies(server)
    for sock in slow:
        read_all(sock)
        sock.close()
    assert beside <= quiet * 1.5 + 0.01
    wait_until(lambda: not server.server.observer.open)


def latencies(server: Live) -> float:
    """The 90th percentile of sequential requests, in seconds."""
    took = []
    with connect(server.port) as sock:
        for number in range(60):
            began = time.monotonic()
            assert asked(sock, rank_request(number + 1)) == 200
            took.append(time.monotonic() - began)
    return statistics.quantiles(took, n=10)[-1]


def test_the_stock_protocol_keeps_them_open(server: Live) -> None:
    """The negative control: without the deadlines a silent connection is still open when ours has long been closed."""
    with server.stock_server() as port, connect(port, 1.0) as sock:
        sock.sendall(b"POST /ra")
        with pytest.raises(TimeoutError):
            sock.recv(100)
