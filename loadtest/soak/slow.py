"""B4: many silent, trickling and incomplete requests. Each must be closed within 10 s, without slowing down other clients."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from loadtest.matrix import Row
from loadtest.servers.launch import HOST, Server
from loadtest.soak.clients import Callers, percentile
from loadtest.soak.servers import fake

CLOSE_SECONDS = 10.0
LIMIT_SECONDS = CLOSE_SECONDS + 1.0  # on a busy machine
STRETCH_LIMIT = 1.5
OPENINGS = (
    b"",
    b"POST /ra",
    b"POST /rank HTTP/1.1\r\nHost: localhost\r\nA: b\r\n",
    b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{",
    b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
)
TRICKLE_SECONDS = 0.5
WATCH_SECONDS = 5.0  # the slow connections last longer


def slow(sockets: int, **settings: object) -> list[Row]:
    """Open `sockets` slow connections to a server with the default deadlines."""
    with fake("--forward-ms=5", **settings) as server, ThreadPoolExecutor(1) as beside:
        quiet = _p99(server)
        holding = beside.submit(asyncio.run, _hold_all(server.port, sockets))
        disturbed = _p99(server)
        held = holding.result()
    slowest, left = max(held, default=0.0), sockets - len(held)
    return [
        Row("B4", f"{sockets} slow connections closed", sockets, left, slowest, LIMIT_SECONDS, "s until the last"),
        Row("B4", "other clients' p99 beside them", sockets, 0, disturbed / quiet, STRETCH_LIMIT, "× without them"),
    ]


def _p99(server: Server) -> float:
    """99th percentile of the latency of requests sent one after the other, in seconds."""
    with Callers(server.port, 1) as callers:
        time.sleep(WATCH_SECONDS)
    return percentile(callers.replies)


async def _hold_all(port: int, sockets: int) -> list[float]:
    """Seconds until the server closed each connection, for those that it closed in time."""
    tasks = [asyncio.create_task(_hold(port, number)) for number in range(sockets)]
    done, hanging = await asyncio.wait(tasks, timeout=2 * CLOSE_SECONDS)
    for task in hanging:
        task.cancel()
    return [task.result() for task in done]


async def _hold(port: int, number: int) -> float:
    """Open a connection, send little or nothing, and return the seconds until the server closed it."""
    reader, writer = await asyncio.open_connection(HOST, port)
    began = time.monotonic()
    writer.write(OPENINGS[number % len(OPENINGS)])
    trickling = asyncio.create_task(_trickle(writer)) if number % 2 else None
    with suppress(ConnectionError):
        while await reader.read(4096):
            pass
    if trickling is not None:
        trickling.cancel()
    writer.transport.abort()
    return time.monotonic() - began


async def _trickle(writer: asyncio.StreamWriter) -> None:
    while not writer.transport.is_closing():
        writer.write(b"a")
        await asyncio.sleep(TRICKLE_SECONDS)
