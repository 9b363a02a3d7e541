"""Who is refused and asks again at once waits for the next refusal; nobody else does, and nothing is computed for it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator

import pytest

from app.loop_lag import LoopLag
from app.server.observer import HOLD_SECONDS, REPEAT_SECONDS
from app.settings import Connections
from loadtest.generate.payload import rank_request
from loadtest.soak.fake_engine import FakeEngine
from tests.app.bounds import overrun
from tests.reliability.live import Live, asked, connect, live, one_reply, read_all, statuses, wait_until

ENGINE = FakeEngine()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """Refuses every request; at most two refusals wait."""
    overrun(monkeypatch, short_of_time=True)
    monkeypatch.setattr("app.server.observer.HELD_REFUSALS", 2)
    with live(ENGINE) as opened:
        yield opened
    assert ENGINE.forwards == []


def refused_after(sock: socket.socket) -> float:
    """Seconds that one more refusal takes on this connection."""
    began = time.monotonic()
    assert asked(sock, rank_request(1)) == 429
    return time.monotonic() - began


def held(server: Live) -> int:
    return len(server.server.observer.refusals)


def test_only_who_asks_again_at_once_waits(server: Live) -> None:
    with connect(server.port) as one, connect(server.port) as other:
        assert refused_after(one) < HOLD_SECONDS / 2
        assert refused_after(one) >= HOLD_SECONDS
        assert refused_after(one) >= HOLD_SECONDS
        assert refused_after(other) < HOLD_SECONDS / 2
        time.sleep(REPEAT_SECONDS)
        assert refused_after(one) < HOLD_SECONDS / 2
    assert server.sample("ranker_refusals_held_total") == 2


def test_with_time_to_spare_nobody_waits(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopLag, "is_short_of_time", False)
    with connect(server.port) as sock:
        assert max(refused_after(sock) for _ in range(5)) < HOLD_SECONDS / 2


def test_the_number_that_waits_is_bounded(server: Live) -> None:
    sockets = [connect(server.port) for _ in range(3)]
    for sock in sockets:
        refused_after(sock)
    for sock in sockets[:2]:
        sock.sendall(rank_request(1))
    wait_until(lambda: held(server) == 2)
    assert refused_after(sockets[2]) < HOLD_SECONDS / 2
    for sock in sockets[:2]:
        assert statuses(one_reply(sock)) == [429]
    assert held(server) == 0
    for sock in sockets:
        sock.close()


def test_a_drain_ends_the_waiting(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.server.observer.HOLD_SECONDS", 60.0)
    with connect(server.port) as sock:
        refused_after(sock)
        sock.sendall(rank_request(1))
        wait_until(lambda: held(server) == 1)
        server.loop.call_soon_threadsafe(server.server.drain)
        assert statuses(read_all(sock)) == [429]


def test_a_disconnect_is_forgotten(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.server.observer.HOLD_SECONDS", 60.0)
    with connect(server.port) as sock:
        refused_after(sock)
        sock.sendall(rank_request(1))
        wait_until(lambda: held(server) == 1)
    wait_until(lambda: held(server) == 0)


def test_what_comes_behind_a_refusal_that_waits_is_answered_after_it(server: Live) -> None:
    with connect(server.port) as sock:
        refused_after(sock)
        sock.sendall(rank_request(1) + b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert statuses(read_all(sock)) == [429, 200]


def test_every_refusal_is_named_and_counted_once(server: Live) -> None:
    server.server.observer.refusals.most = 0
    one, other = rank_request(1), rank_request(2)
    with connect(server.port, 5) as sock:
        sock.sendall((one + other) * 3 + one[:60])
        sock.sendall(one[60:])
        replies = b""
        while replies.count(b'"request_id"') < 7:
            replies += sock.recv(65536)
    assert statuses(replies) == [429] * 7
    assert len(set(re.findall(rb"x-request-id: (\w+)", replies))) == 7
    assert server.sample("ranker_http_requests_total", method="POST", route="/rank", code="429") == 7
    assert server.sample("ranker_rejected_total", reason="loop_overrun") == 7


def test_with_room_again_the_same_request_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(FakeEngine()) as server, connect(server.port) as sock, monkeypatch.context() as refusing:
        overrun(refusing, short_of_time=True)
        refused_after(sock)
        refused_after(sock)
        refusing.undo()
        assert asked(sock, rank_request(1)) == 200


def test_the_connection_of_a_refusal_that_waits_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    overrun(monkeypatch, short_of_time=True)
    with live(FakeEngine(), connections=Connections(keep_alive_seconds=0.3)) as server, connect(server.port) as sock:
        refused_after(sock)
        time.sleep(0.2)
        sock.sendall(rank_request(1))
        assert b" 429 " in sock.recv(65536)
