"""B4: many silent, trickling and incomplete requests: each is closed within 10 s, and other clients are not slowed down."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from loadtest.generate.http_client import Client
from loadtest.generate.payload import rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import HOST, Server
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
WATCH_SECONDS = 5.0  # the slow ones are there for longer


def slow(sockets: int, **settings: object) -> list[Row]:
    """`sockets` slow connections with the deadlines as they are out of the box."""
    with fake("--forward-ms=5", **settings) as server, asyncio.Runner() as runner:
        quiet, beside, seconds, left = runner.run(_beside(server, sockets))
    return [
        Row("B4", f"{sockets} slow connections closed", sockets, left, seconds, LIMIT_SECONDS, "s until the last"),
        Row("B4", "other clients' p99 beside them", sockets, 0, beside / quiet, STRETCH_LIMIT, "× without them"),
    ]


async def _beside(server: Server, sockets: int) -> tuple[float, float, float, int]:
    async with Client(HOST, server.port, max_connections=1) as client:
        quiet = await _p99(client, WATCH_SECONDS)
        held = [asyncio.create_task(_hold(server.port, number)) for number in range(sockets)]
        beside = await _p99(client, WATCH_SECONDS)
        done, hanging = await asyncio.wait(held, timeout=2 * CLOSE_SECONDS)
        for task in hanging:
            task.cancel()
    return quiet, beside, max((task.result() for task in done), default=0.0), len(hanging)


async def _p99(client: Client, seconds: float) -> float:
    """Of one request after the other, in seconds."""
    took: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        reply = await client.ask(rank_request(len(took) + 1))
        took.append(reply.done_at - reply.sent_at)
    return float(np.percentile(took, 99))


async def _hold(port: int, number: int) -> float:
    """Open a connection, say a little now and then, and return after how many seconds the server ended it."""
    reader, writer = await asyncio.open_connection(HOST, port)
    began = time.monotonic()
    writer.write(OPENINGS[number % len(OPENINGS)])
    trickling = asyncio.create_task(_trickle(writer)) if number % 2 else None
    try:
        while await reader.read(4096):
            pass
    except ConnectionError:
        pass
    if trickling is not None:
        trickling.cancel()
    writer.transport.abort()
    return time.monotonic() - began


async def _trickle(writer: asyncio.StreamWriter) -> None:
    while not writer.transport.is_closing():
        writer.write(b"a")
        await asyncio.sleep(TRICKLE_SECONDS)
