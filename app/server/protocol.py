"""One HTTP/1.1 connection that keeps to the protocol and to its deadlines. Not for what a request means."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.server.wire import has_unread, refusal_reply, without_upgrade

MAX_HEADERS = 100
MAX_PIPELINED = 16
LEAST_BODY_SECONDS = 1.0  # after slow headers, a body still gets this long
LINGER_SECONDS = 2.0  # how long a refused client may go on sending before it is cut off
GRACE_SECONDS = 1.0  # at shutdown, how long a connection must have been silent to be closed


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds from a request's first byte (a connection's start) to the end of its headers and of its body, and for writing."""

    header_seconds: float = 5.0
    body_seconds: float = 8.0
    keep_alive_seconds: float = 75.0
    write_seconds: float = 8.0
    max_header_bytes: int = 32_768


class Observer(Protocol):
    """Is told why the server closed a connection, and asked whether it wants connections to end."""

    draining: bool

    def closed(self, reason: str) -> None: ...


class Refused(Exception):
    """Raised inside a parser callback, to stop parsing at once."""


class StrictProtocol(HttpToolsProtocol):
    """uvicorn's protocol with deadlines for headers, body and reply, a header limit, and at most one reply to a request.

    llhttp itself refuses bare line feeds, folded headers, a length beside chunks, and bad chunks.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        observer: Observer,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = limits
        self.observer = observer
        self.refusal = "bad_request"  # what a parser error means, unless a callback said more
        self.owed: list[RequestResponseCycle] = []  # requests without a complete reply, oldest first
        self.reading = False  # between a request's first byte and its last
        self.in_headers = True
        self.ending = False  # no further request is taken; closes when nothing is owed
        self.begun = 0.0
        self.idle_since = self.loop.time()
        self.header_bytes = 0  # received while the headers were not complete
        self.field_bytes = 0  # of the request's own header fields; one read may hold its body as well
        self.headers_seen = 0
        self.deadline: asyncio.TimerHandle | None = None
        self.write_deadline: asyncio.TimerHandle | None = None

    # bytes in

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        for cycle in self.owed:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or (self.ending and not self.reading):
            return
        self._unset_keepalive_if_required()
        if self.deadline is None and not self.reading:
            self._begin()
        if self.in_headers:
            self.header_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse()
        else:
            if self.in_headers and self.header_bytes > self.limits.max_header_bytes:
                self.refusal = "headers"
                self._refuse()

    # parser callbacks

    def on_message_begin(self) -> None:
        if self.ending:
            self._stop("bad_request")
        super().on_message_begin()
        self.reading = True
        if self.deadline is None:
            self._begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        if self.in_headers:  # trailers are counted and dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_headers()
        if self.parser.should_upgrade():
            return  # llhttp would take the body for another protocol: see `_decline`
        super().on_headers_complete()
        self.in_headers = False
        self.cycle.transport = cast(asyncio.Transport, _OneReply(self, self.transport))
        self.owed.append(self.cycle)
        if self.observer.draining:
            self._close_after_last()
        self._arm(max(self.begun + self.limits.body_seconds, self.loop.time() + LEAST_BODY_SECONDS))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self.reading, self.in_headers = False, True
        self.header_bytes = self.field_bytes = self.headers_seen = 0
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        if self.ending and not self.owed:
            self.transport.close()  # a reply was sent early, and only the rest of its request was awaited

    def on_response_complete(self) -> None:
        self.owed = [cycle for cycle in self.owed if not cycle.response_complete]
        if self.ending and not self.owed:
            self.server_state.total_requests += 1
            return  # closed by the reply itself, or lingering
        self.idle_since = self.loop.time()
        super().on_response_complete()
        if self.reading:  # the reply came before the request's end: its body's deadline still holds
            self._unset_keepalive_if_required()

    # bytes out

    def pause_writing(self) -> None:
        super().pause_writing()
        self.write_deadline = self.loop.call_later(self.limits.write_seconds, self._drop, "slow_reader")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.write_deadline is not None:
            self.write_deadline.cancel()
            self.write_deadline = None

    # ends

    def _decline(self, rest: bytes) -> None:
        """An upgrade may be declined by answering in HTTP/1.1: parse the same request again, asking for none."""
        parser = self.parser
        head = without_upgrade(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.headers_seen = self.header_bytes = self.field_bytes = 0
        self.data_received(head + rest)

    def shutdown(self) -> None:
        """End the connection as soon as nothing is owed on it."""
        if self.reading and self.in_headers:
            return  # a request has begun: it is answered, and its reply ends the connection
        if self.owed:
            self._end_when_paid()
        else:  # the client may just have sent its next request, so silence has to last a little
            self._end_if_silent()

    def _end_if_silent(self) -> None:
        if self.reading or self.owed or self.transport.is_closing():
            return
        left = self.idle_since + GRACE_SECONDS - self.loop.time()
        if left > 0 or has_unread(self.transport):
            self.loop.call_later(max(left, GRACE_SECONDS / 100), self._end_if_silent)
        else:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._drop("keep_alive")

    def finish(self) -> None:
        """A reply that ends the connection is written. Unread input would turn the end into a reset that destroys it."""
        self.ending = True
        if self.reading:
            self._linger()
        else:
            self.transport.close()

    def _begin(self) -> None:
        self.begun = self.loop.time()
        self._arm(self.begun + self.limits.header_seconds)

    def _arm(self, when: float) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = self.loop.call_at(when, self._too_slow)

    def _too_slow(self) -> None:
        self.deadline = None
        if self.header_bytes or self.reading:
            self.refusal = "slow"
            self._refuse()
        else:
            self._drop("silent")

    def _count_header(self, length: int) -> None:
        self.headers_seen += 1
        self.field_bytes += length
        if self.field_bytes > self.limits.max_header_bytes:
            self._stop("headers")
        if self.headers_seen > MAX_HEADERS:
            self._stop("headers")

    def _check_headers(self) -> None:
        version, method = self.parser.get_http_version(), self.parser.get_method()
        names = [name for name, _ in self.headers]
        if version not in ("1.1", "1.0"):
            self._stop("version")
        if method == b"CONNECT" or names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):
            self._stop("bad_request")
        if b"transfer-encoding" in names:
            coding = dict(self.headers)[b"transfer-encoding"].strip().lower()
            if version == "1.0" or coding != b"chunked":
                self._stop("bad_request")
        if len(self.owed) >= MAX_PIPELINED:
            self._stop("bad_request")

    def _stop(self, refusal: str) -> None:
        self.refusal = refusal
        raise Refused(refusal)

    def _refuse(self) -> None:
        """Answer the request that is being read, unless it has a reply already or an older one is owed first; then close."""
        self.reading = False  # the parser is of no more use
        if not self.in_headers and self.cycle.response_started:
            if not self.cycle.response_complete:
                self._drop(self.refusal)
            elif not self.ending:
                self._linger()
            return
        if self.in_headers and self.ending:
            return
        if not self.in_headers:
            self.cycle.disconnected = True  # the application learns that its client is gone, and says nothing
            self.cycle.message_event.set()
            self.owed.remove(self.cycle)
        if self.owed:
            self.pipeline = deque(entry for entry in self.pipeline if entry[0] in self.owed)
            self._end_when_paid()
            return
        self.observer.closed(self.refusal)
        self.transport.write(refusal_reply(self.refusal))
        self._linger()

    def _end_when_paid(self) -> None:
        if not self.owed:
            self.transport.close()
            return
        self._close_after_last()
        self.ending = True

    def _close_after_last(self) -> None:
        for cycle in self.owed:
            cycle.keep_alive = cycle is not self.owed[-1]

    def _linger(self) -> None:
        self._cancel_timers()
        self.ending, self.deadline = True, self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _drop(self, reason: str) -> None:
        self.observer.closed(reason)
        self.transport.abort()

    def _cancel_timers(self) -> None:
        for timer in (self.deadline, self.write_deadline):
            if timer is not None:
                timer.cancel()
        self.deadline = self.write_deadline = None


class _OneReply:
    """The transport as one request sees it: closing it lets the peer read the reply first."""

    def __init__(self, protocol: StrictProtocol, transport: asyncio.Transport) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = protocol.finish
