"""Plain ASGI: headers, body and reply of one request, and whether its client is still there. Not for what is ranked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import InvalidRequest, TooLarge
from app.request.bounds import is_request_id
from app.telemetry.exchange import Exchange

Headers = Mapping[bytes, bytes]
EXCHANGE = "exchange"  # a name in the scope's state
CLIENT_GONE = 499  # the status under which a disconnect is logged and counted


class ClientGone(Exception):
    """The client disconnected before its reply."""


class Answered(Exception):
    """The connection itself has refused the request while its body was read."""

    def __init__(self, status: int, code: str) -> None:
        self.status = status
        self.code = code


class HeadAsGet:
    """Answers HEAD as GET, with the same headers and no body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message["body"] = b""
            await send(message)

        await self.app({**scope, "method": "GET"}, receive, send_head)


def exchange_of(scope: Scope) -> Exchange:
    """What `Observe` notes about this request."""
    exchange: Exchange = scope["state"][EXCHANGE]
    return exchange


def request_id_of(headers: Headers) -> str | None:
    """The caller's X-Request-ID, if it may go into headers and logs."""
    if b"x-request-id" not in headers:
        return None
    sent = headers[b"x-request-id"].decode("latin-1")
    return sent if is_request_id(sent) else None


def timeout_seconds_of(headers: Headers) -> float | None:
    """How long the caller waits, None where it does not say. Raises InvalidRequest for a bad X-Request-Timeout-Ms.

    Envoy's header is a proxy's, so a bad one is no fault of the caller and does not count; 0 means no limit there.
    """
    own, envoy = headers.get(b"x-request-timeout-ms"), headers.get(b"x-envoy-expected-rq-timeout-ms")
    found = []
    if own is not None:
        if not _is_count(own):
            raise InvalidRequest([("X-Request-Timeout-Ms", "must be whole milliseconds")])
        found.append(int(own) / 1000)
    if envoy is not None and _is_count(envoy) and int(envoy):
        found.append(int(envoy) / 1000)
    return min(found, default=None)


def _is_count(text: bytes) -> bool:
    return text.isdigit() and len(text) <= 12


def check_length(headers: Headers, limit_bytes: int) -> None:
    """Raise TooLarge for a body that says it is longer than the limit."""
    length = headers.get(b"content-length", b"0")
    if not _is_count(length) or int(length) > limit_bytes:
        raise too_long(limit_bytes)


def too_long(limit_bytes: int) -> TooLarge:
    """For a body that is longer than the limit, whether it says so or not."""
    return TooLarge(f"The body is longer than {limit_bytes} bytes.")


async def read_body(headers: Headers, receive: Receive, limit_bytes: int) -> bytes | bytearray:
    """The whole body. Raises TooLarge as soon as it is longer than the limit, keeping no more, ClientGone, and Answered."""
    check_length(headers, limit_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Answered(*message["answered"]) if message.get("answered") else ClientGone
        chunk: bytes = message.get("body", b"")
        if len(body) + len(chunk) > limit_bytes:
            raise too_long(limit_bytes)
        if not message.get("more_body", False):
            return body + chunk if body else chunk
        body += chunk


class Watching:
    """Cancel what runs inside when the client disconnects, and raise ClientGone then. The body must have been read."""

    __slots__ = ("_gone", "_receive", "_task", "_watcher")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._watcher.cancel()
        if kind is asyncio.CancelledError and self._gone and not self._task.uncancel():
            raise ClientGone from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


async def send_reply(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a whole reply; `Observe` adds the request's id."""
    named = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": body})
