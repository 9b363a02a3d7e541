"""The targets of a fuzzer's calls: the application in this process, or a separate server over pipelined connections."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from app.http.admin import POSTS, RELOAD
from app.http.asgi import Routes
from app.http.grpc_server import ROUTES
from app.http.observe import METHODS
from loadtest.fuzz.calls import Answer, Call, send
from loadtest.fuzz.frames import PATH
from loadtest.fuzz.wires import ask_grpc
from loadtest.generate.http_client import Client
from loadtest.servers.launch import HOST

CONNECTIONS, DEPTH = 8, 8  # connections, and requests in flight on each
REPLY_SECONDS = 60.0
FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect"})
PLAIN = bytes(range(0x21, 0x7F))


@dataclass
class Target(ABC):
    """Answers calls; those of gRPC over its `channel`."""

    channel: grpc.aio.Channel

    async def ask(self, calls: Sequence[Call]) -> list[Answer]:
        """Send the calls together; return the answers in the order of the calls."""
        return await asyncio.gather(*map(self._one, calls))

    def _one(self, call: Call) -> Awaitable[Answer]:
        return ask_grpc(self.channel, call) if call.path in ROUTES else self.answer(call)

    @abstractmethod
    def answer(self, call: Call) -> Awaitable[Answer]:
        """The answer to one call over HTTP."""


@dataclass
class InProcess(Target):
    """The applications in this process. `link` takes the calls that are frames."""

    app: Routes
    admin: Routes
    link: Callable[[Call], Awaitable[Answer]]

    def answer(self, call: Call) -> Awaitable[Answer]:
        """As `Target.answer`."""
        if call.path == PATH:
            return self.link(call)
        return send(self.admin if call.path in (RELOAD, POSTS) else self.app, call)


@dataclass
class Sockets(Target):
    """The ports of a server, with pipelined requests. A call that may end its connection, or got no reply on one, is sent on its own."""

    port: int
    admin_port: int

    def __post_init__(self) -> None:
        options: dict[str, Any] = {"timeout_seconds": REPLY_SECONDS, "keep_bodies": True}
        ports = (self.port, self.admin_port)
        self.together = {
            port: Client(HOST, port, max_connections=CONNECTIONS, depth=DEPTH, **options) for port in ports
        }
        self.alone = {port: Client(HOST, port, keep_alive=False, **options) for port in ports}

    async def close(self) -> None:
        """End all connections."""
        for client in (*self.together.values(), *self.alone.values()):
            await client.close()
        await self.channel.close()

    async def answer(self, call: Call) -> Answer:
        """As `Target.answer`."""
        port, sent = self.admin_port if call.path in (RELOAD, POSTS) else self.port, written(call)
        reply = None if ends_connection(call) else await self.together[port].ask(sent)
        if reply is None or reply.failure:
            reply = await self.alone[port].ask(sent)
        is_last, fault = reply.headers.get(b"connection") == b"close", "no reply" if reply.failure else ""
        return Answer(reply.status, reply.headers, reply.body, fault, is_last)


def written(call: Call) -> bytes:
    """A call as the bytes of a request. Host and Content-Length are added unless the call brings them."""
    needed = {b"host": b"localhost", b"content-length": b"%d" % len(call.body)}
    for name, _ in call.headers:
        needed.pop(name, None)
    head = b"%b %b HTTP/1.1" % (call.method.encode(), call.path.encode())
    return b"\r\n".join((head, *[b"%b: %b" % header for header in (*call.headers, *needed.items())], b"", call.body))


def ends_connection(call: Call) -> bool:
    """Whether the server may close the connection after this call, or misread what follows it."""
    odd = call.method not in METHODS or call.path.encode().translate(None, PLAIN)
    return bool(odd) or any(
        name in FRAMING or not value.isascii() or not _is_plain(value) for name, value in call.headers
    )


def _is_plain(value: bytes) -> bool:
    return not value.translate(None, PLAIN + b" ")
