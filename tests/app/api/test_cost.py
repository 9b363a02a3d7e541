"""What a caller without a key costs the event loop: compared with a plain request, on every port. Real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import uvloop

from app.settings import Admin, Logs, Probes
from tests.app.api.live import Live, listening, read_reply

pytestmark = pytest.mark.one_process("it is about the HTTP side alone")
REQUESTS, ROUNDS = 4, 5
MOST_TIMES = 3.0
SIZE = 32_000  # bytes: the headers together may have 32 KiB


@dataclass
class Ports:
    """A server whose loop's time is measured, and its ports by name."""

    live: Live
    loop: asyncio.AbstractEventLoop
    ports: dict[str, int]

    def times(self, port: str, request: bytes, plain: bytes) -> float:
        """How many times the loop's processor time of the plain request this one takes: the median of several rounds, which end when it is
        decided whether that is too much."""
        ratios: list[float] = []
        while len(ratios) < ROUNDS:
            ratios.append(self._seconds(port, request) / self._seconds(port, plain))
            small = sum(ratio < MOST_TIMES for ratio in ratios)
            if max(small, len(ratios) - small) > ROUNDS // 2:
                break
        return statistics.median(ratios)

    def _seconds(self, port: str, request: bytes) -> float:
        began = self._loop_seconds()
        for _ in range(REQUESTS):
            with socket.create_connection(("127.0.0.1", self.ports[port]), 20) as client:
                client.sendall(request)
                read_reply(client)
        return self._loop_seconds() - began

    def _loop_seconds(self) -> float:
        async def now() -> float:
            return time.thread_time()

        return asyncio.run_coroutine_threadsafe(now(), self.loop).result(20)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def ports() -> Iterator[Ports]:
    probes, admin, loop = free_port(), free_port(), uvloop.new_event_loop()
    token = hashlib.sha256(b"token").hexdigest()
    groups = {
        "probes": Probes(port=probes),
        "admin": Admin(port=admin, token_sha256=token),
        "logs": Logs(level="error"),
    }
    with listening(loop=lambda: loop, **groups) as live:
        yield Ports(live, loop, {"main": live.port, "probes": probes, "admin": admin})


def request(line: str, **headers: bytes) -> bytes:
    """A request without a body. A header that is given is sent in place of the usual one."""
    fields = {"host": b"localhost"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return (
        f"{line} HTTP/1.1\r\n".encode() + b"".join(b"%b: %b\r\n" % (n.encode(), v) for n, v in fields.items()) + b"\r\n"
    )


PLACES = [("main", "GET /livez"), ("main", "GET /docs"), ("main", "POST /rank"), ("main", "POST /explain"),
          ("main", "POST /v2/models/fake/infer"), ("probes", "GET /livez"), ("admin", "POST /admin/reload")]  # fmt: skip
HEADERS = ["cookie", "if_none_match", "content_type", "content_encoding", "accept", "connection", "authorization", "x_api_key",
           "x_request_id", "x_request_timeout_ms", "x_corpus_at_least", "traceparent", "forwarded", "host", "expect"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_no_header_costs_much(ports: Ports, place: tuple[str, str]) -> None:
    port, line = place
    for name in HEADERS:
        for filler in (b"a,", b"a=b;", b"W/", b":"):
            value = filler * (SIZE // len(filler))
            assert ports.times(port, request(line, **{name: value}), request(line)) < MOST_TIMES, (name, filler)


@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_no_target_costs_much(ports: Ports, place: tuple[str, str]) -> None:
    port, line = place
    for size in (4_000, SIZE):
        for path in ("?a&a", "?%41=", "%41", "/v2/models/", "/"):
            target = line + path * ((size - len(line)) // len(path))
            assert ports.times(port, request(target), request(line)) < MOST_TIMES, (path, size)


@pytest.mark.parametrize("port", ["main", "probes", "admin"])
def test_a_long_target_is_refused_with_414(ports: Ports, port: str) -> None:
    for target, status in (
        ("/livez?" + "a" * 4_200, 414),
        ("/" + "a" * 4_200, 414),
        ("/" + "a" * 31_000, 414),
        ("/" + "a" * 4_000, 404),
    ):
        with socket.create_connection(("127.0.0.1", ports.ports[port]), 20) as client:
            client.sendall(request(f"GET {target}"))
            found, headers, body = read_reply(client)
            assert (found, headers["content-type"]) == (status, "application/problem+json")
            assert b"aaaa" not in body
