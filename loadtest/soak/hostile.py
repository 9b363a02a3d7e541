"""B10, B11: hostile clients by the hundred, one kind or all at once: what others feel, what memory is taken, how SIGTERM ends."""

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

import numpy as np
import orjson
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded, StreamReset

from loadtest.generate.http_client import Reply
from loadtest.generate.payload import post, rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import HOST, Server, free_port
from loadtest.soak.clients import Callers
from loadtest.soak.leak import usage
from loadtest.soak.servers import fake

START_SECONDS = 60.0  # on a busy machine a process takes some to import what it needs
HOLD_SECONDS = 9.0  # longer than any client that does not read is left alone
MIB = 2**20
P50_LIMIT = 2.0
END_SECONDS = 12.0  # a body that stalls is refused, a reply that is not read is given up, what follows is thrown away
CALLS = 50  # on each connection
MESSAGE_BYTES = 950_000
HEAD = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"


def _columns(count: int) -> dict[str, list[int]]:
    return {"post_id": list(range(1, count + 1)), "author_id": [1] * count}


def dear_body() -> bytes:
    """A request of nearly the largest size, with one wrong id at its end."""
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
    """Send this, then stay and read nothing."""

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
    """Calls over gRPC whose messages stop short of their ends; no client of grpc can send such a thing."""
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
            await asyncio.wait([received], timeout=1.0)  # a read that is cancelled may lose bytes it has already taken
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
KINDS: dict[str, tuple[Act, int]] = {  # what a client does with its connection, and how many there are
    "silent": (holds(b""), 200), "half-sent bodies": (holds(HEAD + b" " * 900_000), 200), "unread replies": (UNREAD, 200),
    "unread batches": (UNREAD_BATCH, 20), "dear bodies": (_dear, 1),
}  # fmt: skip


HALF_CALLS = "half-sent calls"  # on a port of their own, which no other kind knows
CONNECTIONS = 8


async def _again(act: Act, port: int, there: Event) -> None:
    """One client that comes again whenever it is cut off; `there` is set when one is."""
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
    """These clients, in a process of their own. Raises RuntimeError where they did not come, or were not there to the end."""
    context = multiprocessing.get_context("spawn")
    there = context.Event()
    clients = context.Process(target=_attack, args=(port, kinds, there), daemon=True)
    clients.start()
    try:
        is_there = there.wait(START_SECONDS)
        yield
        if not (is_there and clients.is_alive()):
            raise RuntimeError(f"the hostile clients ended with code {clients.exitcode}: nothing was attacked")
    finally:
        clients.kill()
        clients.join()


@dataclass(frozen=True)
class Seen:
    """What a well-behaved client and the system saw, in peace and then under attack; `most`: the stated most of memory, in bytes."""

    peace: list[Reply]
    attack: list[Reply]
    resident: list[int]
    most: dict[str, int]

    @property
    def tried(self) -> int:
        """Requests in all."""
        return len(self.peace) + len(self.attack)

    @property
    def failed(self) -> int:
        """Neither answered nor told to come back."""
        return sum(reply.status not in (200, 429) for reply in self.peace + self.attack)

    def row(self, what: str, limit: str) -> Row:
        """Memory under attack beyond that before it, at its most."""
        grown = max(self.resident) - self.resident[0]
        return Row(
            "B11",
            f"{what}: memory beyond that before",
            self.tried,
            self.failed,
            grown / MIB,
            self.most[limit] / MIB,
            "MiB",
        )


def observe(kinds: list[str], seconds: float, *faults: str, port: int = 0, **settings: Any) -> Seen:
    """A third of the time in peace, then under attack. `port`: another one than that for HTTP is attacked."""
    with fake("--forward-ms=5", *faults, **settings) as server:
        peace, resident = _watched(server, seconds / 3)
        with attacked(port or server.port, kinds):
            time.sleep(1.0)  # until all are
            attack, more = _watched(server, seconds * 2 / 3)
        return Seen(peace, attack, resident[-1:] + more, server.target.info()["memory_bytes"])


def _watched(server: Server, seconds: float) -> tuple[list[Reply], list[int]]:
    """One client, and the memory of the process beside it."""
    resident, until = [], time.monotonic() + seconds
    with Callers(server.port, 1, timeout_seconds=5) as callers:
        while time.monotonic() < until:
            resident.append(usage(server).resident_bytes)
            time.sleep(0.1)
    return callers.replies, resident


def dear(seconds: float, *faults: str, percent: int = 50) -> Row:
    """B10: one connection with bodies that are dear to read, back to back."""
    seen = observe(["dear bodies"], seconds, *faults)
    peace, attack = (
        np.percentile([reply.done_at - reply.asked_at for reply in replies], percent)
        for replies in (seen.peace, seen.attack)
    )
    what = f"one connection with bodies dear to read: p{percent} of others"
    return Row("B10", what, seen.tried, seen.failed, float(attack / peace), P50_LIMIT, "× without it")


def memory(seconds: float, *faults: str, **settings: Any) -> Row:
    """B11: every kind at once, by the hundred."""
    clients = sum(number for _, number in KINDS.values())
    seen = observe(list(KINDS), seconds, *faults, **settings)
    return seen.row(f"{clients} hostile clients of every kind at once", "total")


def calls(seconds: float, **settings: Any) -> Row:
    """B11: calls over gRPC by the hundred."""
    port = free_port()
    seen = observe([HALF_CALLS], seconds, port=port, grpc__port=port, **settings)
    return seen.row(f"{CONNECTIONS * CALLS} half-sent calls over gRPC", "grpc")


def terminations(kinds: list[str]) -> Row:
    """B11: SIGTERM under each kind."""
    failed, slowest = 0, 0.0
    for kind in kinds:
        with fake("--forward-ms=5") as server, attacked(server.port, [kind]):
            time.sleep(2.5)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            failed += server.process.wait(3 * END_SECONDS) != 0
            slowest = max(slowest, time.monotonic() - began)
    return Row(
        "B11", f"SIGTERM under each: {', '.join(kinds)}", len(kinds), failed, slowest, END_SECONDS, "s until exit 0"
    )
