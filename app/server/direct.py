"""Requests that an endpoint takes from the connection itself, by calls in place of ASGI messages: no scope, no task, one write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE

from app.budgets import REFUSED_SECONDS

if TYPE_CHECKING:
    from app.server.protocol import StrictProtocol

Fields = Sequence[tuple[bytes, bytes]]
SHORT_BYTES = 2**13  # no body of that length holds the event loop; asking for processor time is a system call
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Handler(Protocol):
    """One request in the endpoint's hands."""

    max_body_bytes: int

    def finish(self, body: bytes) -> None:
        """The body has arrived."""
        ...

    def too_long(self) -> None:
        """More of it has arrived than `max_body_bytes`."""
        ...

    def no_room(self) -> None:
        """Too much is being read for all callers."""
        ...

    def abandon(self, answered: tuple[int, str] | None = None) -> None:
        """Nobody reads a reply: the client has disconnected, or the connection has refused the request, with status and code."""
        ...


class Endpoint(Protocol):
    """Takes requests when their headers have arrived, in the event loop."""

    def begin(self, headers: Fields, reply: Callable[[int, Fields, bytes, bool], None]) -> Handler:
        """`headers` have lower-case names. `reply` is called once, at once perhaps, unless the request is abandoned before.

        Its last argument says whether the reply may be written later to a caller who is impatient: see `patience`.
        """
        ...

    def refuse(self, headers: Fields) -> tuple[int, Fields, bytes, bool] | None:
        """What `reply` would be called with for a request that is refused unread; None where it has to be read."""
        ...


Routes = Callable[[bytes, bytes], Endpoint | None]
"""Method and request target → who takes the request; None for an ASGI application."""


class Call:
    """One such request, as the protocol knows it in place of uvicorn's cycle."""

    __slots__ = (
        "_body", "_bytes", "_endpoint", "_expects_continue", "_fields", "_handler", "_is_read", "_is_wrong", "_protocol",
        "_size", "disconnected", "is_refused", "keep_alive", "response_complete", "response_started",
    )  # fmt: skip

    def __init__(
        self, protocol: StrictProtocol, endpoint: Endpoint, fields: Fields, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.keep_alive = keep_alive
        self.disconnected = self.is_refused = self.response_started = self.response_complete = False
        self._protocol = protocol
        self._endpoint = endpoint
        self._fields = fields
        self._expects_continue = expects_continue
        self._handler: Handler | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._is_read = self._is_wrong = False
        self._bytes = b""  # of a reply that waits

    def start(self) -> None:
        """It is this request's turn: those before it on the connection have their replies."""
        self._handler = self._endpoint.begin(self._fields, self._reply)
        if self._is_read:
            self._finish()
        elif self._expects_continue and not self.response_started:
            self._protocol.transport.write(CONTINUE)

    def feed(self, data: bytes) -> None:
        """Some of the body."""
        if self.response_started:
            return
        self._size += len(data)
        if self._handler is not None and self._size > self._handler.max_body_bytes:
            self._handler.too_long()
        else:
            self._body.append(data)

    def refuse_for_room(self) -> bool:
        """Answer that there is no room for more of the body; False where it is not this request's turn."""
        if self._handler is None:
            return False
        self._body = []
        self._handler.no_room()
        return True

    def end(self) -> None:
        """The body is complete."""
        self._is_read = True
        if self._handler is not None:
            self._finish()

    def refuse_again(self) -> bool:
        """The bytes of this request, which was refused, have come again: whether they are, and need not be parsed."""
        refusal = self._endpoint.refuse(self._fields)
        if refusal is None:
            return False
        self.response_complete = False
        self._protocol.pending.append(self)
        self._reply(*refusal)
        return True

    def disconnect(self, answered: tuple[int, str] | None = None) -> None:
        """Nobody reads a reply any more; `answered` as of `Handler.abandon`."""
        self.disconnected = True
        self._protocol.observer.refusals.forget(self._write)
        if self._handler is not None and not self.response_started:
            self._handler.abandon(answered)

    def _finish(self) -> None:
        handler, body = self._handler, self._body
        self._body = []
        if self.response_started or handler is None:
            return
        if self._size > handler.max_body_bytes:
            handler.too_long()
            return
        whole = body[0] if len(body) == 1 else b"".join(body)
        is_short = self._size < SHORT_BYTES and not any(name == b"content-encoding" for name, _ in self._fields)
        started = 0.0 if is_short else time.thread_time()  # not by the clock: a busy machine holds the loop as well
        handler.finish(whole)
        self._protocol.release(self)
        if not is_short:
            rest = self._protocol.rest_with_others if self._is_wrong else self._protocol.rest
            rest(time.thread_time() - started)

    def _reply(self, status: int, headers: Fields, body: bytes, may_wait: bool) -> None:
        """Write head and body at once. Raises RuntimeError for a value that would break the head."""
        if self.disconnected:
            return
        if HEADER_VALUE_RE.search(b"".join([value for _, value in headers])):
            raise RuntimeError("a header value holds a control character")
        protocol = self._protocol
        fields = b"".join([b"%b: %b\r\n" % field for field in (*protocol.server_state.default_headers, *headers)])
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        self.response_started, self.is_refused = True, may_wait
        self._is_wrong = 400 <= status < 500 and status != 429
        self._handler = None  # what the request held would else stay until the connection's next one
        self._bytes = b"".join((STATUS_LINE[status], fields, end, body))
        is_impatient = may_wait and protocol.is_impatient()
        if not is_impatient or not protocol.observer.refusals.hold(self._write):
            self._write()

    def _write(self) -> None:
        protocol = self._protocol
        if self.disconnected:
            return
        self.response_complete = True
        protocol.transport.write(self._bytes)
        self._bytes = b""
        if self._is_wrong:
            protocol.rest_with_others(REFUSED_SECONDS)
        if not self.keep_alive:
            protocol.end_with_reply()
        protocol.on_response_complete()
