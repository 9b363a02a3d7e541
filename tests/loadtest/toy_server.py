"""A tiny HTTP server with planted behaviour, for tests of the load generator. Speaks just enough HTTP/1.1."""

import asyncio
import contextlib
import threading

import httptools


class ToyServer:
    """Knows no GET; answers every POST after `delay_seconds` with `status`; holds all replies back during a stall, or until
    `hold` requests have come."""

    def __init__(self, delay_seconds=0.001, status=200, headers=(), close_after=None, body=b"{}", hold=0):
        self.delay_seconds = delay_seconds
        self.status = status
        self.headers = headers
        self.close_after = close_after
        self.body = body
        self.hold = hold
        self.held = []
        self.received = []
        self.stall_until = 0.0

    @contextlib.asynccontextmanager
    async def serving(self):
        self.loop = asyncio.get_running_loop()
        server = await self.loop.create_server(lambda: Socket(self), "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    @contextlib.contextmanager
    def in_thread(self):
        """Serve in a thread of its own; yields the address."""
        started, stop = threading.Event(), asyncio.Event()

        async def serve():
            async with self.serving():
                started.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert started.wait(10)
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            self.loop.call_soon_threadsafe(stop.set)
            thread.join(10)

    def stall(self, seconds):
        self.stall_until = self.loop.time() + seconds


class Socket(asyncio.Protocol):
    def __init__(self, server):
        self.server = server
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_message_begin(self):
        self.body = b""

    def on_body(self, data):
        self.body += data

    def on_message_complete(self):
        server = self.server
        if self.parser.get_method() != b"POST":
            self.transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        server.received.append(self.body)
        if server.close_after is not None and len(server.received) > server.close_after:
            self.transport.abort()
            return
        wait = max(server.delay_seconds, server.stall_until - server.loop.time())
        server.held.append(lambda: server.loop.call_later(wait, self.reply))
        while server.held and len(server.received) >= server.hold:
            server.held.pop()()

    def reply(self):
        lines = [f"HTTP/1.1 {self.server.status} X", f"Content-Length: {len(self.server.body)}", *self.server.headers]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + self.server.body)
