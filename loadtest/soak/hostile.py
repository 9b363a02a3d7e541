"""B10, B11: hostile clients by the hundred, one kind or all at once: what others feel, what memory is taken, how SIGTERM ends.

`python -m loadtest.soak.hostile` draws memory and latency while all of them run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded, StreamReset

from loadtest.generate.http_client import Client
from loadtest.generate.payload import post, rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import HOST, Server, free_port
from loadtest.soak.leak import usage
from loadtest.soak.servers import fake

HOLD_SECONDS = 9.0  # longer than any client that does not read is left alone
PLOT = Path("docs/images/hostile.png")
MIB = 2**20
P50_LIMIT = 2.0
END_SECONDS = (
    12.0  # a body that stalls is refused, a reply that is not read is given up, what comes after it is thrown away
)
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


async def _silent(sock: socket.socket) -> None:
    await asyncio.sleep(HOLD_SECONDS)


async def _half(sock: socket.socket) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, HEAD + b" " * 900_000)
    await asyncio.sleep(HOLD_SECONDS)


async def _unread(sock: socket.socket) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, rank_request(1, candidates=4000) * 14)
    await asyncio.sleep(HOLD_SECONDS)


async def _unread_batch(sock: socket.socket) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, BATCH)
    await asyncio.sleep(HOLD_SECONDS)


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
    while left and loop.time() < until:
        for stream in left:
            while (window := connection.local_flow_control_window(stream)) > 0 and left[stream]:
                size = min(window, connection.max_outbound_frame_size, left[stream])
                connection.send_data(stream, bytes(size))
                left[stream] -= size
        await loop.sock_sendall(sock, connection.data_to_send())
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                if not (received := await loop.sock_recv(sock, 65536)):
                    return
                for event in connection.receive_data(received):
                    if isinstance(event, StreamEnded | StreamReset):
                        left.pop(event.stream_id, None)


KINDS: dict[str, tuple[Act, int]] = {  # what a client does with its connection, and how many there are
    "silent": (_silent, 200), "half-sent bodies": (_half, 200), "unread replies": (_unread, 200),
    "unread batches": (_unread_batch, 20), "dear bodies": (_dear, 1),
}  # fmt: skip


HALF_CALLS = "half-sent calls"  # on a port of their own, which no other kind knows
CONNECTIONS = 8


async def _again(act: Act, port: int) -> None:
    """One client that comes again whenever it is cut off."""
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as sock, suppress(OSError):
            sock.setblocking(False)
            if act in (_unread, _unread_batch):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(sock, (HOST, port))
            await act(sock)
        await asyncio.sleep(0.2)


def _attack(port: int, kinds: list[str]) -> None:
    async def main() -> None:
        clients = [(_half_calls, CONNECTIONS) if kind == HALF_CALLS else KINDS[kind] for kind in kinds]
        await asyncio.gather(*(_again(act, port) for act, number in clients for _ in range(number)))

    asyncio.run(main())


@contextmanager
def attacked(port: int, kinds: list[str]) -> Iterator[None]:
    """These clients, in a process of their own. Raises RuntimeError where they were not there to the end."""
    clients = multiprocessing.get_context("spawn").Process(target=_attack, args=(port, kinds), daemon=True)
    clients.start()
    try:
        yield
        if not clients.is_alive():
            raise RuntimeError(f"the hostile clients ended with code {clients.exitcode}: nothing was attacked")
    finally:
        clients.kill()
        clients.join()


@dataclass
class Seen:
    """What a well-behaved client and the system saw: seconds since the start, and then seconds, bytes or a status."""

    began: float = field(default_factory=time.monotonic)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)
    failed: int = 0  # neither answered nor told to come back

    def percentile(self, share: float, after: float = 0.0, before: float = np.inf) -> float:
        """Of the latencies between two moments, in seconds; NaN where there are none."""
        found = [took for when, took in self.latencies if after <= when < before]
        return float(np.percentile(found, share)) if found else float("nan")


async def watch(server: Server, seconds: float, seen: Seen) -> None:
    """One request after the other, and the memory of the process beside them."""
    until = time.monotonic() + seconds
    async with Client(HOST, server.port, max_connections=4, timeout_seconds=5) as client:
        while (now := time.monotonic()) < until:
            reply = await client.ask(rank_request(len(seen.latencies) + 1))
            seen.failed += reply.status not in (200, 429)
            seen.latencies.append((now - seen.began, time.monotonic() - now))
            if len(seen.latencies) % 20 == 1:
                seen.resident.append((now - seen.began, usage(server, 0).resident_bytes))


def observe(
    kinds: list[str], seconds: float, *faults: str, port: int = 0, **settings: Any
) -> tuple[Seen, float, dict[str, int]]:
    """A third of the time in peace, then under attack: what was seen, when it began, and the stated most of memory in bytes.

    `port`: another one than that for HTTP is attacked.
    """
    seen = Seen()
    with fake("--forward-ms=5", *faults, **settings) as server, asyncio.Runner() as runner:
        runner.run(watch(server, seconds / 3, seen))
        most = server.target.info()["memory_bytes"]
        with attacked(port or server.port, kinds):
            runner.run(asyncio.sleep(1.0))  # until they are there
            began = time.monotonic() - seen.began
            runner.run(watch(server, seconds * 2 / 3, seen))
    return seen, began, most


def growth(seen: Seen, began: float) -> int:
    """Bytes of memory under attack beyond those before it, at their most."""
    before = [count for when, count in seen.resident if when < began]
    return max(count for _, count in seen.resident) - before[-1]


def dear(seconds: float, *faults: str, percent: int = 50) -> Row:
    """B10: one connection with bodies that are dear to read, back to back."""
    seen, began, _ = observe(["dear bodies"], seconds, *faults)
    ratio = seen.percentile(percent, after=began) / seen.percentile(percent, before=began - 1.0)
    what = f"one connection with bodies dear to read: p{percent} of others"
    return Row("B10", what, len(seen.latencies), seen.failed, ratio, P50_LIMIT, "× without it")


def memory(seconds: float, *faults: str, **settings: Any) -> Row:
    """B11: every kind at once, by the hundred."""
    seen, began, most = observe(list(KINDS), seconds, *faults, **settings)
    what = f"{sum(number for _, number in KINDS.values())} hostile clients of every kind at once: memory beyond that before"
    return Row("B11", what, len(seen.latencies), seen.failed, growth(seen, began) / MIB, most["total"] / MIB, "MiB")


def calls(seconds: float, **settings: Any) -> Row:
    """B11: calls over gRPC by the hundred."""
    port = free_port()
    seen, began, most = observe([HALF_CALLS], seconds, port=port, grpc__port=port, **settings)
    what = f"{CONNECTIONS * CALLS} half-sent calls over gRPC: memory beyond that before"
    return Row("B11", what, len(seen.latencies), seen.failed, growth(seen, began) / MIB, most["grpc"] / MIB, "MiB")


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


def plot(seen: Seen, began: float, most: int, path: Path) -> None:
    """Memory above, latency of well-behaved callers below; the attack begins at the dotted line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    above.plot(*zip(*((when, count / MIB) for when, count in seen.resident), strict=True))
    above.axhline(seen.resident[0][1] / MIB + most / MIB, linestyle="--", color="grey", label="stated most")
    above.set_ylim(bottom=0)
    above.set_ylabel("resident MiB")
    above.legend()
    starts = np.arange(0.0, seen.latencies[-1][0] - 1, 1.0)
    for share in (50, 99):
        below.plot(starts, [1e3 * seen.percentile(share, start, start + 2) for start in starts], label=f"p{share}")
    below.set_ylim(bottom=0)
    below.set_xlabel("s")
    below.set_ylabel("ms")
    below.legend()
    for axes in (above, below):
        axes.axvline(began, linestyle=":", color="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=PLOT)
    options = parser.parse_args()
    seen, began, most = observe(list(KINDS), options.seconds)
    plot(seen, began, most["total"], options.out)
    figures = {
        "memory_growth_mib": growth(seen, began) / MIB, "stated_most_mib": most["total"] / MIB, "failed": seen.failed,
        "p50_ms": [1e3 * seen.percentile(50, before=began), 1e3 * seen.percentile(50, after=began)],
        "p99_ms": [1e3 * seen.percentile(99, before=began), 1e3 * seen.percentile(99, after=began)], "plot": str(options.out),
    }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
