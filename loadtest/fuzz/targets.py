"""Where a fuzzer's calls go: the application in this process, or a server of its own over pipelined connections."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, cast

import grpc
from starlette.types import ASGIApp

from app.http.admin import POSTS, RELOAD
from app.http.direct import DirectEndpoint
from app.http.grpc_server import ROUTES
from app.http.observe import METHODS
from loadtest.fuzz.calls import Answer, Call, send, send_direct
from loadtest.fuzz.frames import PATH
from loadtest.fuzz.wires import ask_grpc

CONNECTIONS, DEPTH = 8, 8  # requests are in flight on so many connections, so many on each
REPLY_SECONDS = 60.0
FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect"})
PLAIN = bytes(range(0x21, 0x7F))


class Target(Protocol):
    """Answers calls, several together."""

    async def ask(self, calls: Sequence[Call]) -> list[Answer]:
        """In the order of the calls."""
        ...


class InProcess:
    """The applications themselves; `direct` takes its paths as a connection of ours would; the others go the way of ASGI."""

    def __init__(
        self,
        app: ASGIApp,
        admin: ASGIApp,
        channel: grpc.aio.Channel,
        direct: Mapping[str, DirectEndpoint],
        link: Callable[[Call], Awaitable[Answer]],
    ) -> None:
        """`link` takes frames."""
        self.link = link
        self.app = app
        self.admin = admin
        self.channel = channel
        self.direct = direct

    async def ask(self, calls: Sequence[Call]) -> list[Answer]:
        """As `Target.ask`."""
        return await asyncio.gather(*map(self._one, calls))

    def _one(self, call: Call) -> asyncio.Future[Answer]:
        if call.path in ROUTES:
            return asyncio.ensure_future(ask_grpc(self.channel, call))
        if call.path == PATH:
            return asyncio.ensure_future(self.link(call))
        if call.method == "POST" and (endpoint := self.direct.get(call.path)) is not None:
            return send_direct(endpoint, call)
        return asyncio.ensure_future(send(self.admin if call.path in (RELOAD, POSTS) else self.app, call))


class Sockets:
    """A server's ports. What may end a connection goes alone on one; the rest is pipelined."""

    def __init__(self, host: str, port: int, admin_port: int, channel: grpc.aio.Channel) -> None:
        self.host = host
        self.port = port
        self.admin_port = admin_port
        self.channel = channel
        self._idle: dict[int, list[Pipeline]] = {port: [], admin_port: []}

    async def ask(self, calls: Sequence[Call]) -> list[Answer]:
        """As `Target.ask`."""
        answers: list[Answer | None] = [None] * len(calls)
        parts: list[tuple[int, bool, list[int]]] = []
        together: dict[int, list[int]] = {self.port: [], self.admin_port: []}
        waiting = []
        for place, call in enumerate(calls):
            port = self.admin_port if call.path in (RELOAD, POSTS) else self.port
            if call.path in ROUTES:
                waiting.append(self._message(call, place, answers))
            elif ends_connection(call):
                parts.append((port, False, [place]))
            else:
                together[port].append(place)
        for port, places in together.items():
            size = max(1, min(DEPTH, -(-len(places) // CONNECTIONS)))
            parts += [(port, True, places[start : start + size]) for start in range(0, len(places), size)]
        waiting += [self._part(port, keeps, calls, places, answers) for port, keeps, places in parts]
        await asyncio.gather(*waiting)
        return cast(list[Answer], answers)

    async def close(self) -> None:
        """End all connections."""
        for pipeline in itertools.chain(*self._idle.values()):
            pipeline.transport.abort()
        await self.channel.close()

    async def _message(self, call: Call, place: int, answers: list[Answer | None]) -> None:
        answers[place] = await ask_grpc(self.channel, call)

    async def _part(
        self, port: int, keeps: bool, calls: Sequence[Call], places: list[int], answers: list[Answer | None]
    ) -> None:
        """These calls on one connection, and what it left unanswered on the next."""
        while places:
            pipeline = await self._connected(port)
            found = await pipeline.ask([calls[place] for place in places])
            if not found:
                answers[places[0]] = Answer(fault="no reply")
                found = [Answer()]
            elif len(found) == len(places) and keeps and not found[-1].is_last:
                self._idle[port].append(pipeline)
            else:
                pipeline.transport.abort()
            for place, answer in zip(places, found, strict=False):
                answers[place] = answers[place] or answer
            places = places[len(found) :]

    async def _connected(self, port: int) -> Pipeline:
        while self._idle[port]:
            pipeline = self._idle[port].pop()
            if not pipeline.transport.is_closing():
                return pipeline
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Pipeline, self.host, port))[1]


class Pipeline(asyncio.Protocol):
    """One connection with several requests in flight."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._wanted = 0
        self._answers: list[Answer] = []
        self._bytes = bytearray()
        self._done: asyncio.Future[None] | None = None

    async def ask(self, calls: Sequence[Call]) -> list[Answer]:
        """Their answers, fewer where the connection ends before."""
        self._wanted, self._answers = len(calls), []
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(b"".join(map(written, calls)))
        await asyncio.wait([self._done], timeout=REPLY_SECONDS)
        return self._answers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Of asyncio. Replies of this server have a length and lower-case names."""
        self._bytes += data
        while (end := self._bytes.find(b"\r\n\r\n")) >= 0:
            status, *lines = bytes(self._bytes[:end]).split(b"\r\n")
            headers = dict(line.split(b": ", 1) for line in lines)
            whole = end + 4 + int(headers[b"content-length"])
            if len(self._bytes) < whole:
                return
            is_last = headers.get(b"connection") == b"close"
            body = bytes(self._bytes[end + 4 : whole])
            del self._bytes[:whole]
            self._answers.append(Answer(int(status[9:12]), headers, body, is_last=is_last))
            if is_last or len(self._answers) == self._wanted:
                self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        """Of asyncio."""
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def written(call: Call) -> bytes:
    """A call as the bytes of a request; it may bring a length of its own."""
    needed = {b"host": b"localhost", b"content-length": b"%d" % len(call.body)}
    for name, _ in call.headers:
        needed.pop(name, None)
    head = b"%b %b HTTP/1.1" % (call.method.encode(), call.path.encode())
    return b"\r\n".join((head, *[b"%b: %b" % header for header in (*call.headers, *needed.items())], b"", call.body))


def ends_connection(call: Call) -> bool:
    """Whether the server may end the connection for it, or take what follows for something else."""
    odd = call.method not in METHODS or call.path.encode().translate(None, PLAIN)
    return bool(odd) or any(
        name in FRAMING or not value.isascii() or not _is_plain(value) for name, value in call.headers
    )


def _is_plain(value: bytes) -> bool:
    return not value.translate(None, PLAIN + b" ")
