"""What uvicorn's HTTP/1.1 lacks and callers need: `uvicorn.Config(http=Connection)`, and `sweep` every second.

A connection gives its parser one piece after another. A piece ends at the latest where a message may end, and a turn of the event loop
takes a bounded number of them. So a read of 256 kB of tiny chunks, headers or requests does not keep the others waiting, and a
request behind one that is being answered stays bytes.

`tests/app/api/test_connection.py` names what this relies on in uvicorn 0.54, whose minor version is pinned.
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.api.caller import BEGAN_AT, CANCELS
from app.api.middleware import MOST_TARGET_BYTES

MOST_HEADERS, MOST_HEADER_BYTES = 100, 32_768
MOST_ESCAPES = 256  # in a path: uvicorn takes a sixth of a microsecond for each, and no path of ours needs one
HEAD_SECONDS = 5.0  # from the connect or the first byte to the end of the headers
BODY_SECONDS = 30.0  # from there to the end of the body
LINGER_SECONDS = 5.0  # for a client to read its reply while it still writes
PROBE_SECONDS = (0.1, 0.2)  # after a client has closed its sending half
RESET_SECONDS = (0.001, 0.01, 0.05)  # after a probe, for a client that has gone to have said so
WITH_REQUEST_SECONDS = 0.05  # a client that closes its sending half later than its request has most likely gone
LAST_DATA_RECEIVED = slice(52, 56)  # tcpi_last_data_recv of Linux' struct tcp_info: milliseconds
CLOCK_TICK_SECONDS = 0.01  # the longest tick of the clock that it is taken from
PIECE_BYTES = 4096  # of what has no length of its own
MOST_CALLBACKS = 256  # of the parser in one turn of the event loop, but for those of the last piece
FREE_CHUNKS, LEAST_CHUNK_BYTES = 1024, 4  # after so many chunks of a body, they must be this long on average
FINAL = tuple(b"HTTP/1.1 %d" % kind for kind in (2, 3, 4, 5))  # first bytes of a final reply; an interim one is 1xx
HOP_BY_HOP = (b"connection", b"upgrade", b"http2-settings")
LONG_TARGET = b"/" + b"a" * MOST_TARGET_BYTES
"""Stands for every longer target: the middleware refuses it for its length."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
INVALID = "Invalid HTTP request received."


class BeyondLimits(Exception):
    """A request's headers are longer, or more, than the limits, or its chunks too small."""


class InvalidTarget(Exception):
    """A request's target has a fragment, which none may have (RFC 9112, 3.2)."""


class PortState(ServerState):
    """What the connections of a port share. `is_draining`: each reply ends its connection."""

    connections: set[Connection]  # type: ignore[assignment]  # of the kind that the port was given
    is_draining = False


class Cork:
    """A transport that joins the head of a reply with its body: uvloop makes a system call, and wakes the client, for each write.

    `close` is what ends the connection.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.transport = transport
        self.is_closing = transport.is_closing
        self.head = b""
        self._close = close

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
        self._close()

    def flush(self) -> None:
        """Write what was kept: a reply without a body."""
        if self.head:
            self.write(b"")


class Flow(FlowControl):
    """uvicorn's, which tells the connection that it may go on reading."""

    def __init__(self, transport: asyncio.Transport, on_resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self._on_resume = on_resume

    def resume_reading(self) -> None:
        """Read on, unless reading is not paused."""
        if self.read_paused:
            super().resume_reading()
            self._on_resume()


class Connection(HttpToolsProtocol):
    """`due_at`: when the headers, or the body, must have come, in seconds of the loop's clock."""

    server_state: PortState
    task: asyncio.Task[None] | None = None
    due_at = math.inf
    ended_at = 0.0  # when the last request had come, in seconds of the loop's clock
    closed_at = math.inf  # when the client was seen to have closed its sending half
    unread = 0  # bytes since the last piece of a body or the end of headers
    received = b""  # the last read; its bytes from `parsed` on wait for their turn
    parsed = 0
    turn: asyncio.Handle | None = None  # in which the rest is parsed
    is_spared = False  # whether the sweep has found this request late, and bytes of it that the loop had not read
    is_ending = False  # what still comes is dropped
    callbacks = 0  # of the parser in this turn
    began_at = 0.0  # when the first bytes of a head came that is read again, in seconds of `time.perf_counter`
    header_bytes = 0  # of the headers, or the trailers, that are being read
    is_in_body = False  # a request's headers have come, and its end has not
    body_left = 0  # bytes of a body with a length that have not come
    chunks = chunk_bytes = 0  # of a body without one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport, self.parse_soon)
        self.cork = Cork(transport, self.close)
        about: dict[object, object] = {
            "has_closed": self.has_closed,
            "has_left": self.has_left,
            "probe": self.probe,
            "lag_seconds": self.lag_seconds,
        }
        self.extensions = {CANCELS: about}
        self.due_at = self.loop.time() + HEAD_SECONDS

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self.is_ending:
            return
        waiting = self.parsed < len(self.received)  # a transport that was paused may still have this much
        self.received, self.parsed = (self.received[self.parsed :] + data if waiting else data), 0
        if self.turn is None and not self.flow.read_paused:
            self.parse()

    def parse_soon(self) -> None:
        """Parse what waits in the next turn, if anything does."""
        if self.parsed < len(self.received):
            self.transport.pause_reading()
            if self.turn is None:
                self.turn = self.loop.call_soon(self.parse)

    def parse(self) -> None:
        """Parse what one turn may take."""
        self.turn, self.callbacks = None, 0
        end = len(self.received)
        while (
            self.parsed < end and self.callbacks < MOST_CALLBACKS and not self.flow.read_paused and not self.is_over()
        ):
            self.parse_piece(self.next_piece())
            end = len(self.received)
        if self.is_over():
            self.received, self.parsed = b"", 0
            return
        if self.parsed < end:
            if not self.flow.read_paused:
                self.parse_soon()
        elif not self.flow.read_paused:
            self.received, self.parsed = b"", 0
            self.transport.resume_reading()
        if self.due_at == math.inf and (self.cycle is None or self.cycle.response_complete):  # such as an empty line
            self.due_at = self.loop.time() + HEAD_SECONDS

    def is_over(self) -> bool:
        """Whether nothing more is to be parsed."""
        return self.is_ending or self.transport.is_closing()

    def next_piece(self) -> memoryview:
        """What the parser gets next. It holds the ends of two messages at most: but for a body with a length, a message ends with an empty
        line."""
        start = self.parsed
        if self.body_left:
            stop = start + self.body_left
        else:
            message_end = self.received.find(b"\r\n\r\n", start, start + PIECE_BYTES)
            stop = start + PIECE_BYTES if message_end < 0 else message_end + 4
        self.parsed = min(stop, len(self.received))
        return memoryview(self.received)[start : self.parsed]

    def parse_piece(self, piece: memoryview) -> None:
        """Parse this piece."""
        self.callbacks += 1
        self.unread += len(piece)
        try:
            self.parser.feed_data(piece)
            # Kludex/uvicorn#157: httptools keeps a header, or a trailer, that does not end
            if self.unread > MOST_HEADER_BYTES:
                raise BeyondLimits
        except (httptools.HttpParserError, BeyondLimits):
            self.send_400_response(INVALID)
        except httptools.HttpParserUpgrade as upgrade:
            self.decline_upgrade(bytes(piece[upgrade.args[0] :]))

    def decline_upgrade(self, rest: bytes) -> None:
        """Kludex/uvicorn#2722: a parser that never heard of the upgrade reads the same head, and the bytes behind it."""
        if self.parser.get_method() == b"CONNECT":
            self.send_400_response(INVALID)
            return
        self.began_at = self.scope[BEGAN_AT]  # type: ignore[literal-required]
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b" % field for field in self.headers if field[0] not in HOP_BY_HOP]
        options = b",".join([value for name, value in self.headers if name == b"connection"]).lower().split(b",")
        head += [
            b"connection: " + option
            for option in {option_name.strip() for option_name in options} & {b"close", b"keep-alive"}
        ]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.received, self.parsed = b"\r\n".join([*head, b"", rest]) + self.received[self.parsed :], 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self.extensions
        self.scope[BEGAN_AT] = self.began_at or time.perf_counter()  # type: ignore[literal-required]
        self.began_at = 0.0
        self.header_bytes = self.body_left = self.chunks = self.chunk_bytes = 0
        self.due_at, self.is_spared = self.loop.time() + HEAD_SECONDS, False

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MOST_TARGET_BYTES:
            self.url = LONG_TARGET

    def on_header(self, name: bytes, value: bytes) -> None:
        self.callbacks += 1
        self.header_bytes += len(name) + len(value)
        if self.header_bytes > MOST_HEADER_BYTES or len(self.headers) >= MOST_HEADERS:  # Kludex/uvicorn#157
            raise BeyondLimits
        # RFC 9110, 5.5: httptools leaves blanks at the end of Content-Length
        super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():  # Kludex/uvicorn#2722
            if b"#" in self.url:  # uvicorn would take what comes before it, and a proxy's rules may look at the end
                raise InvalidTarget
            if self.parser.get_http_version() == "1.0":  # whose clients know no interim replies: RFC 9110, 10.1.1
                self.expect_100_continue = False
            for name, value in self.headers:
                if name == b"content-length":
                    self.body_left = int(value)  # the parser has checked it
                    break
            if self.url.partition(b"?")[0].count(b"%") > MOST_ESCAPES:
                self.url = LONG_TARGET
            super().on_headers_complete()  # raises where httptools cannot read the target
            self.unread, self.due_at, self.is_in_body = 0, self.loop.time() + BODY_SECONDS, True
            self.cycle.transport = self.cork  # type: ignore[assignment]
            if self.server_state.is_draining:
                self.cycle.keep_alive = False
            self.headers = []  # for trailers, which uvicorn would add to the request's headers: RFC 9110, 6.5.1
            self.header_bytes = 0

    def on_body(self, body: bytes) -> None:
        self.unread = 0
        self.callbacks += 1
        if self.body_left:
            self.body_left -= len(body)
        else:
            self.chunks += 1
            self.chunk_bytes += len(body)
            if self.chunks > FREE_CHUNKS and self.chunk_bytes < LEAST_CHUNK_BYTES * self.chunks:
                raise BeyondLimits
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # Kludex/uvicorn#2722
            self.unread, self.due_at, self.is_in_body, self.ended_at = 0, math.inf, False, self.loop.time()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.cork.flush()
        if self.is_in_body and not self.pipeline:  # the body still comes, and nobody reads it
            self.due_at = min(self.due_at, self.loop.time() + LINGER_SECONDS)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self.is_ending = True
        waits = self.cycle is not None and not self.cycle.response_complete
        if waits and (self.pipeline or self.cycle.response_started or not self.cycle.more_body):
            self.cycle.keep_alive = False  # replies that are due come first, and end the connection
            return
        if self.is_in_body and not waits:  # the request has its reply
            self.linger()
            return
        text = msg.encode()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n" % len(
            text
        )
        self.transport.write(head + b"connection: close\r\n\r\n" + text)
        if waits:
            self.disconnected()
        self.linger()

    def close(self) -> None:
        """End the connection after its last reply."""
        if self.is_in_body or self.parsed < len(self.received):
            self.linger()
        else:
            self.transport.close()

    def linger(self) -> None:
        """End the connection of a client that still writes. Closing at once would reset it, and the client would lose its reply: so the
        sending half is closed, and what comes is dropped for `LINGER_SECONDS` (RFC 9112, 9.6)."""
        self.is_ending = True
        self.received, self.parsed = b"", 0
        self.pipeline.clear()
        self.due_at = self.loop.time() + LINGER_SECONDS
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.flow.resume_reading()
            self.transport.resume_reading()

    def disconnected(self) -> None:
        """Tell the application that nobody waits for its reply."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        if self.task is not None:
            self.task.cancel()  # Kludex/uvicorn#501

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(self.task)
        self.task.add_done_callback(self.tasks.discard)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.is_ending = True
        self.received, self.parsed = b"", 0
        if self.turn is not None:
            self.turn.cancel()
        if self.task is not None and self.cycle is not None and not self.cycle.response_complete:
            self.task.cancel()  # Kludex/uvicorn#501

    def eof_received(self) -> bool:  # type: ignore[override]
        """Kludex/uvicorn#1264: a client that has closed its sending half alone is answered."""
        self.closed_at = self.loop.time()
        if self.is_ending or self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        if self.has_left():
            self.probe()
        for seconds in PROBE_SECONDS:
            self.loop.call_later(seconds, self.probe)
        return True

    def has_closed(self) -> bool:
        """Whether the client has closed its sending half, or all: asks the system, since the loop may be late to hear of it."""
        if self.transport.is_closing():
            return True
        return self.has_event(select.POLLRDHUP)

    def has_left(self) -> bool:
        """Whether the client has closed its sending half, and not with its request."""
        if self.closed_at < math.inf:
            return self.closed_at > self.ended_at + WITH_REQUEST_SECONDS
        return self.loop.time() > self.ended_at + WITH_REQUEST_SECONDS and self.has_closed()

    def has_event(self, events: int) -> bool:
        """Whether the system reports one of these events of the connection, or its end."""
        sock = self.transport.get_extra_info("socket")
        if sock is None:
            return False
        poll = select.poll()
        poll.register(sock.fileno(), events)
        return bool(poll.poll(0))

    def lag_seconds(self) -> float:
        """How long ago the last bytes came from the network, as far as it is more than a tick of the system's clock: a busy loop reads them
        late. 0 where the system does not say."""
        sock = self.transport.get_extra_info("socket")
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return 0.0
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA_RECEIVED.stop)
        seconds = int.from_bytes(info[LAST_DATA_RECEIVED], sys.byteorder) / 1000
        return seconds if seconds > CLOCK_TICK_SECONDS else 0.0

    def probe(self) -> None:
        """Find out whether the client is gone for good: only a write tells, and clients pass over this one (RFC 9110, 15.2)."""
        is_waiting = not (self.pipeline or self.cycle.response_started or self.transport.is_closing())
        if is_waiting and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)
            for seconds in RESET_SECONDS:
                self.loop.call_later(seconds, self.end_if_reset)

    def end_if_reset(self) -> None:
        """End the connection if the client has answered a probe with a reset. uvloop would notice at the next write only: it reads no more
        after the end of what the client sends."""
        if not self.transport.is_closing() and self.has_event(0):
            self.transport.abort()


def sweep(connections: Iterable[Connection], now: float) -> None:
    """Kludex/uvicorn#157: end the connections whose headers or body take too long; `now` in seconds of the loop's clock. One whose bytes
    have come and are not read is spared once: the loop may be late, such as after the process was stopped."""
    for connection in list(connections):
        if now > connection.due_at and not connection.flow.read_paused:
            if not connection.is_spared and connection.has_event(select.POLLIN):
                connection.is_spared = True
            else:
                connection.transport.abort()
