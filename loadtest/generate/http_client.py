"""The HTTP/1.1 client of the open loop: many keep-alive connections, callbacks instead of tasks."""

from __future__ import annotations

import asyncio
import selectors
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

import httptools

Failure = Literal["", "connect", "reset", "timeout", "protocol", "wrong_reply"]
FAILURES: tuple[Failure, ...] = ("", "connect", "reset", "timeout", "protocol", "wrong_reply")

IDLE_SECONDS = 2.0  # shorter than any server's keep-alive, so that no request goes to a closing socket
MAX_CONNECTIONS = 512  # select() takes descriptors below 1024
TIMEOUT_SECONDS = 10.0


@dataclass(slots=True)
class Reply:
    """A reply, or with `status` 0 and the reason in `failure`, none. Times are from `time.monotonic`; `sent_at` 0: never sent."""

    status: int = 0
    failure: Failure = ""
    sent_at: float = 0.0
    done_at: float = 0.0
    body: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Pending:
    payload: bytes
    done: Callable[[Reply], None]
    reply: Reply = field(default_factory=Reply)
    connection: _Connection | None = None
    timer: asyncio.TimerHandle = field(init=False)


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are accurate to about 0.1 ms. Linux' epoll, and so uvloop, rounds up to whole milliseconds."""
    if sys.platform == "linux":
        return asyncio.SelectorEventLoop(selectors.SelectSelector())
    return asyncio.new_event_loop()


class Client:
    """Sends ready-made payloads over at most MAX_CONNECTIONS, with one in flight on each. Others wait in order.

    The loop calls `done` exactly once for each `send`. A request without a reply TIMEOUT_SECONDS after `send` fails with `timeout`, even if
    it was never sent.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._loop = asyncio.get_running_loop()
        self._free: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: deque[_Pending] = deque()
        self._in_flight: set[_Pending] = set()

    @property
    def in_flight(self) -> int:
        """Number of unanswered requests, including those that wait for a connection."""
        return len(self._in_flight)

    def send(self, payload: bytes, done: Callable[[Reply], None]) -> None:
        """Send now, or as soon as a connection is free."""
        pending = _Pending(payload, done)
        pending.timer = self._loop.call_later(TIMEOUT_SECONDS, self._expire, pending)
        self._in_flight.add(pending)
        connection = self._take_free()
        if connection is not None:
            connection.start(pending)
            return
        self._waiting.append(pending)
        if len(self._all) + len(self._connecting) < MAX_CONNECTIONS:
            self._open()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop every connection. Unanswered requests fail with `reset`."""
        for task in list(self._connecting):
            task.cancel()
        for pending in list(self._in_flight):
            self._finish(pending, "reset")
        for connection in list(self._all):
            connection.transport.abort()
        await asyncio.sleep(0)

    def _open(self) -> None:
        task = self._loop.create_task(self._connect())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                _, connection = await self._loop.create_connection(lambda: _Connection(self), self.host, self.port)
        except (OSError, TimeoutError):
            if self._waiting:
                self._finish(self._waiting.popleft(), "connect")
            return
        self._all.add(connection)
        self._release(connection)

    def _take_free(self) -> _Connection | None:
        while self._free:
            connection = self._free.pop()
            is_fresh = self._loop.time() - connection.idle_since < IDLE_SECONDS
            if is_fresh and not connection.transport.is_closing():
                return connection
            connection.transport.close()
        return None

    def _release(self, connection: _Connection) -> None:
        """Start the oldest waiting request on a free connection, or list it as free."""
        while self._waiting:
            pending = self._waiting.popleft()
            if pending in self._in_flight:
                connection.start(pending)
                return
        connection.idle_since = self._loop.time()
        self._free.append(connection)

    def _lost(self, connection: _Connection) -> None:
        self._all.discard(connection)
        if connection in self._free:
            self._free.remove(connection)
        if self._waiting and not self._connecting:
            self._open()

    def _finish(self, pending: _Pending, failure: Failure = "") -> None:
        if pending not in self._in_flight:
            return
        self._in_flight.discard(pending)
        pending.timer.cancel()
        pending.reply.failure = failure
        if failure:
            pending.reply.status = 0
        pending.reply.done_at = self._loop.time()
        pending.payload = b""
        pending.done(pending.reply)

    def _expire(self, pending: _Pending) -> None:
        self._finish(pending, "timeout")
        if pending.connection is not None:
            pending.connection.transport.abort()


class _Connection(asyncio.Protocol):
    """One socket and its unanswered request, if it has one."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.idle_since = 0.0
        self.pending: _Pending | None = None
        self._chunks: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def start(self, pending: _Pending) -> None:
        """Write a request."""
        self._parser = httptools.HttpResponseParser(self)
        self.pending, pending.connection = pending, self
        pending.reply.sent_at = self.client._loop.time()
        self.transport.write(pending.payload)

    def data_received(self, data: bytes) -> None:
        if self.pending is None:
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError):
            self._fail("protocol")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("reset")
        self.client._lost(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.pending is not None:
            self.pending.reply.headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        if self.pending is not None:
            self._chunks.append(data)

    def on_message_complete(self) -> None:
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        pending.reply.status = self._parser.get_status_code()
        pending.reply.body = b"".join(self._chunks)
        self._chunks = []
        self.client._finish(pending)
        if not self._parser.should_keep_alive():
            self.transport.abort()
        elif not self.transport.is_closing():
            self.client._release(self)

    def _fail(self, failure: Failure) -> None:
        """Fail the connection's request and close it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.client._finish(pending, failure)
        self.transport.abort()
