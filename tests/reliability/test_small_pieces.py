"""Connections that send megabytes of tiny pieces: others hardly wait for them, and they take little memory, which comes back."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from loadtest.server import Server, serving, wait_until

CONNECTIONS, SIZE = 8, 3_000_000  # bytes of each
LONGER_SECONDS = 0.1  # how much longer another caller may wait than the longest of a quiet server
MOST_TIMES_SENT = 4.0  # memory for what was sent
LEFT_TIMES_SENT = 1.0  # memory that the allocator may keep afterwards
ALONE_SECONDS = 30.0  # `make soak` runs this long and nothing beside it, so the longest wait is the server's; else it is the machine's
GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
PIECES = {  # what is sent once, and the piece that is repeated
    "chunks of one byte": (CHUNKED, b"1\r\n \r\n"),
    "chunks of four bytes": (CHUNKED, b"4\r\n    \r\n"),
    "headers": (POST, b"a:\r\n"),
    "trailers": (CHUNKED + b"0\r\n", b"a:\r\n"),
    "requests": (b"", GET),
}


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two workers"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(workers=request.param, threads=1, logs__level="error", limits__max_body_bytes=4_000_000) as server:
        yield server


def send_and_read(port: int, sent: bytes, seconds: float) -> None:
    """Send these bytes over connections that read what they are answered; one that ends is followed by another."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        with closing(socket.create_connection(("127.0.0.1", port), 5)) as connection, suppress(OSError):
            connection.setblocking(False)
            rest = memoryview(sent)
            while time.monotonic() < ends:
                with suppress(BlockingIOError):
                    rest = rest[connection.send(rest[: 2**18]) :]
                with suppress(BlockingIOError):
                    if connection.recv(2**18) == b"" and not rest:
                        break
                time.sleep(0.001)


def flood(port: int, sent: bytes, seconds: float) -> None:
    """Connections that send these bytes for so long. Run in a process of its own, so that the caller who is measured has one too."""
    threads = [threading.Thread(target=send_and_read, args=(port, sent, seconds)) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_seconds(server: Server) -> float:
    """How long a caller with a connection of its own waits for a reply."""
    began = time.perf_counter()
    with closing(server.connect(60)) as connection:
        connection.sendall(GET)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200 OK")
    return time.perf_counter() - began


def processes(server: Server) -> list[Path]:
    """Of the service, in /proc."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{number}") for number in (str(pid), *children)]


def memory_bytes(server: Server, field: str) -> int:
    """The sum of this field of /proc/PID/status over the processes of the service."""
    total = 0
    for process in processes(server):
        [kib] = [
            line.split()[1] for line in (process / "status").read_text().splitlines() if line.startswith(field + ":")
        ]
        total += int(kib) * 1024
    return total


@pytest.mark.slow
@pytest.mark.parametrize("kind", PIECES)
def test_tiny_pieces_take_little_of_others_time_and_memory(server: Server, kind: str, duration: float) -> None:
    start, piece = PIECES[kind]
    sent = start + piece * (SIZE // len(piece))
    quiet = [wait_seconds(server) for _ in range(20)]
    before = memory_bytes(server, "VmRSS")
    for process in processes(server):
        (process / "clear_refs").write_text("5")  # the peak counts from here
    flooding = multiprocessing.get_context("spawn").Process(target=flood, args=(server.port, sent, duration / 2))
    flooding.start()
    waits = [wait_seconds(server)]
    while flooding.is_alive():
        waits.append(wait_seconds(server))
    flooding.join()
    assert flooding.exitcode == 0
    bound = max(quiet) + LONGER_SECONDS
    assert statistics.median(waits) < bound, (len(waits), max(waits))
    if duration >= ALONE_SECONDS:
        assert max(waits) < bound, (len(waits), statistics.median(waits))
    most = CONNECTIONS * SIZE
    assert memory_bytes(server, "VmHWM") - before < MOST_TIMES_SENT * most
    wait_until(lambda: memory_bytes(server, "VmRSS") - before < LEFT_TIMES_SENT * most)
