"""Servers to break: the whole application over real sockets, in a thread with a fake engine, or as a process of its own."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import structlog
import uvicorn

from app.assembly import build_server
from app.engine.loading import RetrievalLoader
from app.http.asgi import Guest
from app.server.process import RankingServer
from app.service.service import RankingService
from app.settings import Settings
from app.telemetry import logs
from app.telemetry.metrics import Metrics
from loadtest.matrix import Row
from loadtest.soak.fake_engine import loader


@dataclass
class Live:
    """A server in a thread of this process."""

    port: int
    service: RankingService
    server: RankingServer
    loop: asyncio.AbstractEventLoop

    def call(self, work: Any) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def sample(self, series: str, **labels: str) -> float | None:
        """A metric as a scrape reads it, in the server's loop; None where there is none, or nothing was counted with these labels."""

        async def read() -> float | None:
            return self.service.metrics.registry.get_sample_value(series, labels)

        value: float | None = self.call(read())
        return value

    @contextmanager
    def stock_server(self) -> Iterator[int]:
        """The port of a uvicorn of its own around the same endpoints, until this block ends: a negative control."""
        app = Guest(self.server.ports[0].routes, lambda: None, lambda: None)  # type: ignore[arg-type]
        stock = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
        given = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=stock.run, args=([given],), daemon=True)
        thread.start()
        wait_until(lambda: stock.started)
        try:
            yield given.getsockname()[1]
        finally:
            stock.force_exit = stock.should_exit = True
            thread.join(10)


@contextmanager
def live(engine: Any, towers: RetrievalLoader | None = None, **settings: Any) -> Iterator[Live]:
    """Serve a fake engine, and towers with a corpus where there are any, on a free port until the block ends."""
    values = {"port": 0, "drain": {"delay_seconds": 0.0, "timeout_seconds": 5.0}, "logs": {"level": "error"}}
    chosen = Settings(**{**values, **settings})
    logs.configure(chosen.logs)
    service = RankingService(loader(engine), chosen, Metrics(), retrieval=towers)
    server = build_server(chosen, service)
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(server.serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: server.started and service.health().ready)
    port = server.listeners[0].socket.getsockname()[1]
    try:
        yield Live(port, service, server, loop)
    finally:
        loop.call_soon_threadsafe(server.drain)
        thread.join(15)
        structlog.reset_defaults()
        assert not thread.is_alive(), "the server did not stop"


def closed(server: Live, reason: str) -> float:
    """How many connections the server has closed for that reason."""
    return server.sample("ranker_connections_closed_total", reason=reason) or 0.0


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    """Return as soon as the condition holds; raise when it does not within the time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the condition never held")
        time.sleep(0.005)


def connect(port: int, seconds: float = 15.0) -> socket.socket:
    """A connection that fails rather than hangs."""
    return socket.create_connection(("127.0.0.1", port), timeout=seconds)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes; a reset counts as a close."""
    found = bytearray()
    with suppress(ConnectionResetError, BrokenPipeError):
        while chunk := sock.recv(65536):
            found += chunk
    return bytes(found)


def more(sock: socket.socket) -> bytes:
    """What comes next. Raises ConnectionError where the other end has closed."""
    if found := sock.recv(65536):
        return found
    raise ConnectionError("closed in the middle of a reply")


def one_reply(sock: socket.socket) -> bytes:
    """One reply with a length, from a connection that stays open. Raises ConnectionError where it does not."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += more(sock)
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(re.findall(rb"content-length: (\d+)", head)[0])
    while len(body) < length:
        body += more(sock)
    return head + b"\r\n\r\n" + body


def asked(sock: socket.socket, sent: bytes) -> int:
    """The status of the reply to a whole request, on a connection that stays open."""
    sock.sendall(sent)
    [status] = statuses(one_reply(sock))
    return status


def exchange(port: int, sent: bytes) -> bytes:
    """Send bytes on a connection of their own, and all that comes back until it is closed."""
    with connect(port) as sock:
        with suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(sent)
        return read_all(sock)


def all_ok(rows: Sequence[Row]) -> None:
    """There are rows, and each is as it must be."""
    assert rows
    assert [row for row in rows if not row.ok] == []


def statuses(replies: bytes) -> list[int]:
    """The status of every reply in a stream."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", replies)]
