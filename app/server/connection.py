"""One HTTP/1.1 connection that keeps to the protocol and to its deadlines.

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
import math
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, cast

from app.budgets import MAX_HEADER_BYTES, WRITE_HIGH_BYTES, rest_seconds, shared_rest_seconds
from app.http.asgi import Routes
from app.server.arrival import Arrival, Leftover, has_unread
from app.server.cycle import Cycle
from app.server.observer import REPEAT_SECONDS, Observer
from app.server.reader import ANY_HOST, REFUSALS, Headers, Hosts, Reader, Refused, refusal_reply
from app.settings import Connections

MAX_PIPELINED = 16
GRACE_SECONDS = 1.0  # at shutdown, how long a connection must be silent before it is closed


class State(Enum):
    """State of a connection: see the table above."""

    IDLE = auto()
    HEADERS = auto()
    BODY = auto()
    ENDING = auto()
    LINGERING = auto()
    CLOSED = auto()


class Connection(asyncio.Protocol):
    """Deadlines for headers, body and reply, and at most one reply to a request."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: Connections,
        observer: Observer,
        routes: Routes,
        *,
        hosts: Hosts = ANY_HOST,
        is_counted: bool = True,
    ) -> None:
        self.loop = loop
        self.limits = limits
        self.routes = routes
        self.hosts = hosts
        self.observer = observer
        self.is_counted = is_counted  # counts towards the process's connection budget
        self.state = State.IDLE
        self.due_at = math.inf  # the deadline of the present state, in seconds of the loop's clock
        self.cycle: Cycle | None = None  # cycle of the last request
        self.pending: list[Cycle] = []  # requests without a complete reply, oldest first
        self.waiting: deque[Cycle] = deque()  # the pending requests that have not been started
        self.arrival = Arrival(loop, limits, self.wait, self._refuse)
        self.idle_since = loop.time()
        self.held: dict[Cycle, int] = {}  # body bytes taken from the budget, by cycle
        self.rests = 0  # rests in progress: until they end, other connections go first
        self.is_unread = False  # the client leaves replies unread
        self.is_paused = False  # reading is paused
        self.refused_at = -float("inf")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio.Protocol`."""
        transport = self.transport = cast(asyncio.Transport, transport)
        self.reader = Reader(self, self.hosts, MAX_HEADER_BYTES)
        self.write = transport.write
        self.observer.open.add(self)
        self.leftover = Leftover(self.loop, transport, self.wait, self.cut)
        self.wait(self.limits.header_seconds, self.cut, "silent")
        if self.is_counted and not self.observer.connections.take(1):
            self.is_counted = False
            self.cut("too_many")
            return
        transport.set_write_buffer_limits(WRITE_HIGH_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol`."""
        if isinstance(exc, TimeoutError):
            self.observer.closed("slow_reader")
        self._enter(State.CLOSED)
        for cycle in self.pending:
            cycle.disconnect()
        self.observer.body_bytes.give(sum(self.held.values()))
        self.held.clear()
        self.observer.unsent(self, 0)
        if self.is_counted:
            self.observer.connections.give(1)
        self.observer.open.discard(self)
        self.cycle = None
        self.reader.close()
        del self._overdue, self.arrival, self.leftover  # breaks the reference cycles to this connection

    def pause_writing(self) -> None:
        """The client leaves replies unread."""
        self.is_unread = True
        self.observer.unsent(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client has read enough of what was written."""
        self.is_unread = False
        self.observer.unsent(self, 0)
        self._go_on()

    def data_received(self, data: bytes) -> None:
        """As `asyncio.Protocol`."""
        rest, declined = self._read(data), 0
        while rest is not None and declined < MAX_PIPELINED:
            rest, declined = self._read(rest), declined + 1
        if rest is not None:
            self._refuse("bad_request")

    def _read(self, data: bytes) -> bytes | None:
        """Parse these bytes. Returns bytes to parse again, or None."""
        if self.state in (State.ENDING, State.LINGERING) or self._is_answered():
            self.leftover.drop(len(data))
        if self.state in (State.ENDING, State.LINGERING, State.CLOSED):
            return None
        self.on_begin()
        try:
            rest = self.reader.feed(data)
            if self.state is State.BODY or self.waiting:
                self._count_bodies()
        except Refused as refused:
            self._refuse(refused.args[0])
            return None
        if rest is None and self.due_at == math.inf:
            if self.state is State.HEADERS:
                self.arrival.watch_head()
            elif self.state is State.BODY:
                self.arrival.watch_body()
        return rest

    # called by the reader

    def on_begin(self) -> None:
        """As `Hearer.on_begin`."""
        if self.state is not State.IDLE:
            return
        if self.cycle is not None:  # the first request's clock started with the connection
            self.arrival.begun = self.loop.time()
        self._enter(State.HEADERS)

    def on_head(self, method: bytes, target: bytes, headers: Headers, keep_alive: bool) -> None:
        """As `Hearer.on_head`."""
        if len(self.pending) >= MAX_PIPELINED:
            raise Refused("bad_request")
        before = self.cycle
        cycle = self.cycle = Cycle(self, self.routes, method, target, headers, keep_alive=keep_alive)
        self.pending.append(cycle)
        if self.observer.draining:
            self._close_after_last()
        self._enter(State.BODY)
        self.arrival.bytes = 0
        if (before is None or before.response_complete) and not self.rests:
            cycle.start()
        else:
            self._pause()
            self.waiting.append(cycle)

    def on_body(self, body: bytes, pieces: int) -> None:
        """As `Hearer.on_body`."""
        self.arrival.bytes += len(body)
        assert self.cycle is not None
        self.cycle.feed(body, pieces)

    def on_end(self) -> None:
        """As `Hearer.on_end`."""
        assert self.cycle is not None
        if self.state is State.BODY:  # a reply may already have ended the connection
            self.leftover.bytes = 0
            self._rest()
        try:
            self.cycle.end()
        except Exception:
            self.state = State.BODY  # this request is refused
            raise

    def _count_bodies(self) -> None:
        """Charge the budget for body bytes that were read and wait for their endpoint. Raises Refused if there is no room."""
        for cycle in self.pending:
            count = cycle.held_bytes - self.held.get(cycle, 0)
            if count <= 0:
                continue
            if self.observer.body_bytes.take(count):
                self.held[cycle] = cycle.held_bytes
            elif not cycle.refuse_for_room():
                raise Refused("crowded")

    # called by cycles

    def release(self, cycle: Cycle) -> None:
        """Give back the budget of a request's body, which is no longer needed."""
        if cycle in self.held:
            self.observer.body_bytes.give(self.held.pop(cycle))

    def on_response_complete(self) -> None:
        """A reply is completely written."""
        self.pending = [cycle for cycle in self.pending if not cycle.response_complete]
        self._go_on()
        if self.state is State.IDLE:
            self._rest()

    def rest(self, seconds: float, *, shares: bool = False) -> None:
        """Pause this connection after a request held the event loop for `seconds`, so that others go first. `shares`: the request ranked
        nothing or was wrong; all connections with such requests share one part of the loop."""
        resting = self.observer.resting if self.is_counted else 1  # a crowd does not delay an operator
        if wait := shared_rest_seconds(seconds, resting) if shares else rest_seconds(seconds):
            self.rests += 1
            self.observer.resting += 1
            self._pause()
            self.loop.call_later(wait, self._rest_ends)

    def end_with_reply(self) -> None:
        """End the connection: the last reply is written."""
        if self.state not in (State.LINGERING, State.CLOSED) and not self.transport.is_closing():
            self._enter(State.LINGERING)
            self._resume()
            self.leftover.linger(draining=self.observer.draining)

    def is_impatient(self) -> bool:
        """Record a refused request; return whether the last refusal was less than `REPEAT_SECONDS` ago."""
        before, self.refused_at = self.refused_at, self.loop.time()
        return self.refused_at - before < REPEAT_SECONDS

    def _rest_ends(self) -> None:
        self.rests -= 1
        self.observer.resting -= 1
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next request of the pipeline, unless the client leaves replies unread or the connection rests."""
        if self.state in (State.LINGERING, State.CLOSED):
            return
        if self.is_unread or self.rests:
            self._pause()
            return
        self._resume()
        if self.waiting and self.pending[0] is self.waiting[0]:
            self.waiting.popleft().start()

    def _pause(self) -> None:
        if not self.is_paused:
            self.is_paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self.transport.resume_reading()

    def _rest(self) -> None:
        self._enter(State.IDLE)
        self.idle_since = self.loop.time()
        if not self.pending:
            self.wait(self.limits.keep_alive_seconds, self.cut, "keep_alive")

    # deadlines and ends

    def wait(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        """Set the deadline. `act` is called when it passes, unless the state changes or another deadline is set first."""
        self.due_at = self.loop.time() + seconds
        self._overdue: Callable[[], None] = partial(act, *arguments)

    def pass_deadline(self) -> None:
        """Act on the deadline, which has passed."""
        self.due_at = math.inf
        self._overdue()

    def _refuse(self, refusal: str) -> None:
        """Answer the request that is being read, unless it has a reply already or an older one is pending; then end."""
        cycle = self.cycle if self.state is State.BODY else None
        if cycle is not None:
            if cycle.response_complete:
                self.end_with_reply()
                return
            if cycle.response_started:
                self.cut(refusal)
                return
            cycle.disconnect(REFUSALS[refusal][:2])  # its endpoint sends no reply after this
            self.release(cycle)
            self.pending.remove(cycle)
            if cycle in self.waiting:
                self.waiting.remove(cycle)
        self.observer.closed(refusal)
        if self.pending:
            self._enter(State.ENDING)
            self._close_after_last()
        else:
            self.write(refusal_reply(refusal))
            self.end_with_reply()

    def shutdown(self) -> None:
        """End the connection once no reply is pending."""
        self.leftover.hurry()
        self._close_after_last()
        self._end_if_silent()

    def _end_if_silent(self) -> None:
        """Close once the connection has been silent for `GRACE_SECONDS`: the client may just have sent its next request."""
        if self.pending or self.transport.is_closing() or not (self.state is State.IDLE or self._is_answered()):
            return  # a reply will end the connection, or has done so
        left = self.idle_since + GRACE_SECONDS - self.loop.time()
        if left > 0 or self.state is State.BODY or has_unread(self.transport):
            self.loop.call_later(max(left, GRACE_SECONDS / 100), self._end_if_silent)
        else:
            self.transport.close()

    def _close_after_last(self) -> None:
        for cycle in self.pending:
            cycle.keep_alive = cycle is not self.pending[-1]

    def cut(self, reason: str) -> None:
        """Abort the connection at once, dropping what is unread."""
        self.observer.closed(reason)
        self._enter(State.CLOSED)
        self.transport.abort()

    def _is_answered(self) -> bool:
        """Whether the reply is out while its request's body still arrives."""
        return self.state is State.BODY and self.cycle is not None and self.cycle.response_complete

    def _enter(self, state: State) -> None:
        self.state = state
        self.due_at = math.inf
