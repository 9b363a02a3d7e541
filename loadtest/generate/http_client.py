"""The HTTP/1.1 client of all load tests: many keep-alive connections, callbacks instead of tasks, optional pipelining."""

from __future__ import annotations

import asyncio
import selectors
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, cast

import httptools

Failure = Literal["", "connect", "reset", "timeout", "protocol", "wrong_reply"]
FAILURES: tuple[Failure, ...] = ("", "connect", "reset", "timeout", "protocol", "wrong_reply")

IDLE_SECONDS = 2.0  # shorter than any server's keep-alive, so that no request goes to a closing socket
MAX_CONNECTIONS = 900  # select() takes at most 1024 descriptors


@dataclass(slots=True)
class Reply:
    """A reply, or with `status` 0 and the reason in `failure`, none. Times are from `time.monotonic`; `sent_at` 0: never sent.

    `port` is the client's port of the connection, 0 if there was none.
    """

    status: int = 0
    failure: Failure = ""
    asked_at: float = 0.0
    sent_at: float = 0.0
    done_at: float = 0.0
    port: int = 0
    body: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Pending:
    payload: bytes
    done: Callable[[Reply], None]
    reply: Reply
    connection: _Connection | None = None
    timer: asyncio.TimerHandle = field(init=False)


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are accurate to about 0.1 ms. Linux' epoll, and so uvloop, rounds up to whole milliseconds."""
    if sys.platform == "linux":
        return asyncio.SelectorEventLoop(selectors.SelectSelector())
    return asyncio.new_event_loop()


@dataclass
class Client:
    """Sends ready-made payloads over at most `max_connections`, with `depth` in flight on each. Others wait in order.

    The loop calls `done` exactly once for each `send`. A request without a reply `timeout_seconds` after `send` fails with
    `timeout`, even if it was never sent. `keep_bodies` keeps each reply's body. Without `keep_alive`, every request gets
    its own connection.
    """

    host: str
    port: int
    _: KW_ONLY
    max_connections: int = 512
    depth: int = 1
    timeout_seconds: float = 10.0
    keep_bodies: bool = False
    keep_alive: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_connections <= MAX_CONNECTIONS:
            raise ValueError(f"max_connections must lie in 1 … {MAX_CONNECTIONS}")
        self.opened = 0
        self._loop = asyncio.get_running_loop()
        self._free: list[_Connection] = []  # with room for one more
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
        now = self._loop.time()
        pending = _Pending(payload, done, Reply(asked_at=now))
        pending.timer = self._loop.call_later(self.timeout_seconds, self._expire, pending)
        self._in_flight.add(pending)
        connection = self._take_free(now)
        if connection is not None:
            connection.start(pending)
            return
        self._waiting.append(pending)
        if len(self._all) + len(self._connecting) < self.max_connections:
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
            async with asyncio.timeout(self.timeout_seconds):
                _, connection = await self._loop.create_connection(lambda: _Connection(self), self.host, self.port)
        except (OSError, TimeoutError):
            if self._waiting:
                self._finish(self._waiting.popleft(), "connect")
            return
        self.opened += 1
        self._all.add(connection)
        self._release(connection)

    def _take_free(self, now: float) -> _Connection | None:
        while self._free:
            connection = self._free.pop()
            is_fresh = connection.pending or now - connection.idle_since < IDLE_SECONDS
            if is_fresh and not connection.transport.is_closing():
                return connection
            connection.transport.close()
        return None

    def _release(self, connection: _Connection) -> None:
        """Start the oldest waiting requests on a connection with room; list it as free if room is left."""
        while self._waiting and connection.has_room:
            pending = self._waiting.popleft()
            if pending in self._in_flight:
                connection.start(pending)
        connection.idle_since = self._loop.time()
        if connection.has_room and connection not in self._free:
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
    """One socket and its unanswered requests, in order."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.idle_since = 0.0
        self.pending: deque[_Pending] = deque()
        self._chunks: list[bytes] = []

    @property
    def has_room(self) -> bool:
        """Whether one more request may be in flight."""
        return len(self.pending) < self.client.depth

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.port: int = transport.get_extra_info("sockname")[1]

    def start(self, pending: _Pending) -> None:
        """Write a request."""
        if not self.pending:
            self._parser = httptools.HttpResponseParser(self)
        self.pending.append(pending)
        pending.connection = self
        pending.reply.port, pending.reply.sent_at = self.port, self.client._loop.time()
        self.transport.write(pending.payload)
        if self.has_room and self.client.depth > 1:
            self.client._free.append(self)

    def data_received(self, data: bytes) -> None:
        if not self.pending:
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
        if self.pending:
            self.pending[0].reply.headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        if self.pending and self.client.keep_bodies:
            self._chunks.append(data)

    def on_message_complete(self) -> None:
        if not self.pending:
            return
        pending = self.pending.popleft()
        pending.reply.status = self._parser.get_status_code()
        pending.reply.body = b"".join(self._chunks)
        self._chunks = []
        is_last = not (self.client.keep_alive and self._parser.should_keep_alive())
        self.client._finish(pending)
        if is_last:
            self._fail("reset")
        elif not self.transport.is_closing():
            self.client._release(self)

    def _fail(self, failure: Failure) -> None:
        """Fail all requests of the connection and close it."""
        pending, self.pending = self.pending, deque()
        for request in pending:
            self.client._finish(request, failure)
        self.transport.abort()
