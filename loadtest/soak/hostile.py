"""B10, B11: hundreds of hostile clients, one kind or all at once: latency of others, memory, and the end after SIGTERM."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

import orjson
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded, StreamReset

from loadtest.generate.http_client import Reply
from loadtest.generate.payload import post, rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import HOST, Server, free_port
from loadtest.soak.clients import Callers, apart, percentile
from loadtest.soak.servers import fake

START_SECONDS = 60.0  # imports take long on a busy machine
HOLD_SECONDS = 9.0  # longer than the server tolerates a client that does not read
MIB = 2**20
P50_LIMIT = 2.0
END_SECONDS = 12.0  # time to refuse stalled bodies, give up unread replies and discard the rest
CALLS = 50  # on each connection
MESSAGE_BYTES = 950_000
HEAD = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"


def _columns(count: int) -> dict[str, list[int]]:
    return {"post_id": list(range(1, count + 1)), "author_id": [1] * count}


def dear_body() -> bytes:
    """A request near the size limit, with one invalid id at its end."""
    event = {"post_id": 2**63, "author_id": "1", "actions": ["favorite", "reply"], "dwell_time": 12.5}
    posts = [{"post_id": 2**63, "author_id": "1", "product_surface": 0, "created_at": 1}] * 3500
    return orjson.dumps(
        {"user_id": 1, "history": [event] * 1100, "candidates": [*posts, {"post_id": "01", "author_id": 1}]}
    )


BATCH = post("localhost", "/rank/batch", orjson.dumps([{"user_id": 1, "candidates": _columns(4096)}] * 30))
DEAR = post("localhost", "/rank", dear_body())
CALL_HEADERS = [
    (":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer"), (":authority", "x"),
    ("content-type", "application/grpc"), ("te", "trailers"),
]  # fmt: skip
Act = Callable[[socket.socket], Awaitable[None]]


def holds(sent: bytes) -> Act:
    """A client that sends this, then stays connected and reads nothing."""

    async def act(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, sent)
        await asyncio.sleep(HOLD_SECONDS)

    return act


async def _dear(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await loop.sock_sendall(sock, DEAR)
        if not await loop.sock_recv(sock, 65536):
            return


async def _half_calls(sock: socket.socket) -> None:
    """Send gRPC calls whose messages stop one byte short, which no grpc client can do."""
    loop = asyncio.get_running_loop()
    connection = H2Connection(H2Configuration(client_side=True))
    connection.initiate_connection()
    left = {}
    for stream in range(1, 2 * CALLS, 2):
        connection.send_headers(stream, CALL_HEADERS)
        connection.send_data(stream, b"\0" + (MESSAGE_BYTES + 1).to_bytes(4, "big"))
        left[stream] = MESSAGE_BYTES
    until = loop.time() + HOLD_SECONDS
    received = asyncio.ensure_future(loop.sock_recv(sock, 65536))
    try:
        while left and loop.time() < until:
            for stream in left:
                while (window := connection.local_flow_control_window(stream)) > 0 and left[stream]:
                    size = min(window, connection.max_outbound_frame_size, left[stream])
                    connection.send_data(stream, bytes(size))
                    left[stream] -= size
            await loop.sock_sendall(sock, connection.data_to_send())
            await asyncio.wait([received], timeout=1.0)  # no wait_for: a cancelled read may lose bytes
            if not received.done():
                continue
            if not (read := received.result()):
                return
            for event in connection.receive_data(read):
                if isinstance(event, StreamEnded | StreamReset):
                    left.pop(event.stream_id, None)
            received = asyncio.ensure_future(loop.sock_recv(sock, 65536))
    finally:
        received.cancel()


UNREAD, UNREAD_BATCH = holds(rank_request(1, candidates=4000) * 14), holds(BATCH)
KINDS: dict[str, tuple[Act, int]] = {  # what a client does with its connection, and the number of clients
    "silent": (holds(b""), 200), "half-sent bodies": (holds(HEAD + b" " * 900_000), 200), "unread replies": (UNREAD, 200),
    "unread batches": (UNREAD_BATCH, 20), "dear bodies": (_dear, 1),
}  # fmt: skip


HALF_CALLS = "half-sent calls"  # these attack the gRPC port, the other kinds the HTTP port
CONNECTIONS = 8


async def _again(act: Act, port: int, there: Event) -> None:
    """One client that reconnects whenever it is cut off. Sets `there` once connected."""
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as sock, suppress(OSError):
            sock.setblocking(False)
            if act in (UNREAD, UNREAD_BATCH):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(sock, (HOST, port))
            there.set()
            await act(sock)
        await asyncio.sleep(0.2)


def _attack(port: int, kinds: list[str], there: Event) -> None:
    async def main() -> None:
        clients = [(_half_calls, CONNECTIONS) if kind == HALF_CALLS else KINDS[kind] for kind in kinds]
        await asyncio.gather(*(_again(act, port, there) for act, number in clients for _ in range(number)))

    asyncio.run(main())


@contextmanager
def attacked(port: int, kinds: list[str]) -> Iterator[None]:
    """Run these clients in another process. Raises RuntimeError if none connected or the process did not last to the end."""
    there = multiprocessing.get_context("spawn").Event()
    with apart(_attack, port, kinds, there) as clients:
        is_there = there.wait(START_SECONDS)
        yield
        if not (is_there and clients.is_alive()):
            raise RuntimeError(f"the hostile clients ended with code {clients.exitcode}: nothing was attacked")


@dataclass(frozen=True)
class Seen:
    """Replies to a well-behaved client before and under attack, resident bytes, and `most`: the server's stated memory limits in bytes."""

    peace: list[Reply]
    attack: list[Reply]
    resident: list[int]
    most: dict[str, int]

    def row(self, row: str, what: str, figure: float, limit: float, unit: str) -> Row:
        """A row in which a request of the well-behaved client has failed that got neither 200 nor 429."""
        statuses = [reply.status for reply in self.peace + self.attack]
        return Row(row, what, len(statuses), sum(each not in (200, 429) for each in statuses), figure, limit, unit)

    def grown(self, what: str, limit: str) -> Row:
        """The row for the largest growth in memory under attack."""
        figure = (max(self.resident) - self.resident[0]) / MIB
        return self.row("B11", f"{what}: memory beyond that before", figure, self.most[limit] / MIB, "MiB")


def observe(
    kinds: list[str], seconds: float, *faults: str, port: int = 0, settle_seconds: float = 1.0, **settings: Any
) -> Seen:
    """Observe a server for a third of the time in peace, then under attack. `port`: attack this port instead of HTTP. `settle_seconds`:
    until all are connected."""
    with fake("--forward-ms=5", *faults, **settings) as server:
        peace, resident = _watched(server, seconds / 3)
        with attacked(port or server.port, kinds):
            time.sleep(settle_seconds)
            attack, more = _watched(server, seconds * 2 / 3)
        return Seen(peace, attack, resident[-1:] + more, server.target.info()["memory_bytes"])


def _watched(server: Server, seconds: float) -> tuple[list[Reply], list[int]]:
    """Replies to one client, and the resident bytes of the server meanwhile."""
    resident, until = [], time.monotonic() + seconds
    with Callers(server.port, 1, timeout_seconds=5) as callers:
        while time.monotonic() < until:
            resident.append(1024 * server.status("VmRSS"))
            time.sleep(0.1)
    return callers.replies, resident


def dear(seconds: float, *faults: str, percent: int = 50) -> Row:
    """B10: one connection sends bodies that are expensive to read, back to back."""
    seen = observe(["dear bodies"], seconds, *faults, settle_seconds=0.1)
    peace, attack = percentile(seen.peace, percent), percentile(seen.attack, percent)
    what = f"one connection with bodies dear to read: p{percent} of others"
    return seen.row("B10", what, attack / peace, P50_LIMIT, "× without it")


def memory(seconds: float, *faults: str, **settings: Any) -> Row:
    """B11: memory with hundreds of hostile clients of every kind at once."""
    clients = sum(number for _, number in KINDS.values())
    seen = observe(list(KINDS), seconds, *faults, **settings)
    return seen.grown(f"{clients} hostile clients of every kind at once", "total")


def calls(seconds: float, **settings: Any) -> Row:
    """B11: memory with hundreds of half-sent gRPC calls."""
    port = free_port()
    seen = observe([HALF_CALLS], seconds, port=port, grpc__port=port, **settings)
    return seen.grown(f"{CONNECTIONS * CALLS} half-sent calls over gRPC", "grpc")


def terminations(kinds: list[str], **settings: Any) -> Row:
    """B11: SIGTERM under attack by each kind."""
    failed, slowest = 0, 0.0
    for kind in kinds:
        with fake("--forward-ms=5", **settings) as server, attacked(server.port, [kind]):
            time.sleep(2.5)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            failed += server.process.wait(3 * END_SECONDS) != 0
            slowest = max(slowest, time.monotonic() - began)
    what = f"SIGTERM under each: {', '.join(kinds)}"
    return Row("B11", what, len(kinds), failed, slowest, END_SECONDS, "s until exit 0")
