"""What an application may ask of a connection beyond ASGI: a whole reply in one write, and a call when the client disconnects.

It lies in the scope as `scope["extensions"]["ranker.direct"]`; another ASGI server has none, and plain messages do the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

DIRECT = "ranker.direct"


class Direct:
    """One request's side of its connection. It does what `send` and `receive` of uvicorn's cycle do, in fewer steps."""

    __slots__ = ("_cycle", "_on_disconnect")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.proxy(cycle)  # whose scope holds this: a circle would be left to the garbage collector
        self._on_disconnect: Callable[[], object] | None = None

    def reply(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write head and body at once; `headers` have lower-case names and the right length.

        It returns False and has done nothing where messages must be sent: for HEAD, where the reply has begun, where the client
        has disconnected or reads too slowly. Raises RuntimeError for a value that would break the head.
        """
        cycle = self._cycle
        if cycle.response_started or cycle.disconnected or cycle.flow.write_paused or cycle.scope["method"] == "HEAD":
            return False
        if HEADER_VALUE_RE.search(b"".join([value for _, value in headers])):
            raise RuntimeError("a header value holds a control character")
        fields = b"".join([b"%b: %b\r\n" % field for field in (*cycle.default_headers, *headers)])
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.transport.write(b"".join((STATUS_LINE[status], fields, end, body)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True

    def watch(self, on_disconnect: Callable[[], object] | None) -> None:
        """Call this once when the client disconnects, now if it has; None: no longer. The body must have been read."""
        self._on_disconnect = on_disconnect
        if on_disconnect is None:
            return
        if self._cycle.disconnected:
            self.disconnect()
        else:
            self._cycle.flow.resume_reading()  # else its end would not be seen after a long body

    def disconnect(self) -> None:
        """The client has disconnected. For the protocol."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        call, self._on_disconnect = self._on_disconnect, None
        if call is not None:
            call()
