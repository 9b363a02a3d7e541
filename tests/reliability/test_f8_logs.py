"""F8: the log's reader dies, stalls, or its disk is full: replies go on, the process ends as documented, memory has a bound."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import pytest

from loadtest.generate.payload import rank_request
from loadtest.servers.launch import HOST, Server, ranking_server
from loadtest.soak.servers import FAULTY, RAISE
from tests.reliability.live import asked, connect, one_reply, statuses, wait_until

pytestmark = pytest.mark.timeout(120)

FAULTS = ["dead", "stalled", "no space"]
LINES: dict[str, Any] = {"logs__success_sample": 1, "logs__format": "json"}
END_SECONDS = 10.0  # the sink's own second for a reader that takes nothing, and slack for a busy machine


class Pipe:
    """Standard error of a server, of the smallest size there is."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        self.log: IO[bytes] = os.fdopen(writer, "wb")

    def close(self) -> None:
        with suppress(OSError):
            os.close(self.reader)

    def read(self) -> list[dict[str, Any]]:
        """All lines until no process can write any more."""
        with open(self.reader, closefd=False) as lines:
            return [json.loads(line) for line in lines]


@contextmanager
def faulty(fault: str, *flags: str, **settings: object) -> Iterator[Server]:
    """A server whose standard error has this fault from when it is ready; for a load that is refused, from the start."""
    refused = any("refused" in flag for flag in flags)
    pipe = Pipe()
    log: IO[bytes] = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb") if fault == "no space" else pipe.log
    with ranking_server(
        *FAULTY, *flags, log=log, ready_path="/livez" if refused else "/readyz", **(LINES | settings)
    ) as server:
        if fault == "dead":
            pipe.close()
        yield server
    pipe.close()
    log.close()


def rank(sock: socket.socket, user: int) -> int:
    sock.sendall(rank_request(user))
    [status] = statuses(one_reply(sock))
    return status


def ends(server: Server) -> tuple[int, float]:
    """Its exit code, and the seconds from SIGTERM to its end."""
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(30), time.monotonic() - began


@pytest.mark.parametrize("fault", FAULTS)
def test_replies_go_on_and_sigterm_ends_with_0(fault: str) -> None:
    with faulty(fault) as server:
        with connect(server.port) as sock:  # one connection for all: no reply may end it
            assert {rank(sock, user) for user in range(1, 401)} == {200}
            found = Counter(rank(sock, RAISE if number % 2 else number + 1) for number in range(40))
            assert found == {503: 20, 200: 20}, "a line of the engine's thread stops no forward"
        assert server.answers("/livez")
        code, seconds = ends(server)
        assert code == 0
        assert seconds < END_SECONDS


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refused_checkpoint_ends_with_1(fault: str) -> None:
    with faulty(fault, "--refused-after-seconds=1") as server:
        with connect(server.port) as sock:
            for _ in range(50):
                sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                one_reply(sock)
        began = time.monotonic()
        assert server.process.wait(30) == 1
        assert time.monotonic() - began < 1 + END_SECONDS


@pytest.mark.parametrize(("command", "code"), [((), 2), (FAULTY, 3)], ids=["settings", "port taken"])
def test_a_start_that_fails_exits_as_documented_without_space(command: tuple[str, ...], code: int) -> None:
    with socket.create_server((HOST, 0)) as taken, open("/dev/full", "wb") as log:
        port = "none" if code == 2 else str(taken.getsockname()[1])
        with ranking_server(*command, log=log, ready_path=None, environment={"RANKER_PORT": port}) as server:
            assert server.process.wait(40) == code


@pytest.mark.parametrize("fault", FAULTS)
def test_a_listener_without_descriptors_accepts_again(fault: str) -> None:
    """`accept_failed` is logged once a second, in the event loop."""
    with faulty(fault) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (40, 40))
        with connect(server.port) as sock:
            for user in range(1, 20):
                rank(sock, user)  # fills the pipe
            crowd = [connect(server.port) for _ in range(60)]
            assert not server.answers("/livez")  # tried for 2 s: nobody is accepted, hence `accept_failed`
            assert rank(sock, 1) == 200
        for other in crowd:
            other.close()
        wait_until(lambda: server.answers("/livez"))
        assert ends(server)[0] == 0


def lines_of(events: list[dict[str, Any]], status: int) -> int:
    return sum(event["event"] == "request" and event["status"] == status for event in events)


def test_beyond_the_buffer_lines_are_dropped_and_told_and_those_of_refusals_are_not_among_them() -> None:
    pipe, found = Pipe(), list[dict[str, Any]]()
    with ranking_server(*FAULTY, "--small-budgets", log=pipe.log, **LINES) as server:
        pipe.log.close()  # or its end would never be read
        with connect(server.port) as sock:
            assert {rank(sock, user) for user in range(1, 301)} == {200}
            full = server.metric("ranker_log_lines_dropped_total")
            assert {rank(sock, user) for user in range(1, 301)} == {200}
            assert server.metric("ranker_log_lines_dropped_total") >= full + 300  # none of them is held
            for _ in range(30):
                assert asked(sock, b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n") == 404
        reading = threading.Thread(target=lambda: found.extend(pipe.read()))
        reading.start()
        time.sleep(0.5)
        assert ends(server)[0] == 0
        reading.join(10)
    pipe.close()
    told = sum(event["lines"] for event in found if event["event"] == "log_lines_dropped")
    ranked = sum(event.get("route") == "/rank" for event in found)
    assert full > 0
    assert told >= full + 300
    assert told + ranked >= 600
    assert lines_of(found, 404) == 30


def test_a_normal_stop_loses_no_line_of_a_refusal() -> None:
    """The lines of the last milliseconds too, and with a second signal at once."""
    for signals, code in ((1, 0), (2, 128 + signal.SIGTERM)):
        pipe = Pipe()
        found: list[dict[str, Any]] = []
        with ranking_server(*FAULTY, log=pipe.log, drain__delay_seconds=0, logs__format="json") as server:
            pipe.log.close()
            reading = threading.Thread(target=lambda pipe=pipe, found=found: found.extend(pipe.read()))
            reading.start()
            client = http.client.HTTPConnection(HOST, server.port, timeout=5)
            for _ in range(200):
                client.request("GET", "/nowhere")
                assert client.getresponse().read()
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.002)
            assert server.process.wait(30) in {0, code}  # it may have ended before the second signal
            client.close()
        reading.join(10)
        assert lines_of(found, 404) == 200
        pipe.close()
