"""One request on a connection and its reply, given to an endpoint by calls: no scope, no task, one write."""

from __future__ import annotations

import re
import time
from http import HTTPStatus
from typing import Protocol

import structlog

from app.budgets import CHUNK_BYTES, REFUSED_SECONDS
from app.http.asgi import Routes
from app.http.call import Call, Fields
from app.server.observer import Observer

COPY_SECONDS = 5e-10  # roughly the kernel's time to copy a byte of a reply, after the step that writes it
LONG_HEAD_BYTES = 2**11  # longer targets with headers are timed: 32 KiB of escapes or lists take milliseconds
SHORT_BYTES = 2**13  # shorter bodies hold the loop too briefly to time: reading the thread's clock is a system call
MANY_PIECES, PIECE_SECONDS = 1024, 1e-7  # chunks in one read of 256 KiB, and roughly what reading one takes
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
log = structlog.get_logger("app.server.cycle")


class Connection(Protocol):
    """What a cycle needs from its connection."""

    observer: Observer

    def write(self, data: bytes) -> None: ...

    def release(self, cycle: Cycle) -> None: ...

    def rest(self, seconds: float, *, shares: bool = False) -> None: ...

    def is_impatient(self) -> bool: ...

    def cut(self, reason: str) -> None: ...

    def end_with_reply(self) -> None: ...

    def on_response_complete(self) -> None: ...


class Cycle:
    """One request on a connection: collects the body, calls the endpoint and writes the reply."""

    __slots__ = (
        "_body", "_bytes", "_connection", "_fields", "_handler", "_held", "_is_long", "_is_read", "_is_wrong", "_method", "_ranks",
        "_routes", "_size", "_target", "disconnected", "keep_alive", "response_complete", "response_started",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, routes: Routes, method: bytes, target: bytes, fields: Fields, *, keep_alive: bool
    ) -> None:
        self.keep_alive = keep_alive
        self.disconnected = self.response_started = self.response_complete = False
        self._connection = connection
        self._routes = routes
        self._method = method
        self._target = target
        self._fields = fields
        self._handler: Call | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._is_long = len(target) + sum([len(value) for _, value in fields]) > LONG_HEAD_BYTES
        self._is_read = self._is_wrong = self._ranks = False
        self._held = 0.0
        self._bytes = b""  # the reply, until it is written

    def start(self) -> None:
        """Begin this request: all earlier ones on the connection have their replies."""
        started = time.thread_time() if self._is_long else 0.0
        self._handler = self._routes[self._method, self._target].begin(self._fields, self._reply)
        if self._is_long:
            self._connection.rest(time.thread_time() - started, shares=True)
        if self._is_read:
            self._finish()
        elif not self.response_started:
            for name, value in self._fields:
                if name == b"expect" and value.lower() == b"100-continue":
                    self._connection.write(CONTINUE)
                    break

    @property
    def held_bytes(self) -> int:
        """Bytes of the body that wait for the endpoint, with their overhead."""
        return self._size + CHUNK_BYTES * len(self._body) if self._body else 0

    def feed(self, data: bytes, pieces: int) -> None:
        """Take what one read holds of the body."""
        if pieces > MANY_PIECES:  # libuv reads a busy connection up to 32 times in a turn, unless it is paused
            self._connection.rest(pieces * PIECE_SECONDS, shares=True)
        if self.response_started:
            return
        self._size += len(data)
        if self._handler is not None and self._size > self._handler.max_body_bytes:
            self._handler.too_long()
        else:
            self._body.append(data)

    def refuse_for_room(self) -> bool:
        """Reply that there is no room for more of the body; return False if this request has not been started."""
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

    def disconnect(self, answered: tuple[int, str] | None = None) -> None:
        """Abandon the request: nobody will read a reply. `answered` as in `Call.abandon`."""
        self.disconnected = True
        self._connection.observer.refusals.forget(self._write)
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
        is_short = (
            self._size < SHORT_BYTES
            and not self._is_long
            and b"content-encoding" not in [name for name, _ in self._fields]
        )
        started = 0.0 if is_short else time.thread_time()  # processor time, which a busy machine does not inflate
        self._connection.release(self)
        handler.finish(whole)
        if not is_short:
            self._connection.rest(time.thread_time() - started, shares=self._is_wrong)

    def _reply(self, status: int, headers: Fields, body: bytes, may_wait: bool) -> None:
        """Write head and body at once, or later if `may_wait` and the client is impatient. A reply that cannot be written, as for want of
        memory or with a control character in a header, ends the connection: nobody else would answer this request."""
        if self.disconnected:
            return
        try:
            self._put_together(status, headers, body)
            is_impatient = may_wait and self._connection.is_impatient()
            if not is_impatient or not self._connection.observer.refusals.hold(self._write):
                self._write()
        except Exception as error:
            log.error("fault", exc_info=error)
            self._connection.cut("fault")

    def _put_together(self, status: int, headers: Fields, body: bytes) -> None:
        """Make the bytes of the reply, and let go of the call. Raises RuntimeError for a control character."""
        if CONTROL.search(b"".join([value for _, value in headers])):
            raise RuntimeError("a header value holds a control character")
        fields = b"".join([b"%b: %b\r\n" % field for field in headers])
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        self.response_started = True
        self._is_wrong = 400 <= status < 500 and status != 429
        if self._handler is not None:
            self._ranks = self._handler.ranks and status < 400
            steps = self._handler.steps
            self._held = (steps.held_seconds() if steps else 0.0) + (0.0 if self._ranks else len(body) * COPY_SECONDS)
        self._handler = None  # free what the request holds now, not at the connection's next request
        self._bytes = b"".join((STATUS_LINES[status], self._connection.observer.date, fields, end, body))

    def _write(self) -> None:
        connection = self._connection
        if self.disconnected:
            return
        self.response_complete = True
        connection.release(self)
        data, self._bytes = self._bytes, b""
        connection.write(data)
        if self._is_wrong:
            connection.rest(max(self._held, REFUSED_SECONDS), shares=True)
        elif self._held:
            connection.rest(self._held, shares=not self._ranks)
        if not self.keep_alive:
            connection.end_with_reply()
        connection.on_response_complete()
