"""One HTTP/1.1 connection that keeps to the protocol and to its deadlines. Not for what a request means.

state      waits for               at its deadline                      bytes that come
IDLE       a request's first byte  closed; none with a reply pending    begin a request: HEADERS
HEADERS    the end of its headers  refused                              parsed until BODY
BODY       the end of its body     refused                              parsed until IDLE
ENDING     the pending replies     (their own)                          thrown away
LINGERING  the client's end        closed                               thrown away, up to a bound
CLOSED

event                                               next state
a request is refused, being broken or too slow:
  its reply is out                                  LINGERING
  its reply has begun                               CLOSED: half a reply cannot be mended
  older replies are pending                         ENDING: they come first, and then the end
  else                                              LINGERING, after the refusal
a reply that ends the connection is out             LINGERING
the process drains                                  a reply ends each connection on which a request has begun;
                                                    IDLE with none pending: CLOSED, after a silence
the client closes, or takes no bytes for too long   CLOSED
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from enum import Enum, auto
from typing import Any

import httptools
import structlog
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.budgets import CHUNK_BYTES, WRITE_HIGH_BYTES, rest_seconds
from app.server.cycle import disconnect, fit
from app.server.deadline import Deadline
from app.server.direct import SHORT_BYTES, Call, Routes
from app.server.leftover import Leftover
from app.server.observer import Observer
from app.server.patience import REPEAT_SECONDS
from app.server.refusals import (
    ANY_HOST,
    MAX_HEADERS,
    REFUSALS,
    Hosts,
    Refused,
    check_head,
    refusal_reply,
    without_upgrade,
)
from app.server.sockets import has_unread, set_write_deadline
from app.settings import Connections

MAX_PIPELINED = 16
LEAST_BODY_SECONDS = 1.0  # after slow headers, a body still gets this long
WRITE_SECONDS = 8.0  # a client that takes nothing of what was written for so long is cut off
LEAST_BODY_BYTES = 4096  # in each `stall_seconds`
GRACE_SECONDS = 1.0  # at shutdown, how long a connection must have been silent to be closed

log = structlog.get_logger("app.server.protocol")


class State(Enum):
    """Of a connection: see the table above."""

    IDLE = auto()
    HEADERS = auto()
    BODY = auto()
    ENDING = auto()
    LINGERING = auto()
    CLOSED = auto()


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
        limits: Connections,
        observer: Observer,
        routes: Routes,
        hosts: Hosts = ANY_HOST,
        is_counted: bool = True,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = limits
        self.routes = routes
        self.hosts = hosts
        self.observer = observer
        self.is_counted = is_counted  # has a place among the connections of the process
        self.state = State.IDLE
        self.deadline = Deadline(self.loop)  # of the present state
        self.cycle: Any = None  # of the last request: RequestResponseCycle or Call
        self.pending: list[RequestResponseCycle | Call] = []  # requests without a complete reply, oldest first
        self.begun = self.idle_since = self.loop.time()
        self.header_bytes = 0  # received while the headers were not complete
        self.field_bytes = 0  # of the request's own header fields; one read may hold its body as well
        self.header_count = 0
        self.held: dict[Any, int] = {}  # bytes of bodies that are being read, by cycle, as they were counted
        self.body_bytes = 0  # received of the present body
        self.body_until = 0.0
        self.is_resting = False  # other connections come first for a while
        self.refused_at = -float("inf")
        self.refused = b""  # the bytes of the last request, where it was refused and nothing else came with it
        self.begun_count = 0  # requests that have begun in what was read last

    # bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.leftover = Leftover(self.loop, transport, self.deadline, self._cut)
        if self.is_counted and not self.observer.connections.take(1):
            self.is_counted = False
            self._cut("too_many")
            return
        transport.set_write_buffer_limits(WRITE_HIGH_BYTES)
        set_write_deadline(transport, WRITE_SECONDS)
        self.deadline.set(self.limits.header_seconds, self._cut, "silent")

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, TimeoutError):
            self.observer.closed("slow_reader")
        self._enter(State.CLOSED)
        self.leftover.close()
        for cycle in self.pending:
            _disconnect(cycle)
        self.observer.body_bytes.give(sum(self.held.values()))
        self.held.clear()
        self.observer.unsent(self, 0)
        if self.is_counted:
            self.observer.connections.give(1)
        self.cycle = None
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client leaves replies unread."""
        super().pause_writing()
        self.observer.unsent(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client has read enough of what was written."""
        super().resume_writing()
        self.observer.unsent(self, 0)
        self._go_on()

    def data_received(self, data: bytes) -> None:
        rest, declined = self._read(data), 0
        while rest is not None and declined < MAX_PIPELINED:
            rest, declined = self._read(rest), declined + 1
        if rest is not None:
            self._refuse("bad_request")

    def _read(self, data: bytes) -> bytes | None:
        """Parse these bytes. It returns those that are to be parsed again."""
        if self.state in (State.ENDING, State.LINGERING) or self._is_answered():
            self.leftover.drop(len(data))
        if self.state in (State.ENDING, State.LINGERING, State.CLOSED):
            return None
        is_first = self.state is State.IDLE
        if is_first:
            if data == self.refused and self._is_refused_again():
                return None
            self._begin_request()
        if self.state is State.HEADERS:
            self.header_bytes += len(data)
        self.begun_count = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._declined(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(_refusal_of(error))
        else:
            if self.state is State.HEADERS and self.header_bytes > self.limits.max_header_bytes:
                self._refuse("headers")
            elif self.state in (State.HEADERS, State.BODY) and not self.deadline.is_set:
                self._watch()
            is_whole = is_first and self.begun_count == 1 and self.state is State.IDLE and len(data) < SHORT_BYTES
            self.refused = data if is_whole and isinstance(self.cycle, Call) and self.cycle.is_refused else b""
        return None

    def _is_refused_again(self) -> bool:
        """The bytes of the last request have come once more: a caller who is refused sends the same again and again."""
        if self.pending or self.observer.draining:
            return False
        self._enter(State.IDLE)  # its deadline is over
        return bool(self.cycle.refuse_again())

    def _begin_request(self) -> None:
        if self.cycle is not None:  # the first one has begun with the connection
            self.begun = self.loop.time()
        self._enter(State.HEADERS)

    def _declined(self, rest: bytes) -> bytes:
        """An upgrade may be declined by answering in HTTP/1.1: the same request, asking for none, and what follows."""
        parser = self.parser
        head = without_upgrade(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self._reset_counts()
        return head + rest

    # parser callbacks

    def on_message_begin(self) -> None:
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self.begun_count += 1
        if self.state is State.IDLE:  # behind another request, in one read
            self._begin_request()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        if self.state is State.HEADERS:  # trailers are counted and dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        check_head(self.parser.get_method(), self.parser.get_http_version(), self.headers, self.hosts)
        if len(self.pending) >= MAX_PIPELINED:
            raise Refused("bad_request")
        if self.parser.should_upgrade():
            return  # llhttp would take the body for another protocol: see `_declined`
        endpoint = self.routes(self.parser.get_method(), self.url)
        before = self.cycle
        if endpoint is None:
            self._begin_cycle()
        else:
            keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
            self.cycle = Call(
                self, endpoint, self.headers, keep_alive=keep_alive, expects_continue=self.expect_100_continue
            )
        self.pending.append(self.cycle)
        if self.observer.draining:
            self._close_after_last()
        self._enter(State.BODY)
        self.body_bytes = 0
        if endpoint is not None:
            if (before is None or before.response_complete) and not self.is_resting:
                self.cycle.start()
            else:
                self.flow.pause_reading()
                self.pipeline.appendleft((self.cycle, self.app))

    def _begin_cycle(self) -> None:
        """An ASGI application gets the request: uvicorn's own way."""
        read = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # makes the scope
        self.url, self.scope["headers"], self.expect_100_continue = read
        super().on_headers_complete()
        fit(self.cycle, self.end_with_reply, self._is_ending)

    def _start_asgi_task(self, cycle: RequestResponseCycle | Call, app: ASGI3Application) -> None:
        if isinstance(cycle, Call):
            cycle.start()
        else:
            super()._start_asgi_task(cycle, app)

    def _watch(self) -> None:
        """A request has begun, or its body has, and what was read does not end it."""
        now = self.loop.time()
        if self.state is State.HEADERS:
            self.deadline.set(self.begun + self.limits.header_seconds - now, self._refuse, "slow")
        else:
            self.body_until = max(self.begun + self.limits.body_seconds, now + LEAST_BODY_SECONDS)
            self._watch_body()

    def _watch_body(self) -> None:
        left = self.body_until - self.loop.time()
        self.deadline.set(min(left, self.limits.stall_seconds), self._check_body, self.body_bytes)

    def _check_body(self, bytes_before: int) -> None:
        if self.loop.time() < self.body_until and self.body_bytes - bytes_before >= LEAST_BODY_BYTES:
            self._watch_body()
        else:
            self._refuse("slow")

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        cycle, count = self.cycle, len(body) + CHUNK_BYTES
        if cycle.response_complete or (isinstance(cycle, Call) and cycle.response_started):
            return  # nobody reads it
        if self.observer.body_bytes.take(count):
            self.held[cycle] = self.held.get(cycle, 0) + count
            cycle.feed(body) if isinstance(cycle, Call) else super().on_body(body)
        elif not (isinstance(cycle, Call) and cycle.refuse_for_room()):
            raise Refused("crowded")

    def release(self, cycle: RequestResponseCycle | Call) -> None:
        """The body of a request is needed no more."""
        self.observer.body_bytes.give(self.held.pop(cycle, 0))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if isinstance(self.cycle, Call):
            self.cycle.end()
        else:
            super().on_message_complete()
        if self.state is State.BODY:  # a reply may have ended the connection already
            self._reset_counts()
            self._rest()

    def on_response_complete(self) -> None:
        """Without uvicorn's own, whose keep-alive timer begins with the reply though the body may still arrive."""
        for cycle in self.pending:
            if cycle.response_complete:
                self.release(cycle)
        self.pending = [cycle for cycle in self.pending if not cycle.response_complete]
        self._go_on()
        if self.state is State.IDLE:
            self._rest()

    def rest(self, seconds: float) -> None:
        """A request has held the event loop for so long: other connections come first for a while."""
        if rest := rest_seconds(seconds):
            self.is_resting = True
            self.flow.pause_reading()
            self.loop.call_later(rest, self._rest_ends)

    def _rest_ends(self) -> None:
        self.is_resting = False
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next request of the pipeline, unless the client leaves replies unread or the connection rests."""
        if self.state in (State.LINGERING, State.CLOSED):
            return
        if self.flow.write_paused or self.is_resting:
            self.flow.pause_reading()
            return
        self.flow.resume_reading()
        if self.pipeline and self.pending[0] is self.pipeline[-1][0]:
            self._start_asgi_task(*self.pipeline.pop())

    def _rest(self) -> None:
        self._enter(State.IDLE)
        self.idle_since = self.loop.time()
        if not self.pending:
            self.deadline.set(self.limits.keep_alive_seconds, self._cut, "keep_alive")

    def _reset_counts(self) -> None:
        self.header_bytes = self.field_bytes = self.header_count = self.leftover.bytes = 0

    def _count_header(self, length: int) -> None:
        self.header_count += 1
        self.field_bytes += length
        if self.field_bytes > self.limits.max_header_bytes or self.header_count > MAX_HEADERS:
            raise Refused("headers")

    # ends

    def end_with_reply(self) -> None:
        """The last reply is written."""
        if not self._is_ending():
            self._enter(State.LINGERING)
            self.flow.resume_reading()  # paused where the application took no more of the body
            self.leftover.linger(draining=self.observer.draining)

    def is_impatient(self) -> bool:
        """Told of a request that is refused: whether the one before it was, a moment ago."""
        before, self.refused_at = self.refused_at, self.loop.time()
        return self.refused_at - before < REPEAT_SECONDS

    def _refuse(self, refusal: str) -> None:
        """Answer the request that is being read, unless it has a reply already or an older one is pending; then end."""
        cycle = self.cycle if self.state is State.BODY else None
        if cycle is not None:
            if cycle.response_complete:
                self.end_with_reply()
                return
            if cycle.response_started:
                self._cut(refusal)
                return
            _disconnect(cycle, REFUSALS[refusal][:2])  # the application says nothing more
            self.release(cycle)
            self.pending.remove(cycle)
            self.pipeline = deque(entry for entry in self.pipeline if entry[0] is not cycle)
        self.observer.closed(refusal)
        if self.pending:
            self._enter(State.ENDING)
            self._close_after_last()
        else:
            self.transport.write(refusal_reply(refusal))
            self.end_with_reply()

    def shutdown(self) -> None:
        """End the connection as soon as nothing is pending on it. uvicorn's name for it."""
        self.leftover.hurry()
        self._close_after_last()
        self._end_if_silent()

    def _end_if_silent(self) -> None:
        """The client may just have sent its next request, so silence has to last a little."""
        if self.pending or self.transport.is_closing() or not (self.state is State.IDLE or self._is_answered()):
            return  # a reply ends it, or has
        left = self.idle_since + GRACE_SECONDS - self.loop.time()
        if left > 0 or self.state is State.BODY or has_unread(self.transport):
            self.loop.call_later(max(left, GRACE_SECONDS / 100), self._end_if_silent)
        else:
            self.transport.close()

    def _close_after_last(self) -> None:
        for cycle in self.pending:
            cycle.keep_alive = cycle is not self.pending[-1]

    def cut_for_room(self) -> None:
        """Other clients need the memory of what this one leaves unread."""
        self._cut("reply_budget")

    def _cut(self, reason: str) -> None:
        self.observer.closed(reason)
        self._enter(State.CLOSED)
        self.transport.abort()

    def _is_ending(self) -> bool:
        return self.state in (State.LINGERING, State.CLOSED) or self.transport.is_closing()

    def _is_answered(self) -> bool:
        """Whether a body still arrives whose reply is out, on a connection that stays."""
        return self.state is State.BODY and self.cycle.response_complete

    def _enter(self, state: State) -> None:
        self.state = state
        if state is State.CLOSED:
            self.deadline.close()
        else:
            self.deadline.clear()


def _refusal_of(error: httptools.HttpParserError) -> str:
    """Why parsing has stopped: what a callback has refused, a fault of ours in one, or the bytes."""
    cause = error.__context__
    if isinstance(cause, Refused):
        return str(cause.args[0])
    if cause is None or not isinstance(error, httptools.HttpParserCallbackError):
        return "bad_request"
    frames = traceback.extract_tb(cause.__traceback__)[-12:]  # without the message: that may hold what the caller sent
    log.error(
        "fault", error=type(cause).__name__, trace=[f"{each.filename}:{each.lineno} {each.name}" for each in frames]
    )
    return "fault"


def _disconnect(cycle: RequestResponseCycle | Call, answered: tuple[int, str] | None = None) -> None:
    """The application is told that the client disconnected, or was answered by the connection, with status and code."""
    if isinstance(cycle, Call):
        cycle.disconnect(answered)
    else:
        disconnect(cycle, answered)
