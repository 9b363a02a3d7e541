"""What uvicorn's HTTP/1.1 lacks and callers need: `uvicorn.Config(http=Connection)`, and `sweep` every second.

`tests/app/api/test_connection.py` names what this relies on in uvicorn 0.54, whose minor version is pinned.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.api.caller import CANCELS

MOST_HEADERS, MOST_HEADER_BYTES = 100, 32_768
HEAD_SECONDS = 5.0  # from the connect or the first byte to the end of the headers
BODY_SECONDS = 30.0  # from there to the end of the body
PROBE_SECONDS = (0.1, 0.2)  # after a client has closed its sending half
FINAL = tuple(b"HTTP/1.1 %d" % kind for kind in (2, 3, 4, 5))  # first bytes of a final reply; an interim one is 1xx
HOP_BY_HOP = (b"connection", b"upgrade", b"http2-settings")


class TooManyHeaders(Exception):
    """A request's headers are longer, or more, than the limits."""


class PortState(ServerState):
    """What the connections of a port share. `is_draining`: each reply ends its connection."""

    connections: set[Connection]  # type: ignore[assignment]  # of the kind that the port was given
    is_draining = False


class Cork:
    """A transport that joins the head of a reply with its body: uvloop makes a system call, and wakes the client, for each write."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.is_closing = transport.is_closing
        self.head = b""

    def write(self, data: bytes) -> None:
        """Keep a head until more is written; interim replies, which begin HTTP/1.1 1, pass."""
        if not self.head and data[:10] in FINAL:
            self.head = data
        else:
            self.transport.write(self.head + data)
            self.head = b""

    def close(self) -> None:
        """Write what was kept, and close."""
        self.flush()
        self.transport.close()

    def flush(self) -> None:
        """Write what was kept: a reply without a body."""
        if self.head:
            self.write(b"")


class Connection(HttpToolsProtocol):
    """`due_at`: when the headers, or the body, must have come, in seconds of the loop's clock."""

    server_state: PortState
    task: asyncio.Task[None] | None = None
    due_at = math.inf
    unread = 0  # bytes since the last piece of a body or the end of headers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.cork = Cork(transport)
        self.due_at = self.loop.time() + HEAD_SECONDS

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self.unread += len(data)
        try:
            self.parser.feed_data(data)
            # Kludex/uvicorn#157: httptools keeps a header, or a trailer, that does not end
            if self.unread > MOST_HEADER_BYTES:
                raise TooManyHeaders
        except (httptools.HttpParserError, TooManyHeaders):
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            self.decline_upgrade(data[upgrade.args[0] :])
        if self.due_at == math.inf and (self.cycle is None or self.cycle.response_complete):  # such as an empty line
            self.due_at = self.loop.time() + HEAD_SECONDS

    def decline_upgrade(self, rest: bytes) -> None:
        """Kludex/uvicorn#2722: a parser that never heard of the upgrade reads the same head, and the bytes behind it."""
        if self.parser.get_method() == b"CONNECT":
            self.send_400_response("Invalid HTTP request received.")
            return
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b" % field for field in self.headers if field[0] not in HOP_BY_HOP]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join([*head, b"", rest]))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CANCELS: {}}
        self.due_at = self.loop.time() + HEAD_SECONDS

    def on_headers_complete(self) -> None:
        size = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.url) + size > MOST_HEADER_BYTES or len(self.headers) > MOST_HEADERS:  # Kludex/uvicorn#157
            raise TooManyHeaders
        if not self.parser.should_upgrade():  # Kludex/uvicorn#2722
            self.unread, self.due_at = 0, self.loop.time() + BODY_SECONDS
            super().on_headers_complete()
            self.cycle.transport = self.cork  # type: ignore[assignment]
            if self.server_state.is_draining:
                self.cycle.keep_alive = False
            self.headers = []  # for trailers, which uvicorn would add to the request's headers: RFC 9110, 6.5.1

    def on_body(self, body: bytes) -> None:
        self.unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # Kludex/uvicorn#2722
            self.unread, self.due_at = 0, math.inf
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.cork.flush()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        waits = self.cycle is not None and not self.cycle.response_complete
        if waits and (self.pipeline or self.cycle.response_started or not self.cycle.more_body):
            self.cycle.keep_alive = False  # replies that are due come first, and end the connection
        else:
            super().send_400_response(msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(self.task)
        self.task.add_done_callback(self.tasks.discard)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.task is not None and self.cycle is not None and not self.cycle.response_complete:
            self.task.cancel()  # Kludex/uvicorn#501

    def eof_received(self) -> bool:  # type: ignore[override]
        """Kludex/uvicorn#1264: a client that has closed its sending half alone is answered."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        for seconds in PROBE_SECONDS:
            self.loop.call_later(seconds, self.probe)
        return True

    def probe(self) -> None:
        """Find out whether the client is gone for good: only a write tells, and clients pass over this one (RFC 9110, 15.2)."""
        is_waiting = not (self.pipeline or self.cycle.response_started or self.transport.is_closing())
        if is_waiting and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def sweep(connections: Iterable[Connection], now: float) -> None:
    """Kludex/uvicorn#157: end the connections whose headers or body take too long; `now` in seconds of the loop's clock."""
    for connection in list(connections):
        if now > connection.due_at and not connection.flow.read_paused:
            connection.transport.abort()
