"""B5: a request that breaks the protocol gets 400 and the connection closes; never two replies to one request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.generate.broken_requests import BROKEN, CHUNKED, GET
from loadtest.generate.payload import rank_request
from loadtest.soak.fake_engine import FakeEngine
from tests.reliability.live import Live, connect, exchange, live, read_all, statuses

OTHER = {
    "HTTP/2.0": (b"GET /livez HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
    "no version": (b"GET /livez\r\n\r\n", 505),
    "a hundred headers": (GET + b"".join(b"A%d: b\r\n" % n for n in range(200)) + b"\r\n", 431),
    "a header more than a hundred": (GET + b"".join(b"A%d: b\r\n" % n for n in range(99)) + b"\r\n", 431),
    "a long header": (GET + b"A: " + b"b" * 40_000 + b"\r\n\r\n", 431),
    "a long path": (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    "many headers that never end": (GET + b"A: bbbbbbbbbb\r\n" * 10_000, 431),
    "a trailer that never ends": (CHUNKED + b"1\r\n{\r\n0\r\nA: " + b"b" * 600_000, 431),
    "a trailer's name that never ends": (CHUNKED + b"1\r\n{\r\n0\r\n" + b"b" * 600_000, 431),
    "a chunk extension that never ends": (CHUNKED + b"1;a=" + b"b" * 600_000, 431),
    "extensions longer than their chunks": (CHUNKED + (b"1;a=" + b"b" * 600 + b"\r\n \r\n") * 1000, 431),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine()) as found:
        yield found


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN)
def test_a_broken_request_gets_400_and_the_connection_closes(server: Live, sent: bytes) -> None:
    replies = exchange(server.port, sent + rank_request(1))  # what follows must not be taken for a request
    assert statuses(replies) == [400]
    assert b"connection: close" in replies
    assert b'"code":"bad_request"' in replies


@pytest.mark.parametrize(("sent", "status"), OTHER.values(), ids=OTHER)
def test_other_refusals_have_their_own_status(server: Live, sent: bytes, status: int) -> None:
    assert statuses(exchange(server.port, sent)) == [status]


@pytest.mark.parametrize("pace", [1, 7, 100])
def test_the_verdict_does_not_depend_on_how_the_bytes_arrive(server: Live, pace: int) -> None:
    for name in ("length and chunks", "folded header", "chunk longer than said"):
        with connect(server.port) as sock:
            for start in range(0, len(BROKEN[name]), pace):
                sock.sendall(BROKEN[name][start : start + pace])
            assert statuses(read_all(sock)) == [400]


def test_a_hundred_headers_pass_of_which_the_target_is_one(server: Live) -> None:
    head = GET + b"Connection: close\r\n" + b"".join(b"A%d: b\r\n" % n for n in range(97))
    assert statuses(exchange(server.port, head + b"\r\n")) == [200]


def test_whole_requests_pass_and_the_connection_stays(server: Live) -> None:
    good = rank_request(3)
    head, _, body = good.partition(b"\r\n\r\n")
    chunked = CHUNKED + b"%x\r\n%b\r\n0\r\nContent-Type: forged\r\n\r\n" % (len(body), body)
    signed = b"".join(
        b"10;signature=%b\r\n%b\r\n" % (b"5" * 24, body[at : at + 16].ljust(16)) for at in range(0, len(body), 16)
    )
    chunked += CHUNKED + signed + b"0\r\nA: %b\r\n\r\n" % (b"b" * 20_000)
    large = rank_request(5, candidates=4000)  # longer than any header may be
    last = rank_request(4, headers={"Connection": "close"})
    assert statuses(exchange(server.port, good + chunked + large + last)) == [200, 200, 200, 200, 200]
    assert statuses(exchange(server.port, head + b"\r\nConnection: close\r\n\r\n" + body)) == [200]
    assert statuses(exchange(server.port, GET.replace(b"1.1", b"1.0") + b"\r\n")) == [200]


def test_pending_replies_come_before_the_end_that_a_broken_request_brings(server: Live) -> None:
    """The third is answered by closing: a 400 there could be taken for the reply to the second."""
    found = statuses(exchange(server.port, rank_request(1) + rank_request(2) + BROKEN["length and chunks"]))
    assert found in ([200, 200], [200, 200, 400])


def test_an_early_reply_is_the_only_one_though_the_rest_of_the_body_breaks(server: Live) -> None:
    head = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server.port) as sock:
        sock.sendall(head + b"5\r\nabcde\r\n")
        first = sock.recv(65536)
        assert statuses(first) == [415]
        sock.sendall(b"zz\r\n")
        assert statuses(read_all(sock)) == []


def test_an_upgrade_is_declined_by_answering_in_http_1_1(server: Live) -> None:
    reply = exchange(
        server.port, rank_request(1, headers={"Connection": "Upgrade, HTTP2-Settings, close", "Upgrade": "h2c"})
    )
    assert statuses(reply) == [200]


def test_the_stock_protocol_lets_some_of_this_pass(server: Live) -> None:
    """The negative control: without the layer under test the same corpus is not refused."""
    for name in ("no host", "two hosts", "chunked after gzip", "chunks in HTTP/1.0"):
        with server.stock_server() as port, connect(port, 0.5) as sock:
            sock.sendall(BROKEN[name].replace(b"/rank", b"/livez"))
            assert 400 not in statuses(sock.recv(65536)), name
