"""Between ASGI and our calls: FastAPI's pages as an endpoint, and all endpoints as one ASGI application for any other server."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.call import Answer, Call, Endpoint, Fields, Reply, TaskCall
from app.http.observe import Recorder

EXCHANGE = "exchange"  # a name in the scope's state
MAX_PAGE_BODY_BYTES = 2**16  # pages take none

Routes = Mapping[tuple[bytes, bytes], Endpoint]
"""Method and request target → who takes the request; there is somebody for every one."""


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request target; of the absolute form, as to a proxy, without scheme and host."""
    path, _, query = target.partition(b"?")
    if not path.startswith(b"/") and b"://" in path:
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    return path, query


class PagesEndpoint(Endpoint):
    """One request to an ASGI application that makes whole replies, such as FastAPI's pages."""

    def __init__(
        self, app: ASGIApp, recorder: Recorder, method: bytes, target: bytes, max_body_bytes: int = MAX_PAGE_BODY_BYTES
    ) -> None:
        raw_path, query = split_target(target)
        path = urllib.parse.unquote(raw_path.decode("latin-1"))
        if path.endswith("\n"):  # a route's `$` would match before it
            path = raw_path.decode("latin-1")
        super().__init__(recorder, path, max_body_bytes, method.decode("latin-1"))
        self.app = app
        self.scope: Scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
            "method": self.method, "path": path, "raw_path": raw_path, "query_string": query, "root_path": "",
            "server": None, "client": None,
        }  # fmt: skip

    def begin(self, headers: Fields, reply: Reply) -> Call:
        """As `Endpoint.begin`."""
        self.scope["headers"] = list(headers)
        return PageCall(self, dict(headers), reply)


class PageCall(TaskCall):
    """A page. HEAD is answered as GET, with the same headers and no body."""

    ranks = False
    __slots__ = ()
    _endpoint: PagesEndpoint

    async def reply_to(self, body: bytes | bytearray) -> Answer:
        """As `TaskCall.reply_to`."""
        endpoint = self._endpoint
        method = "GET" if endpoint.method == "HEAD" else endpoint.method
        scope = {**endpoint.scope, "method": method, "state": {EXCHANGE: self.exchange}}
        messages: list[Message] = []
        received: list[bool] = []

        async def receive() -> Message:
            if not received:
                received.append(True)
                return {"type": "http.request", "body": bytes(body), "more_body": False}
            await asyncio.get_running_loop().create_future()  # a client that disconnects cancels this task
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.append(message)

        await endpoint.app(scope, receive, send)
        start, *parts = messages
        sent = b"".join([part.get("body", b"") for part in parts])
        headers = [(bytes(name).lower(), bytes(value)) for name, value in start.get("headers", ())]
        return start["status"], headers, sent


class Guest:
    """All endpoints as an ASGI application, for servers that are not ours. `startup` and `shutdown` are its lifespan."""

    def __init__(self, routes: Routes, startup: Callable[[], None], shutdown: Callable[[], object]) -> None:
        self.routes = routes
        self._startup = startup
        self._shutdown = shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._startup()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        ended = self._shutdown()
        if asyncio.iscoroutine(ended):
            await ended
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        target: bytes = scope.get("raw_path") or urllib.parse.quote(scope["path"]).encode()
        if query := scope.get("query_string"):
            target += b"?" + query
        replied: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        endpoint = self.routes[scope["method"].encode(), target]
        call = endpoint.begin(scope["headers"], lambda *reply: replied.set_result(reply[:3]))
        try:
            if not replied.done() and await _feed(call, receive) and not replied.done():
                await _unless_disconnected(replied, receive)
        except BaseException:
            call.abandon()
            raise
        if not replied.done():
            call.abandon()
            return
        status, headers, body = replied.result()
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})


async def _feed(call: Call, receive: Receive) -> bool:
    """Pass the body to the call, up to what it takes. False if the client disconnects before the end."""
    body, limit = bytearray(), call.max_body_bytes
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return False
        body += message.get("body", b"")
        if len(body) > limit:
            call.too_long()
            return True
        if not message.get("more_body", False):
            call.finish(bytes(body))
            return True


async def _unless_disconnected(replied: asyncio.Future[Answer], receive: Receive) -> None:
    """Wait for the reply, or for the client to disconnect; the body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watcher: asyncio.Future[None] = asyncio.get_running_loop().create_task(watch())
    try:
        await asyncio.wait((replied, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
